"""The critic in whole steps."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rltrain.base.errors import NonFiniteError
from rltrain.trainer.progress import Progress
from rltrain.workers.results import UpdateNumbers
from rltrain.workers.tasks import SaveTask
from tests.trainer.steps import (
    ESTIMATOR,
    GAE,
    actor_weights,
    numbers_of,
    weights,
)


def test_before_critic_warmup_only_the_critic_learns(make):
    trainer = make(**{ESTIMATOR: "gae"}, trainer__critic_warmup=2, critic__optim__lr=1e-3)
    actor, critic = actor_weights(trainer), weights(trainer.worker.critic.model)
    metrics = trainer.step(1).metrics
    assert torch.equal(actor, actor_weights(trainer))
    assert not torch.equal(critic, weights(trainer.worker.critic.model))
    assert "timing_s/update_actor" not in metrics
    assert "actor/pg_loss" in trainer.step(2).metrics
    assert not torch.equal(actor, actor_weights(trainer))


def test_the_actor_s_schedule_begins_when_it_learns(make):
    actor = {f"actor_rollout_ref__actor__optim__{name}": value for name, value in (("lr", 0.3), ("lr_warmup_steps", 2))}
    trainer = make(**GAE, **actor, trainer__critic_warmup=3, trainer__total_training_steps=4,
                   critic__optim__lr_warmup_steps=2)  # fmt: skip
    metrics = [trainer.step(step).metrics for step in (1, 2, 3, 4)]
    assert [each.get("actor/lr") for each in metrics] == [None, None, pytest.approx(0.1), pytest.approx(0.2)]
    assert [each["critic/lr"] / 5e-3 for each in metrics] == pytest.approx([1 / 3, 2 / 3, 1, 1])


# At every run: gradients of the critic, tests/workers/test_ranks.py, and steps with one in tests/trainer/test_step.py.
@pytest.mark.long
def test_the_critic_learns_to_explain_the_returns(make):
    trainer = make(**{ESTIMATOR: "gae"}, trainer__critic_warmup=1000, trainer__total_training_steps=1000,
                   critic__optim__lr=3e-3, critic__ppo_epochs=4, twist=lambda row, score: float(row % 2))  # fmt: skip
    explained = [trainer.step(1).metrics["critic/vf_explained_var"]]
    assert explained[0] == pytest.approx(0.0, abs=0.05)
    # The median: a batch whose returns are all alike has next to no variance to explain.
    while len(explained) < 5 or np.median(explained[-5:]) < 0.9:
        assert len(explained) < 20, explained
        explained.append(trainer.step(len(explained) + 1).metrics["critic/vf_explained_var"])


def test_actor_and_critic_go_on_from_a_checkpoint_bit_for_bit(make, tmp_path):
    whole = make(**{ESTIMATOR: "gae"})
    for step in (1, 2):
        whole.step(step)
    for name in ("actor", "critic"):
        getattr(whole, name).begin_save(SaveTask(str(tmp_path / name))).finish()
    expected = whole.step(3).metrics
    resumed = make(**{ESTIMATOR: "gae"})
    for name in ("actor", "critic"):
        getattr(resumed, name).load(str(tmp_path / name), False)
    resumed.restore(Progress(2, None))
    # The twist counts answers, so it is brought to where the first trainer was.
    for _ in range(32):
        resumed.pool.twist(0, 0.0)
    found = resumed.step(3).metrics
    assert numbers_of(found) == numbers_of(expected)
    assert torch.equal(weights(whole.worker.critic.model), weights(resumed.worker.critic.model))
    assert torch.equal(actor_weights(whole), actor_weights(resumed))


def test_a_critic_may_start_from_a_reward_model(make, reward_model):
    trainer = make(**{ESTIMATOR: "gae"}, critic__model__path=reward_model)
    found = weights(trainer.worker.critic.model)
    assert torch.equal(found[-16:], load_file(reward_model / "model.safetensors")["score.weight"].flatten())


@pytest.mark.parametrize("resumed", [False, True])
def test_a_critic_that_is_never_finite_stops_the_run(make, resumed):
    """Also where every step is made by another start of the command."""
    progress = Progress()
    for step in (1, 2, 3):
        if step == 1 or resumed:
            trainer = make(**{ESTIMATOR: "gae"}, trainer__on_nonfinite="skip")
            with torch.no_grad():
                trainer.worker.critic.model.score.weight.to_local().fill_(float("nan"))
            trainer.actor.update = lambda *arguments, **named: [UpdateNumbers(np.zeros(1), np.zeros(1))]
            trainer.restore(dataclasses.replace(progress, metrics=json.loads(json.dumps(progress.metrics))))
        if step == 3:
            with pytest.raises(NonFiniteError, match="critic: 3 steps in a row"):
                trainer.step(step)
        else:
            assert trainer.step(step).metrics["critic/skipped_in_a_row"] == step
            progress = trainer.progress
