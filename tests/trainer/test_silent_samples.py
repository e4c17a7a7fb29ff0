"""Samples without advantage are skipped in the update if that changes nothing."""

import pytest
import torch

from rltrain.config.schema import declarations
from rltrain.config.schema.declarations import LossTraits
from tests.distance import distance
from tests.trainer.steps import (
    ACTOR,
    LOSS,
    NO_KL,
    Moved,
)


def test_leaving_silent_samples_out_changes_no_weight(make, monkeypatch):
    """Rows below 3 have equal scores, so complete groups, and complete mini-batches, have no advantage."""

    def run(**extra):
        trainer = make(**NO_KL, **extra, twist=lambda row, score: 1.0 if row < 6 else score)
        computed = []
        update = trainer.worker.actor.update
        trainer.worker.actor.update = lambda batch, task: computed.append(len(batch)) or update(batch, task)
        moved = Moved(trainer)
        metrics = [trainer.step(step).metrics for step in (1, 2, 3)]
        return *moved.by_role(), metrics, sum(computed)

    skipping, metrics, few = run()
    monkeypatch.setitem(declarations.POLICY_LOSSES, "vanilla", LossTraits(silent_at_zero=False))
    complete, all_metrics, many = run()
    assert few < many == 48
    assert sum(each["perf/update_tokens_skipped"] for each in metrics) > 0
    assert all(each["perf/update_tokens_skipped"] == 0 for each in all_metrics)
    assert distance(skipping, complete) < 1e-4
    for one, other in zip(metrics, all_metrics, strict=True):
        assert one["actor/pg_loss"] == pytest.approx(other["actor/pg_loss"], abs=1e-6)
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], abs=1e-5)


@pytest.mark.parametrize("kind", ["full", "k1", "k3"])
@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_the_rounding_of_a_kl_in_the_reward_teaches_nothing(make, kind, estimator):
    """In the first step the reference is the policy, so all rewards are equal, however the KL is rounded."""
    keys = {"algorithm__use_kl_in_reward": True, "algorithm__kl_penalty": kind, "algorithm__adv_estimator": estimator}
    trainer = make(**NO_KL, **keys, twist=lambda row, score: 1.0)
    log_probs = trainer.worker.actor.ref_log_probs

    def rounded(batch, micro_sizes):
        columns, numbers = log_probs(batch, micro_sizes)
        kl = columns["ref_kl"]
        kl.values.add_(5e-9 * torch.linspace(-1, 1, len(kl.values)))
        numbers.per_sample["kl_sum"] = kl.sum().double().numpy()
        return columns, numbers

    trainer.worker.actor.ref_log_probs = rounded
    assert trainer.step(1).metrics["actor/grad_norm"] == 0


@pytest.mark.parametrize("needs", [{ACTOR + "use_kl_loss": True}, {ACTOR + "entropy_coeff": 0.01}, {LOSS: "kl_cov"}])
def test_samples_without_advantage_stay_for_a_kl_or_an_entropy(make, needs):
    trainer = make(**(NO_KL | needs), twist=lambda row, score: 1.0)
    assert trainer.step(1).metrics["perf/update_tokens_skipped"] == 0
