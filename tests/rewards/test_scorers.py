import inspect
import json
import time

import pytest

from rltrain.base.errors import RewardError
from rltrain.rewards.scorers import arithmetic, gsm8k, math_boxed, reasoning_gym
from rltrain.rewards.scorers.registry import check_sources, find_scorer, known_sources

GSM8K = [
    # answer, ground truth, score: decided by hand
    ("#### 72", "72", 1),
    ("She sold 48 + 24 = 72 clips.\n#### 72", "72", 1),
    ("She sold 72 clips.", "72", 0),
    ("#### 73", "72", 0),
    ("####72", "72", 0),
    ("###### 72", "72", 1),
    ("### 72", "72", 0),
    ("#### seventy-two", "72", 0),
    ("#### 72 clips", "72", 1),
    ("#### $72", "72", 1),
    ("#### -72", "72", 0),
    ("#### -72", "-72", 1),
    ("#### 1,234", "1234", 1),
    ("#### 1234", "1,234", 1),
    ("#### 1,234,567", "1234567", 1),
    ("#### 72.0", "72", 0),
    ("#### 72.", "72", 0),
    ("#### 072", "72", 0),
    ("#### 3.5", "3.5", 1),
    ("#### 3.50", "3.5", 0),
    ("#### 10 #### 72", "72", 1),
    ("#### 72 #### 10", "72", 0),
    ("#### 72\n#### none", "72", 1),
    ("#### 7 2", "72", 0),
    ("#### 72%", "72", 1),
    ("#### 72<|im_end|>", "72", 1),
    ("**#### 72**", "72", 1),
    ("#### **72**", "72", 0),
    ("#### \\boxed{72}", "72", 0),
    ("#### = 72", "72", 0),
    ("#### x = 72", "72", 0),
    ("#### 72/1", "72", 1),
    ("#### 1/2", "0.5", 0),
    ("", "72", 0),
    ("####", "72", 0),
    ("#### ", "72", 0),
    ("#### ,", "72", 0),
    ("#### .", "72", 0),
    ("#### 72" + " " * 250, "72", 1),
    ("#### 72" + " ." * 200, "72", 0),  # farther than 300 characters from the end
    ("x" * 5000 + "#### 72", "72", 1),
    ("#### 72", 72, 1),
    ("#### ٧٢", "72", 0),
]


@pytest.mark.parametrize(("answer", "truth", "score"), GSM8K)
def test_gsm8k_agrees_with_hand_made_decisions(answer, truth, score):
    assert gsm8k.gsm8k(answer, truth, {})["score"] == score


def test_gsm8k_flexible_takes_the_last_number():
    assert gsm8k.extract_answer("first 7, then $1,072.", "flexible") == "1072"
    assert gsm8k.extract_answer("none here, ...", "flexible") is None


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("19", "19", 1),
        (" 19\n", "19", 1),
        ("12+7=19", "19", 1),
        ("12 + 7 = 19.", "19", 1),
        ("The answer is 19", "19", 1),
        ("= 19 apples and 3 pears", "19", 1),
        ("first 18, no: 19", "19", 1),
        ("1+1=2, so 12+7=19", "19", 1),
        ("12+7=19, I mean 18", "19", 1),
        ("12+7=", "7", 0),
        ("12+7=?", "7", 0),
        ("19.5", "5", 0),
        ("19.0", "19", 0),
        ("019", "19", 1),
        ("1,019", "1019", 1),
        ("-5", "-5", 1),
        ("3-8=-5", "-5", 1),
        ("3-8", "8", 1),
        ("5", "-5", 0),
        ("-0", "0", 1),
        ("119", "19", 0),
        ("190", "19", 0),
        ("nineteen", "19", 0),
        ("", "19", 0),
        ("=19=18", "18", 1),
        ("19", 19, 1),
    ],
)
def test_arithmetic_wants_the_exact_integer(answer, truth, score):
    assert arithmetic.arithmetic(answer, truth, {}) == score


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("so \\boxed{5}", "5", 1),
        ("so \\boxed{4} no, \\boxed{5}", "5", 1),
        ("so \\boxed{5} or \\boxed{4}", "5", 0),
        ("so 5", "5", 0),
        ("\\boxed{5", "5", 0),
        ("\\boxed{}", "5", 0),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1),
        ("\\boxed{\\dfrac{1}{2}}", "\\frac12", 1),
        ("\\boxed{\\frac1{2}}", "\\tfrac 1 2", 1),
        ("\\boxed{1/2}", "\\frac{1}{2}", 1),
        ("\\boxed{-1/2}", "-\\frac{1}{2}", 1),
        ("\\boxed{.5}", "0.50", 1),
        ("\\boxed{2}", "\\frac{1}{2}", 0),
        ("\\boxed{1,000}", "1000", 1),
        ("\\boxed{1,2}", "12", 0),
        ("\\boxed{x = 5}", "5", 1),
        ("\\boxed{\\$5}", "5", 1),
        ("\\boxed{50\\%}", "50", 1),
        ("\\boxed{5\\text{ cm}}", "5", 1),
        ("\\boxed{\\text{Monday}}", "Monday", 1),
        ("\\boxed{90^\\circ}", "90", 1),
        ("\\boxed{\\left(1, 2\\right)}", "(1,2)", 1),
        ("\\boxed{\\sqrt3}", "\\sqrt{3}", 1),
        ("\\boxed{\\frac{\\sqrt{3}}{2}}", "\\frac{\\sqrt3}{2}", 1),
        ("\\boxed{\\{1, 2\\}}", "\\{1,2\\}", 1),
        ("\\fbox{7}", "7", 1),
        ("\\boxed{7.}", "7", 1),
        ("\\boxed{7}", "the whole solution ends in \\boxed{7}", 1),
        ("\\boxed{" + "1" * 600 + "}", "1" * 600, 0),
    ],
)
def test_math_compares_the_last_box_up_to_typesetting(answer, truth, score):
    assert math_boxed.math_boxed(answer, truth, {})["score"] == score


