"""ViRL39K: scored as Geometry3K is, with an accuracy of its own for each category (``extra_info.category``)."""

import re
from typing import Any

from rltrain.rewards.scorers.geometry3k import graded
from rltrain.rewards.scorers.registry import scorer

# A category becomes part of a metric's name.
_MAX_NAME_CHARS = 40
_OTHER = re.compile(r"[^a-z0-9]+")


@scorer("TIGER-Lab/ViRL39K", "virl39k")
def virl39k(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, float]:
    """0.9 for the right answer, 0.1 for the form; ``acc_<category>`` beside them."""
    verdict = graded(solution_str, ground_truth)
    category = _OTHER.sub("_", str(extra_info.get("category") or "").lower()[:_MAX_NAME_CHARS]).strip("_")
    return verdict | ({f"acc_{category}": verdict["acc"]} if category else {})
