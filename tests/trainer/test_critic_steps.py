"""The critic in complete steps."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rltrain.common.columns import names as c
from rltrain.common.errors import NonFiniteError
from rltrain.runtime.samples import assemble
from rltrain.trainer.progress import Progress
from rltrain.workers.interface.results import UpdateNumbers
from tests.trainer.steps import (
    ESTIMATOR,
    GAE,
    actor_weights,
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


def test_a_critic_may_start_from_a_reward_model(make, reward_model):
    trainer = make(**{ESTIMATOR: "gae"}, critic__model__path=reward_model)
    found = weights(trainer.worker.critic.model)
    assert torch.equal(found[-16:], load_file(reward_model / "model.safetensors")["score.weight"].flatten())


def test_a_critic_reads_its_last_token_for_those_that_pad_a_larger_head(make, tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    rows = model.config.vocab_size - 8
    model.resize_token_embeddings(rows)
    model.save_pretrained(tmp_path)
    done = make(**GAE, critic__model__path=tmp_path).step(1)
    request = done.samples.request(np.arange(len(done.samples)), [c.RESPONSE])
    assert (assemble(request, [part.ref for part in request.parts]).ragged(c.RESPONSE).values >= rows).any()
    assert np.isfinite(done.metrics["critic/vf_loss"])


@pytest.mark.parametrize("resumed", [False, True])
def test_a_critic_that_is_never_finite_stops_the_run(make, resumed):
    """This includes a run in which every step is made by another start of the command."""
    progress = Progress()
    for step in (1, 2, 3):
        if step == 1 or resumed:
            trainer = make(**{ESTIMATOR: "gae"}, trainer__on_nonfinite="skip")
            with torch.no_grad():
                trainer.worker.critic.model.score.weight.to_local().fill_(float("nan"))
            trainer.actor.update = lambda *arguments, **named: [UpdateNumbers(np.zeros(2), np.zeros(2))]
            trainer.restore(dataclasses.replace(progress, metrics=json.loads(json.dumps(progress.metrics))))
        if step == 3:
            with pytest.raises(NonFiniteError, match="critic: 3 steps in a row"):
                trainer.step(step)
        else:
            assert trainer.step(step).metrics["critic/skipped_in_a_row"] == step
            progress = trainer.progress
