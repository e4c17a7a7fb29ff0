import inspect
import json

import pytest

from rltrain.common.errors import RewardError
from rltrain.rewards.scorers import arithmetic, gsm8k, reasoning_gym
from rltrain.rewards.scorers.registry import check_sources, find_scorer


def test_gsm8k_flexible_takes_the_last_number():
    assert gsm8k.extract_answer("first 7, then $1,072.", "flexible") == "1072"
    assert gsm8k.extract_answer("none here, ...", "flexible") is None


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("19", "19", 1),
        ("12 + 7 = 19.", "19", 1),
        ("= 19 apples and 3 pears", "19", 1),
        ("first 18, no: 19", "19", 1),
        ("12+7=19, I mean 18", "19", 1),
        ("12+7=?", "7", 0),
        ("19.0", "19", 0),
        ("019", "19", 1),
        ("1,019", "1019", 1),
        ("-5", "-5", 1),
        ("3-8", "8", 1),
        ("5", "-5", 0),
        ("-0", "0", 1),
        ("190", "19", 0),
        ("", "19", 0),
        ("19", 19, 1),
    ],
)
def test_arithmetic_wants_the_exact_integer(answer, truth, score):
    assert arithmetic.arithmetic(answer, truth, {}) == score


SIZE = 100_000
HOSTILE = [
    "####" * SIZE + " 7",
    "=" * SIZE,
    "9" * SIZE,
    "=" + "9." * SIZE,
    "\\boxed{" * SIZE,
    "\\boxed{" + "{" * SIZE,
    "\\boxed{" + "\\frac" * 90 + "}",
    "\\boxed{" + "\\text{" * 70 + "}" * 70 + "}",
    "\\boxed{" + " " * 500 + "}",
    "<answer>" * SIZE,
    "<answer>" * SIZE + "</answer>" * SIZE,
    " " * SIZE,
    "\x00" * SIZE,
    "²" * SIZE,
    "\\boxed{²}",
    "\ud800" * SIZE,
    "<think>" + "</think>" * SIZE,
    "<think></think>" + "\\boxed{" * SIZE,
    "Answer" * SIZE,
    "answer is" * SIZE,
    "final answer is" * SIZE + "I hope it is correct" * SIZE,
    "[" * SIZE + "]" * SIZE,
    "\\boxed{" + "(" * 500 + "}",
    "\\boxed{" + "1," * 250 + "}",
    "\\boxed{" + "1\\cup" * 100 + "}",
    "\\boxed{1" + " " * 480 + "x}",
    "\\boxed{" + "\\begin{pmatrix}" * 30 + "}",
    "\\boxed{" + "(" * 120 + "1" + "),(" * 120 + "}",
    "\\boxed{" + "\\{" * 60 + "1" + "\\}" * 60 + "}",
    "\\boxed{1e999}",
    "\\boxed{" + "9" * 60 + "e999}",
    "Answer: " + "9" * 290,
    "<answer>" + "the " * SIZE + "</answer>",
    "\\boxed{__import__('os')._exit(9)}",
]


SOURCES = ("openai/gsm8k", "rltrain/arithmetic", "lighteval/MATH", "math_dapo", "boba", "hiyouga/geometry3k")
SOURCES += ("virl39k", "clevr_count_70k", "searchR1_nq", "qa_f1/x", "gpqa_diamond", "logicvista", "mathvista_mini")
SOURCES += ("mathvision_mini", "dynamath", "wemath_mini", "reasoning_gym/chain_sum")


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_score_nothing_before_the_test_times_out(text):
    """Quadratic work on such a long text would take minutes."""
    entry = {"entry": json.dumps({"question": "", "answer": "7.5", "metadata": {}}), "task": "chain_sum"}
    reasoning_gym.check_task("chain_sum")
    for source in SOURCES:
        given = find_scorer(source)(text, "7.5", entry)
        assert (given["score"] if isinstance(given, dict) else given) <= 0.05


def test_sources_without_a_scorer_are_named():
    check_sources(["aime2024", "math", "math_dapo", "numina_olympiads", "searchR1_nq", "inclusionAI/AReaL-boba-Data"])
    check_sources(["openai/gsm8k", "reasoning_gym/chain_sum"])
    with pytest.raises(RewardError, match="no scorer for data_source='openai/gsm'"):
        check_sources(["openai/gsm8k", "openai/gsm"])


@pytest.mark.parametrize("task", ["chain_sum", "basic_arithmetic", "gsm_symbolic", "leg_counting", "number_sorting"])
def test_reasoning_gym_scores_as_the_package_does(task):
    package = pytest.importorskip("reasoning_gym")
    score = find_scorer(f"reasoning_gym/{task}")
    data = package.create_dataset(task, size=3, seed=5)
    for entry in data:
        extra = {"task": task, "entry": json.dumps(entry)}
        for answer in (entry["answer"], "no idea", "12", entry["answer"] + " "):
            expected = data.score_answer(answer.strip(), entry)
            assert score(f"<think>1</think> <answer>0</answer> then <answer>{answer}</answer>", None, extra) == expected
        assert score(entry["answer"], None, extra) == 1.0


def test_reasoning_gym_tasks_that_run_answers_are_refused():
    package = pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    assert package
    for task in reasoning_gym.TASKS_THAT_EXECUTE_ANSWERS:
        assert task in DATASETS
        with pytest.raises(RewardError, match="runs the answer as Python code"):
            find_scorer(f"reasoning_gym/{task}")
    calls = ("eval(answer", "exec(answer", "parse_expr(answer", "sympify(answer")
    found = {name for name, (kind, _) in DATASETS.items() if any(c in inspect.getsource(kind) for c in calls)}
    assert found <= reasoning_gym.TASKS_THAT_EXECUTE_ANSWERS


def test_an_unknown_reasoning_gym_task_is_named():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(RewardError, match="no task 'no_such_task'"):
        find_scorer("reasoning_gym/no_such_task")
