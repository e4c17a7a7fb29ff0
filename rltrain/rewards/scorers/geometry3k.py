"""Geometry with images: 0.9 for the answer in the last box, 0.1 for the form ``<think>…</think>…\\boxed{…}``."""

from typing import Any

from rltrain.rewards.grading.verdict import Verdict
from rltrain.rewards.scorers import math_boxed
from rltrain.rewards.scorers.registry import scorer

# verl's weights.
_ANSWER_WEIGHT, _FORMAT_WEIGHT = 0.9, 0.1


def has_format(solution: str) -> bool:
    """Whether a solution begins with its thinking and has a box after it; nothing may stand before ``<think>``."""
    if not solution.startswith("<think>"):
        return False
    # `find` and no regular expression, which would backtrack over a long answer without its end.
    thought = solution.find("</think>")
    box = solution.find("\\boxed{", thought) if thought >= 0 else -1
    return box >= 0 and solution.find("}", box) >= 0


def graded(solution: str, truth: Any) -> Verdict:
    """``score`` and its two parts, ``acc`` and ``format``, each 0 or 1; ``pred``, which votes."""
    acc, pred = math_boxed.graded(solution, truth)
    form = float(has_format(solution))
    return {"score": _ANSWER_WEIGHT * acc + _FORMAT_WEIGHT * form, "acc": acc, "format": form, "pred": pred}


@scorer("hiyouga/geometry3k")
def geometry3k(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Verdict:
    """0.9 for the right answer, 0.1 for the form."""
    return graded(solution_str, ground_truth)
