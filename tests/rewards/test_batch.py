"""Reward functions that take lists of responses (reward_manager=batch)."""

import dataclasses

import pytest

from rltrain.common.errors import RewardError
from rltrain.rewards.processes.slot import ScoringSlot
from tests.clock import PATIENCE_S

CALLS = [("a", "one", "1", {"index": 0}), ("b", "two", "2", {"index": 1}), ("a", "three", "3", {})]


@pytest.fixture
def batch_slot(custom):
    slots = []

    def make(body, timeout_s=PATIENCE_S, prefix=""):
        code = f"{prefix}def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0):\n"
        described = dataclasses.replace(custom(f"{code}    {body}\n", bonus=10), batch=True)
        slots.append(ScoringSlot(described, timeout_s))
        return slots[-1]

    yield make
    for slot in slots:
        slot.close()


@pytest.mark.parametrize("prefix", ["", "async "])
def test_all_answers_go_into_one_call(batch_slot, prefix):
    body = "return [{'score': len(s) + bonus, 'calls': len(data_sources)} for s in solution_strs]"
    slot = batch_slot(body, prefix=prefix)
    scores = slot.score_all(CALLS)
    assert [(score.value, score.status) for score in scores] == [(13.0, "ok"), (13.0, "ok"), (15.0, "ok")]
    assert [score.extras for score in scores] == [{"calls": 3.0}] * 3
    assert slot.score_truth(CALLS[0]).value == 13.0


@pytest.mark.parametrize(
    ("body", "timeout_s", "status", "words"),
    [
        ("return [1.0]", PATIENCE_S, "rejected", "1 results for 3 responses"),
        ("return 5", PATIENCE_S, "crashed", "not iterable"),
        ("import signal; signal.pause()", 0.3, "timeout", "no score after 0.9 s"),
    ],
)
def test_a_failing_call_fails_all_its_answers(batch_slot, body, timeout_s, status, words):
    scores = batch_slot(body, timeout_s).score_all(CALLS)
    assert [score.status for score in scores] == [status] * 3
    assert all(words in score.error for score in scores)


def test_the_lengths_of_all_results_together_reject_none(batch_slot):
    slot = batch_slot("return [dict.fromkeys('abc', s) | {'score': 1.0} for s in solution_strs]")
    scores = slot.score_all([("a", "答案" * 128, "1", {})] * 256)
    assert {score.status for score in scores} == {"ok"}
    assert scores[255].extras["c"] == "答案" * 128


def test_one_bad_verdict_is_one_rejected_answer(batch_slot):
    slot = batch_slot("return [1.0, float('nan'), 'good']")
    assert [score.status for score in slot.score_all(CALLS)] == ["ok", "rejected", "rejected"]


def test_a_function_for_single_answers_is_refused(custom):
    single = dataclasses.replace(custom("def compute_score(data_source, solution_str): return 1"), batch=True)
    with ScoringSlot(single) as slot, pytest.raises(RewardError, match="data_sources, solution_strs, ground_truths"):
        slot.score_all(CALLS)
