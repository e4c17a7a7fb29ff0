"""Distillation from a larger model: complete steps and their metrics."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rltrain.common.columns import names as c
from rltrain.runtime.samples import assemble
from tests.batches import prompt_lengths, rows_of
from tests.distance import distance
from tests.tiny import save_tiny_model
from tests.trainer.steps import ACTOR, DISTILLATION, ESTIMATOR, NO_KL, ONE_STEP, TEACHER, actor_weights

ALONE = {"distillation__enabled": True, DISTILLATION + "use_task_rewards": False, **NO_KL}
EXACT = ["reverse_kl", "forward_kl", "jsd"]
MODE = DISTILLATION + "loss_mode"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model with the same tokens, other weights and twice the width."""
    return save_tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=7, width=64)


@pytest.fixture
def taught(process_group, tiny_trainer, teacher):
    def make(**changes):
        return tiny_trainer(**{**ALONE, TEACHER: teacher, **changes})

    return make


def batch_of(samples, *columns):
    request = samples.request(np.arange(len(samples)), columns)
    return assemble(request, [part.ref for part in request.parts])


def distributions(folder, batch, temperature) -> list[torch.Tensor]:
    """Return the log softmax of transformers' own forward at each token of the responses, by sample."""
    model, logs = AutoModelForCausalLM.from_pretrained(folder), []
    for row, prompt_length in zip(rows_of(batch), prompt_lengths(batch), strict=True):
        with torch.no_grad():
            logits = model(row[None].long()).logits[0, prompt_length - 1 : -1].double()
        logs.append(torch.log_softmax(logits / temperature, -1))
    return logs


@pytest.mark.parametrize("mode", EXACT)
def test_an_exact_distance_is_that_of_the_whole_distributions(taught, teacher, tiny_model, mode):
    trainer = taught(**{MODE: mode, **ONE_STEP}, actor_rollout_ref__rollout__temperature=0.7)
    answered = trainer.step(1)
    batch = batch_of(answered.samples, *c.PROMPT_AND_ANSWER)
    ours, theirs = (torch.cat(distributions(folder, batch, 0.7)) for folder in (tiny_model, teacher))
    log_m = (ours.exp() + theirs.exp()).log() - torch.log(torch.tensor(2.0).double())

    def kl(log_p, log_q):
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    jsd = (kl(ours, log_m) + kl(theirs, log_m)) / 2
    expected = {"reverse_kl": kl(ours, theirs), "forward_kl": kl(theirs, ours), "jsd": jsd}[mode]
    metrics = answered.metrics
    assert metrics["distillation/loss"] == pytest.approx(float(expected.mean()), rel=1e-4)
    assert metrics["distillation/loss"] > 0.01
    assert ("distillation/kl" in metrics) == (mode == "reverse_kl")
    # Whole distributions are compared within the update, so no pass is made.
    assert "timing_s/teacher" not in metrics
    assert "actor/pg_loss" not in metrics
    assert not trainer.worker.actor.inference_models.models["teacher"].training


def test_an_estimate_has_a_pass_that_reads_the_teacher(taught, teacher):
    trainer = taught(**{MODE: "k3", **ONE_STEP}, actor_rollout_ref__rollout__temperature=0.7)
    answered = trainer.step(1)
    batch = batch_of(answered.samples, *c.PROMPT_AND_ANSWER, c.TEACHER_LOG_PROBS)
    labels = batch.ragged(c.RESPONSE).values.long()
    expected = torch.cat(distributions(teacher, batch, 0.7)).gather(-1, labels[:, None])[:, 0]
    assert distance(batch.ragged(c.TEACHER_LOG_PROBS).values, expected) < 1e-4
    assert answered.metrics["timing_s/teacher"] > 0
    assert answered.metrics["distillation/kl"] != 0
    assert trainer.plan.passes.describe(1) == "gen, reward, teacher, adv, update_actor"


def test_alone_no_reward_moves_the_policy_and_no_critic_is_made(process_group, twisted_trainer, teacher):
    changes, moved = {**ALONE, TEACHER: teacher, MODE: "forward_kl", ESTIMATOR: "gae"}, []
    for sign in (1.0, -1.0):
        made = twisted_trainer(lambda row, score, sign=sign: sign * score, **changes)
        assert made.critic is None
        assert "critic/advantages/mean" not in made.step(1).metrics
        moved.append(actor_weights(made))
    assert torch.equal(*moved)


def test_a_token_that_the_teacher_lacks_has_no_distance(process_group, tiny_trainer, tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    rows = model.config.vocab_size - 8
    model.resize_token_embeddings(rows)
    model.save_pretrained(tmp_path)
    trainer = tiny_trainer(**{**ALONE, TEACHER: tmp_path, MODE: "k3", **ONE_STEP})
    answered = trainer.step(1)
    values = batch_of(answered.samples, c.RESPONSE, c.TEACHER_LOG_PROBS)
    lacking = values.ragged(c.RESPONSE).values >= rows
    assert torch.equal(values.ragged(c.TEACHER_LOG_PROBS).values.isnan(), lacking)
    assert answered.metrics["distillation/unknown_tokens"] == pytest.approx(float(lacking.float().mean()))
    assert lacking.any()
    assert np.isfinite(answered.metrics["distillation/loss"])


@pytest.mark.parametrize("mode", ["reverse_kl", "k3"])
def test_alone_no_pass_is_made_for_old_log_probs_that_nobody_reads(taught, mode):
    """This includes the second of two mini-batches. Entropy and the gap to the engine come from the update."""
    moved, metrics = [], []
    for recompute in ("auto", "always"):
        trainer = taught(**{MODE: mode, ACTOR + "recompute_old_log_prob": recompute})
        metrics += [trainer.step(step).metrics for step in (1, 2)][1:]
        moved.append(actor_weights(trainer))
    without, with_pass = metrics
    assert "timing_s/old_log_prob" not in without
    assert "timing_s/old_log_prob" in with_pass
    assert torch.equal(*moved)
    assert {"actor/entropy", "rollout/log_prob_gap/mean"} <= without.keys()
