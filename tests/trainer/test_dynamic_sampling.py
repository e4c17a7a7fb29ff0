"""Dynamic sampling in whole steps: groups whose answers differ."""

import numpy as np
import pytest

from rltrain.trainer.timing import StepTimer
from tests.trainer.steps import (
    with_failures,
)


def test_dynamic_sampling_fills_the_batch_with_mixed_groups(make):
    trainer = make(algorithm__filter_groups__enable=True, algorithm__filter_groups__metric="score",
                   twist=lambda row, score: score if row % 2 else 1.0)  # fmt: skip
    kept = []
    collect = trainer.experience.collect
    trainer.experience.collect = lambda timer: kept.append(collect(timer)) or kept[-1]
    metrics = trainer.step(1).metrics
    samples = kept[0][0]
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
    assert "0 of 4 groups differ after 2 rounds" in caplog.text
    assert metrics["actor/pg_loss"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_single_answers_are_no_flat_groups_and_teach_their_score(make, estimator):
    trainer = make(algorithm__filter_groups__enable=True, actor_rollout_ref__rollout__n=1,
                   algorithm__adv_estimator=estimator, twist=lambda row, score: 1.0)  # fmt: skip
    kept = []
    collect = trainer.experience.collect
    trainer.experience.collect = lambda timer: kept.append(collect(timer)) or kept[-1]
    metrics = trainer.step(1).metrics
    assert (metrics["filter_groups/rounds"], metrics["filter_groups/prompts_filled_up"]) == (1, 0)
    assert metrics["perf/update_tokens_skipped"] == 0
    assert kept[0][0]["advantage"] == pytest.approx(kept[0][0]["score"], rel=1e-5)
    assert metrics["actor/grad_norm"] > 0


def test_flat_rounds_hold_no_answers_that_nothing_needs(make):
    # Half of the batch a round: the first two fill it up, and the others are let go.
    trainer = make(algorithm__filter_groups__enable=True, algorithm__filter_groups__max_num_gen_batches=5,
                   data__gen_batch_size=2)  # fmt: skip
    rounds, one = [], trainer.experience._round
    trainer.experience._round = lambda timer, *_: rounds.append(one(timer)) or rounds[-1]
    with_failures(trainer, acc=0.0)
    assert trainer.step(1).metrics["filter_groups/prompts_filled_up"] == 4
    assert [bool(each.samples.parts_with("text")) for each in rounds] == [True, True, False, False, False]


@pytest.mark.parametrize("metric", ["acc", "score", "seq_reward"])
def test_dynamic_sampling_may_compare_reward_model_scores(make, reward_model, metric):
    trainer = make(reward_model__enable=True, reward_model__model__path=reward_model,
                   algorithm__filter_groups__enable=True, algorithm__filter_groups__metric=metric)  # fmt: skip
    metrics = trainer.step(1).metrics
    assert metrics["filter_groups/rounds"] == 1
    assert "reward/rule/mean" not in metrics


@pytest.mark.parametrize(("metric", "useful"), [("acc", 0), ("score", 0), ("seq_reward", 4), ("seq_final_reward", 4)])
def test_only_a_seq_reward_counts_penalties(make, metric, useful):
    trainer = make(algorithm__filter_groups__enable=True, algorithm__filter_groups__metric=metric,
                   reward_model__reward_manager="dapo", reward_model__overlong_buffer__enable=True,
                   reward_model__overlong_buffer__len=4, twist=lambda row, score: 1.0)  # fmt: skip
    samples = trainer.experience._round(StepTimer()).samples
    samples.update({"scorer/acc": np.ones(16), "score": np.arange(16.0)})
    assert len(trainer.experience._useful_prompts(samples)) == useful


def test_a_failed_answer_does_not_make_a_group_useful(make):
    trainer = make(
        algorithm__filter_groups__enable=True,
        algorithm__filter_groups__max_num_gen_batches=1,
        twist=lambda row, score: 0.0,
    )
    with_failures(trainer, 0, 5, acc=0.0)
    assert trainer.step(1).metrics["filter_groups/prompts_filled_up"] == 4
