"""The rollout correction in complete steps: weights, rejection, bypass."""

import pytest
import torch

from rltrain.common.columns.batch import Batch
from rltrain.common.columns.ragged import Ragged
from rltrain.config.schema.algorithm import AlgorithmConfig
from rltrain.workers.updates.token_advantages import token_advantages
from tests.trainer.steps import (
    CORRECTION,
    NO_KL,
    scored,
)


def test_importance_weights_are_truncated_ratios_to_the_engine(make):
    trainer = make(**{CORRECTION + "rollout_is": "token", CORRECTION + "rollout_is_threshold": "1.1"})
    batch, columns, numbers = scored(trainer)
    ratio = (columns.ragged("old_log_probs").values - batch.ragged("rollout_log_probs").values).exp()
    assert torch.allclose(columns.ragged("is_weights").values, ratio.clamp(max=1.1))
    assert numbers.moments["is_high"].total == int((ratio > 1.1).sum()) > 0


def test_rejected_tokens_leave_loss_and_denominators(make):
    trainer = make(**NO_KL, **{CORRECTION + "rollout_rs": "token_k1", CORRECTION + "rollout_rs_threshold": "1.1"})
    _, columns, numbers = scored(trainer)
    mask = columns.ragged("loss_mask")
    assert 0 < int(mask.values.sum()) < len(mask.values)
    assert numbers.per_sample["loss_tokens"].tolist() == mask.sum().long().tolist()
    tasks, update = [], trainer.worker.actor.update
    trainer.worker.actor.update = lambda batch, task: tasks.append(task) or update(batch, task)
    made = trainer.step(1)
    metrics, samples = made.metrics, made.samples
    counted = sum(mini.denominators.tokens for mini in tasks[0].mini_batches)
    assert counted == samples["loss_tokens"].sum() < samples["response_length"].sum()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
        1 - samples["loss_tokens"].sum() / samples["response_length"].sum()
    )


def test_rejection_changes_no_advantage():
    # The last token is rejected: it leaves the moments that whiten, but the reward on it is paid.
    values, mask = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([True, True, False])
    lengths = torch.tensor([3])
    columns = {"policy_tokens": lengths, "score": torch.ones(1), "values": Ragged(values, lengths)}
    cfg = AlgorithmConfig(adv_estimator="gae")
    for more in {}, {"loss_mask": Ragged(mask, lengths)}:
        found, numbers = token_advantages(Batch(columns | more), cfg, 0.0)
        assert found.ragged("advantages").values.tolist() == pytest.approx([0.9, 0.8, 0.7])
        assert numbers.moments["advantages"].count == (2 if more else 3)


def test_bypass_takes_the_ratio_to_the_engine_without_a_pass(make):
    trainer = make(**{CORRECTION + "bypass_mode": True})
    metrics = trainer.step(1).metrics
    assert "Actor.log_probs" not in trainer.group.calls
    assert "timing_s/old_log_prob" not in metrics
    # log r is what the engine is off, which is anything but 0.
    assert metrics["actor/pg_clipfrac"] > 0
    assert metrics["rollout/log_prob_gap/mean"] > 0.05