SIZE = 100_000
HOSTILE = [
    "#### " * SIZE,
    "####" * SIZE + " 7",
    "=" * SIZE,
    "-" * SIZE,
    "9" * SIZE,
    "9," * SIZE,
    "=" + "9." * SIZE,
    "\\boxed{" * SIZE,
    "\\boxed{" + "{" * SIZE,
    "\\boxed{" + "}{" * SIZE,
    "}" * SIZE,
    "\\boxed{" + "\\frac" * 90 + "}",
    "\\boxed{" + "\\text{" * 70 + "}" * 70 + "}",
    "\\boxed{" + " " * 500 + "}",
    "<answer>" * SIZE,
    "</answer>" * SIZE,
    "<answer>" * SIZE + "</answer>" * SIZE,
    " " * SIZE,
    "\n" * SIZE,
    "\x00" * SIZE,
    "é" * SIZE,
    "²" * SIZE,
    "\\boxed{²}",
    "=²",
    "\ud800" * SIZE,
    "<think>" * SIZE,
    "<think>" + "</think>" * SIZE,
    "<think></think>" + "\\boxed{" * SIZE,
    "Answer" * SIZE,
    "Answer:" * SIZE,
    "answer is" * SIZE,
    "答案是" * SIZE,
    "final answer is" * SIZE + "I hope it is correct" * SIZE,
    "[" * SIZE + "]" * SIZE,
    "\\boxed " * SIZE,
    "\\boxed{" + "(" * 500 + "}",
    "\\boxed{" + "1," * 250 + "}",
    "\\boxed{" + "\\pm" * 160 + "}",
    "\\boxed{" + "1\\cup" * 100 + "}",
    "\\boxed{" + "x=" * 250 + "}",
    "\\boxed{" + "1 " * 250 + "}",
    "\\boxed{1" + " " * 480 + "x}",
    "\\boxed{1" + "a" * 480 + "!}",
    "\\boxed{" + "\\begin{pmatrix}" * 30 + "}",
    "\\boxed{" + "(" * 120 + "1" + "),(" * 120 + "}",
    "\\boxed{" + "\\{" * 60 + "1" + "\\}" * 60 + "}",
    "\\boxed{1e999}",
    "\\boxed{" + "9" * 60 + "e999}",
    "Answer: " + "9" * 290,
    "Answer: " + "=" * 290,
    "<answer>" + "the " * SIZE + "</answer>",
    "__import__('os')._exit(9)",
    "\\boxed{__import__('os')._exit(9)}",
    "#### __import__('os')._exit(9)",
]


TIMED = ("openai/gsm8k", "rltrain/arithmetic", "lighteval/MATH", "math_dapo", "boba", "hiyouga/geometry3k")
TIMED += ("virl39k", "clevr_count_70k", "searchR1_nq", "qa_f1/x")
TIMED += ("gpqa_diamond", "logicvista", "mathvista_mini", "mathvision_mini", "dynamath", "wemath_mini")


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_score_nothing_quickly(text):
    entry = {"entry": json.dumps({"question": "", "answer": "7.5", "metadata": {}}), "task": "chain_sum"}
    reasoning_gym.check_task("chain_sum")
    find_scorer("lighteval/MATH")("\\boxed{\\pi}", "7.5", {})  # mpmath is imported by its first use
    for source in (*TIMED, "reasoning_gym/chain_sum"):
        function = find_scorer(source)
        start = time.process_time()  # what others do on this machine does not count
        given = function(text, "7.5", entry)
        assert time.process_time() - start < 0.2, source
        assert (given["score"] if isinstance(given, dict) else given) <= 0.05


def test_sources_with_a_scorer():
    assert known_sources() == [
        "BUAADreamer/*",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "TIGER-Lab/ViRL39K",
        "agentica-org/DeepScaleR-*",
        "aime*",
        "apps",
        "areal_boba",
        "boba",
        "clevr_count*",
        "codecontests",
        "codeforces",
        "dynamath*",
        "gpqa*",
        "hiyouga/geometry3k",
        "inclusionAI/AReaL-boba-*",
        "lighteval/MATH",
        "logicvista*",
        "math",
        "math_dapo*",
        "mathverse*",
        "mathvision*",
        "mathvista*",
        "mmmu_pro*",
        "numina_*",
        "openai/gsm8k",
        "qa_em/*",
        "qa_f1/*",
        "reasoning_gym/*",
        "retool/*",
        "rltrain/arithmetic",
        "rltrain/frozen_lake",
        "rltrain/gsm8k",
        "rltrain/guess_number",
        "rltrain/rectangles",
        "searchR1_*",
        "taco",
        "virl39k",
        "wemath*",
    ]
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
