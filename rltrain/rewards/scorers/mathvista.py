"""MathVista (Lu et al. 2024): a choice, an integer, a number of some decimals, or a list, normalised as published.

The published protocol lets a model extract the answer, takes the most similar choice, and cuts the decimals of what
should be an integer. Here rules extract it, a choice must be named, and the rest is as published.
"""

import math
from typing import Any

from rltrain.rewards.grading.ladder import equal
from rltrain.rewards.grading.stated_numbers import list_parts, number_of, stated_list, stated_number
from rltrain.rewards.grading.truths import solutions
from rltrain.rewards.grading.verdict import Verdict, verdict
from rltrain.rewards.scorers.multiple_choice import read_choice
from rltrain.rewards.scorers.registry import scorer


@scorer("mathvista*")
def mathvista(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Verdict:
    """1 if the answer, read as ``extra_info.answer_type`` says, is the ground truth, else 0."""
    truth, kind = solutions(ground_truth)[0], extra_info.get("answer_type")
    if kind == "choice":
        letter = read_choice(solution_str, extra_info)
        return verdict(letter == truth, letter, extra_info)
    if kind == "list":
        text = stated_list(solution_str)
        return verdict(text is not None and list_parts(text) == list_parts(truth), text, extra_info)
    stated, value = stated_number(solution_str)
    right = number_of(truth)
    if kind not in ("integer", "float") or right is None:
        return verdict(stated is not None and equal(stated, truth), stated, extra_info)
    if value is None or not math.isfinite(value):
        return verdict(False, None, extra_info)
    decimals = int(extra_info.get("precision") or 0)
    normalised = (math.trunc(number) if kind == "integer" else round(number, decimals) for number in (value, right))
    return verdict(len(set(normalised)) == 1, stated, extra_info)
