"""Old log-probs: the samples of the pass, and the results of the update's own forward for the others."""

import pytest

from tests.distance import distance
from tests.trainer.steps import (
    ACTOR,
    ESTIMATOR,
    GAE,
    LOSS,
    NO_KL,
    ONE_STEP,
    VARIANTS,
    Moved,
    numbers_of,
)

ALWAYS = {ACTOR + "recompute_old_log_prob": "always"}


WITHOUT_PASS = {
    "two steps": {}, "one step": ONE_STEP, "gae": GAE, "tis": VARIANTS["tis"], "filter": VARIANTS["filter"],
    "cut": {ACTOR + "ppo_max_token_len_per_gpu": 25},
}  # fmt: skip


def scored_samples(trainer) -> list[int]:
    """A list that grows by the number of samples of every old_log_prob pass."""
    sizes: list[int] = []
    log_probs = trainer.worker.actor.log_probs
    trainer.worker.actor.log_probs = lambda batch, cut: sizes.append(len(batch)) or log_probs(batch, cut)
    return sizes


# Every run of the suite has those that take roads of their own.
ROADS = ("two steps", "one step", "gae", "cut")


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.long] * (name not in ROADS)) for name in WITHOUT_PASS]
)
def test_old_log_probs_may_come_from_the_updates_own_forward(make, variant):
    keys = WITHOUT_PASS[variant]
    found = []
    for choice in ({}, ALWAYS):
        trainer = make(**keys, **choice)
        sizes, moved = scored_samples(trainer), Moved(trainer)
        found.append(([numbers_of(trainer.step(step).metrics) for step in (1, 2)], moved.by_role(), sizes))
    (metrics, mine, few), (all_metrics, theirs, many) = found
    assert many == [16, 16]
    assert few == ([] if keys.get(ACTOR + "ppo_mini_batch_size") == 4 else [8, 8])
    assert all(distance(*pair) < 1e-4 for pair in zip(mine, theirs, strict=True))
    for one, other in zip(metrics, all_metrics, strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, abs=2e-5, rel=2e-4)


def test_one_optimizer_step_has_ratio_one_and_a_free_phase(make):
    metrics = make(**ONE_STEP, **NO_KL).step(1).metrics
    assert metrics["actor/ppo_kl"] == metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["actor/entropy"] > 0
    assert "timing_s/old_log_prob" in metrics
    assert "perf/old_log_prob_throughput" not in metrics


@pytest.mark.parametrize("needs", [
    {"algorithm__use_kl_in_reward": True}, {LOSS: "kl_cov"}, {ACTOR + "ppo_epochs": 2}, VARIANTS["rejection"],
    VARIANTS["sequence is"], {ESTIMATOR: "gae", "trainer__critic_warmup": 2},
])  # fmt: skip
def test_the_pass_covers_all_samples_where_something_needs_them(make, needs):
    trainer = make(**needs)
    sizes = scored_samples(trainer)
    trainer.step(1)
    assert sizes == [16]
