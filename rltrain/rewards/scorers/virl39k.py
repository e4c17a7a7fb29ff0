"""ViRL39K: scored as Geometry3K is, with an accuracy of its own for each category (``extra_info.category``)."""

from typing import Any

from rltrain.rewards.grading.verdict import Verdict, by_category
from rltrain.rewards.scorers.geometry3k import graded
from rltrain.rewards.scorers.registry import scorer


@scorer("TIGER-Lab/ViRL39K", "virl39k")
def virl39k(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Verdict:
    """0.9 for the right answer, 0.1 for the form; ``acc_<category>`` beside them."""
    graded_parts = graded(solution_str, ground_truth)
    return graded_parts | by_category(float(graded_parts["acc"]), extra_info)
