"""Reward functions that take lists of answers (reward_manager=batch)."""

import dataclasses

import pytest

from rltrain.base.errors import RewardError
from rltrain.rewards.processes.slot import ScoringSlot

CALLS = [("a", "one", "1", {"index": 0}), ("b", "two", "2", {"index": 1}), ("a", "three", "3", {})]


@pytest.fixture
def batch_slot(custom):
    slots = []

    def make(body, timeout_s=1.0):
        code = f"def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0):\n    {body}\n"
        described = dataclasses.replace(custom(code, bonus=10), batch=True)
        slots.append(ScoringSlot(described, timeout_s))
        return slots[-1]

    yield make
    for slot in slots:
        slot.close()


def test_all_answers_go_into_one_call(batch_slot):
    slot = batch_slot("return [{'score': len(s) + bonus, 'calls': len(data_sources)} for s in solution_strs]")
    scores = slot.score_all(CALLS)
    assert [(score.value, score.status) for score in scores] == [(13.0, "ok"), (13.0, "ok"), (15.0, "ok")]
    assert [score.extras for score in scores] == [{"calls": 3.0}] * 3
    assert slot.score_truth(CALLS[0]).value == 13.0


def test_an_async_function_scores_all_answers_at_the_same_time(custom):
    code = """
        import asyncio
        async def judge(text):
            await asyncio.sleep(0.3)
            return len(text)
        async def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
            return await asyncio.gather(*map(judge, solution_strs))
    """
    with ScoringSlot(dataclasses.replace(custom(code), batch=True), timeout_s=0.25) as slot:
        assert [score.value for score in slot.score_all(CALLS)] == [3.0, 3.0, 5.0]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("return [1.0]", "rejected", "1 results for 3 answers"),
        ("return 5", "crashed", "not iterable"),
        ("raise ValueError('no such table')", "crashed", "no such table"),
        ("import time; time.sleep(60)", "timeout", "no score after 0.9 s"),
        ("import os; os._exit(3)", "crashed", "exit code 3"),
    ],
)
def test_a_failing_call_fails_all_its_answers_and_no_others(batch_slot, body, status, words):
    slot = batch_slot(f"if 'one' in solution_strs: {body}\n    return [0.5] * len(solution_strs)", timeout_s=0.3)
    scores = slot.score_all(CALLS)
    assert [score.status for score in scores] == [status] * 3
    assert all(words in score.error for score in scores)
    assert [score.value for score in slot.score_all(CALLS[1:])] == [0.5, 0.5]


def test_the_lengths_of_all_results_together_reject_none(batch_slot):
    slot = batch_slot("return [dict.fromkeys('abc', s) | {'score': 1.0} for s in solution_strs]")
    scores = slot.score_all([("a", "答案" * 128, "1", {})] * 256)
    assert {score.status for score in scores} == {"ok"}
    assert scores[255].extras["c"] == "答案" * 128


def test_one_bad_verdict_is_one_rejected_answer(batch_slot):
    slot = batch_slot("return [1.0, float('nan'), 'good']")
    assert [score.status for score in slot.score_all(CALLS)] == ["ok", "rejected", "rejected"]


def test_a_function_for_single_answers_is_refused(custom):
    single = dataclasses.replace(
        custom("def compute_score(data_source, solution_str, ground_truth, extra_info): return 1"), batch=True
    )
    with (
        ScoringSlot(single) as slot,
        pytest.raises(RewardError, match="data_sources, solution_strs, ground_truths, extra_infos"),
    ):
        slot.score_all(CALLS)
