"""Mathematics by the last ``\\boxed{}``: compared as text, as an exact number, then by algebra."""

from typing import Any

from rltrain.rewards.grading.equivalence import equal
from rltrain.rewards.grading.grade import Grade, by_category, vote
from rltrain.rewards.grading.latex import TAIL_CHARS, last_boxed
from rltrain.rewards.grading.truths import solutions
from rltrain.rewards.scorers.registry import scorer

# verl's weights of answer and format, and its rewards for a wrong answer with tools.
_ANSWER_WEIGHT, _FORMAT_WEIGHT = 0.9, 0.1
_PER_TURN, _LEAST_LOSS = 0.1, -0.6


def graded(solution: str, truth: Any) -> tuple[float, str]:
    """Return 1 if the last box of a solution holds the truth (or one of several truths), else 0; and the text to vote
    with."""
    answer = last_boxed(solution[-TAIL_CHARS:])
    return float(answer is not None and any(equal(answer, right) for right in solutions(truth))), vote(answer)


@scorer(
    "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "agentica-org/DeepScaleR-*",
    "numina_*",
)  # fmt: skip
def math_boxed(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Grade:
    """Return 1 if the last box holds the ground truth (Hendrycks et al. 2021), else 0."""
    right, pred = graded(solution_str, ground_truth)
    return {"score": right, "pred": pred}


@scorer("hiyouga/geometry3k")
def geometry3k(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Grade:
    """Return 0.9 for the right answer (``acc``) plus 0.1 for the form ``<think>…</think>…\\boxed{…}`` (``format``)."""
    return answer_and_form(solution_str, ground_truth)


@scorer("TIGER-Lab/ViRL39K", "virl39k")
def virl39k(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Grade:
    """Return the score of `geometry3k`, and ``acc_<category>`` from ``extra_info.category``."""
    scored = answer_and_form(solution_str, ground_truth)
    return scored | by_category(float(scored["acc"]), extra_info)


def answer_and_form(solution: str, truth: Any) -> Grade:
    """Return ``score`` and its two parts, ``acc`` and ``format``, each 0 or 1; ``pred`` for votes."""
    acc, pred = graded(solution, truth)
    form = float(has_format(solution))
    return {"score": _ANSWER_WEIGHT * acc + _FORMAT_WEIGHT * form, "acc": acc, "format": form, "pred": pred}


@scorer("retool/*")
def retool(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Grade:
    """Return +1, or min(-0.6, -1 + 0.1 (num_turns - 2) / 2)   (Feng et al. 2025, verl's recipe); ``acc`` is 1 or 0."""
    acc, pred = graded(solution_str, ground_truth)
    # Each call adds two turns: the policy's and the tool's.
    called = (extra_info.get("num_turns", 2) - 2) / 2
    return {"score": 1.0 if acc else min(_LEAST_LOSS, -1.0 + _PER_TURN * called), "acc": acc, "pred": pred}


def has_format(solution: str) -> bool:
    """Return True if a solution begins with ``<think>`` and has a box after its thinking."""
    if not solution.startswith("<think>"):
        return False
    # `find` instead of a regular expression, which would backtrack over a long response.
    thought = solution.find("</think>")
    box = solution.find("\\boxed{", thought) if thought >= 0 else -1
    return box >= 0 and solution.find("}", box) >= 0
