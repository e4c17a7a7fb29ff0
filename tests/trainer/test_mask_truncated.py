"""Truncated responses are excluded from the loss, and stay in the baseline (`algorithm.mask_truncated`)."""

import numpy as np
import pytest
import torch

from rltrain.common.columns import names as c
from tests.distance import distance
from tests.trainer.steps import ACTOR, ESTIMATOR, GAE, LOSS, NO_KL, ONE_STEP, Moved, actor_weights

MASK = {"algorithm__mask_truncated": True}
# Of 4 prompts with 4 answers each: some of every group, all but one of the second.
CUT = [1, 2, 4, 5, 6, 9, 15]
CORRECTED = {"algorithm__rollout_correction__rollout_rs": "token_k1",
             "algorithm__rollout_correction__rollout_rs_threshold": "1.2"}  # fmt: skip


def stepped(make, cut: list[int], steps: int = 1, **changes):
    """Return a trainer after some steps in which these responses were truncated, its weights' movement, and the last
    step."""
    trainer = make(**changes)
    collect = trainer.experience.collect

    def collected(*arguments):
        samples, metrics = collect(*arguments)
        truncated = np.zeros(len(samples), dtype=bool)
        truncated[cut] = True
        scores = np.arange(len(samples)) * 0.37 % 1.0
        samples.update({c.TRUNCATED: truncated, c.SCORE: scores, c.REWARD: scores.copy(), c.RULE_SCORE: scores.copy()})
        return samples, metrics

    trainer.experience.collect = collected
    moved = Moved(trainer)
    for step in range(1, steps + 1):
        answered = trainer.step(step)
    return trainer, moved.by_role(), answered


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_loss_is_that_of_the_others_over_their_counts(make, mode):
    """Before the first optimizer step the ratio is 1, so the loss of a token is minus the advantage of its response."""
    changes = MASK | ONE_STEP | NO_KL | {ACTOR + "loss_agg_mode": mode}
    _, _, answered = stepped(make, CUT, **changes)
    scores = (np.arange(16) * 0.37 % 1.0).reshape(4, 4)
    # GRPO, with the cut answers in mean and deviation.
    advantages = ((scores - scores.mean(1, keepdims=True)) / (scores.std(1, ddof=1, keepdims=True) + 1e-6)).ravel()
    counts = ~np.isin(np.arange(16), CUT)
    advantages, lengths = advantages * counts, answered.samples[c.RESPONSE_LENGTH]
    expected = -{
        "token-mean": (advantages * lengths).sum() / lengths[counts].sum(),
        "token-sum": (advantages * lengths).sum(),
        "seq-mean-token-mean": advantages.sum() / counts.sum(),
        "seq-mean-token-sum": (advantages * lengths).sum() / counts.sum(),
    }[mode]
    assert answered.metrics["actor/pg_loss"] == pytest.approx(expected, rel=1e-4)
    assert answered.samples[c.ADVANTAGE] == pytest.approx(advantages)
    assert answered.metrics["response/truncated_masked"] == len(CUT)


def test_whitening_counts_no_token_of_a_cut_answer(make):
    changes = MASK | ONE_STEP | NO_KL | {ESTIMATOR: "reinforce_plus_plus_baseline"}
    samples = stepped(make, CUT, **changes)[2].samples
    lengths = samples[c.RESPONSE_LENGTH] * ~np.isin(np.arange(16), CUT)
    assert np.average(samples[c.ADVANTAGE], weights=lengths) == pytest.approx(0, abs=1e-9)


@pytest.mark.few(3)
@pytest.mark.parametrize("changes", [{}, GAE, CORRECTED, {ESTIMATOR: "optimal_token_baseline"}, {LOSS: "real"}])
def test_weights_do_not_depend_on_the_cut_into_micro_batches(make, changes):
    _, one, answered = stepped(make, CUT, **MASK, **changes)
    _, other, again = stepped(make, CUT, **MASK, **changes, **{ACTOR + "ppo_max_token_len_per_gpu": 25})
    assert distance(one, other) < 1e-4
    assert answered.metrics["actor/loss"] == pytest.approx(again.metrics["actor/loss"], abs=1e-5)
    # And they are other weights than without the key.
    assert distance(one, stepped(make, CUT, **changes)[1]) > 1e-2


def test_nothing_of_a_cut_answer_but_its_reward_moves_a_weight(make, monkeypatch):
    """KL, entropy and critic exclude its tokens."""
    trainer, *_ = stepped(make, CUT, **MASK, **GAE)
    actor, critic, rows = trainer.worker.actor.update, trainer.worker.critic.update, []
    trainer.worker.actor.update = lambda batch, *rest: rows.append(len(batch)) or actor(batch, *rest)
    trainer.worker.critic.update = lambda batch, *rest: rows.append(len(batch)) or critic(batch, *rest)
    trainer.step(2)
    assert rows == [16 - len(CUT)] * 2


@pytest.mark.parametrize("estimator", ["grpo", "gae", "reinforce_plus_plus"])
def test_without_an_answer_that_ended_no_step_is_made_and_that_is_said(make, caplog, estimator):
    """Momentum and weight decay must not change the weights either."""
    decay = {ACTOR + "optim__weight_decay": 0.5, "critic__optim__weight_decay": 0.5}
    trainer, moved, answered = stepped(make, list(range(16)), **MASK, **decay, **{ESTIMATOR: estimator})
    assert all(not part.any() for part in moved)
    assert answered.metrics["actor/steps_empty"] == 2
    assert answered.metrics["actor/steps_skipped"] == 0
    assert answered.metrics["actor/steps_held"] == 1
    assert "actor: 2 of 2 mini-batches have no token that counts in the loss" in caplog.text
    # One of two: the other is a step as ever.
    caplog.clear()
    before = actor_weights(trainer)
    trainer.experience.collect, collect = (lambda *rest: half(collect(*rest))), trainer.experience.collect
    metrics = trainer.step(2).metrics
    assert metrics["actor/steps_empty"] == 1
    assert metrics["actor/steps_held"] == 1
    assert not torch.equal(before, actor_weights(trainer))
    assert "actor: 1 of 2 mini-batches" in caplog.text


def half(collected):
    samples, metrics = collected
    samples.update({c.TRUNCATED: np.arange(len(samples)) < len(samples) // 2})
    return samples, metrics
