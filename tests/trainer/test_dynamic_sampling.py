"""Dynamic sampling in complete steps: groups with different scores."""

import numpy as np
import pytest


def test_dynamic_sampling_fills_the_batch_with_mixed_groups(make):
    trainer = make(algorithm__filter_groups__enable=True, algorithm__filter_groups__metric="score",
                   twist=lambda row, score: score if row % 2 else 1.0)  # fmt: skip
    answered = trainer.step(1)
    metrics, samples = answered.metrics, answered.samples
    assert metrics["filter_groups/rounds"] >= 2
    assert metrics["filter_groups/prompts_filled_up"] == 0
    assert set(samples["row"] % 2) == {1}
    assert all(np.ptp(group) > 0 for group in samples["score"].reshape(-1, 4))
    assert metrics["filter_groups/prompts_generated"] - metrics["filter_groups/prompts_thrown_away"] == 4
    assert trainer.progress.batches_drawn == metrics["filter_groups/rounds"]


def test_dynamic_sampling_is_bounded_and_fills_up(make, caplog):
    trainer = make(algorithm__filter_groups__enable=True, algorithm__filter_groups__max_num_gen_batches=2,
                   algorithm__filter_groups__metric="score", twist=lambda row, score: 1.0)  # fmt: skip
    metrics = trainer.step(1).metrics
    assert (metrics["filter_groups/rounds"], metrics["filter_groups/prompts_filled_up"]) == (2, 4)
    assert "0 of 4 groups are informative after 2 rounds" in caplog.text
    assert metrics["actor/pg_loss"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_single_answers_are_no_flat_groups_and_teach_their_score(make, estimator):
    trainer = make(algorithm__filter_groups__enable=True, actor_rollout_ref__rollout__n=1,
                   algorithm__adv_estimator=estimator, twist=lambda row, score: 1.0)  # fmt: skip
    answered = trainer.step(1)
    metrics, samples = answered.metrics, answered.samples
    assert (metrics["filter_groups/rounds"], metrics["filter_groups/prompts_filled_up"]) == (1, 0)
    assert metrics["perf/update_tokens_skipped"] == 0
    assert samples["advantage"] == pytest.approx(samples["score"], rel=1e-5)
    assert metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize(("metric", "flat"), [("score", True), ("seq_reward", False), ("seq_final_reward", False)])
def test_only_a_seq_reward_counts_penalties(make, metric, flat):
    trainer = make(algorithm__filter_groups__enable=True, algorithm__filter_groups__metric=metric,
                   algorithm__filter_groups__max_num_gen_batches=1,
                   reward_model__reward_manager="dapo", reward_model__overlong_buffer__enable=True,
                   reward_model__overlong_buffer__len=4)  # fmt: skip
    trainer.pool.twist = lambda row, score: 1.0
    assert (trainer.step(1).metrics["filter_groups/prompts_filled_up"] == 4) == flat
