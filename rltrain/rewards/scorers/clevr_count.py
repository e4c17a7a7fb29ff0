"""Counting objects (CLEVR): the number in the last pair of square brackets, compared as text."""

from typing import Any

from rltrain.rewards.grading.truths import solutions
from rltrain.rewards.scorers.registry import scorer

_TAIL_CHARS = 300


def extract_answer(solution: str) -> str | None:
    """Return the text in the last ``[…]`` of the last 300 characters, or None."""
    tail = solution[-_TAIL_CHARS:]
    end = tail.rfind("]")
    start = tail.rfind("[", 0, end) if end >= 0 else -1
    return tail[start + 1 : end].strip("[] \n\t") if start >= 0 else None


@scorer("BUAADreamer/*", "clevr_count*")
def clevr_count(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return 1 if the bracketed number is the ground truth, character by character; else 0."""
    return float(extract_answer(solution_str) in [truth.strip("[] ") for truth in solutions(ground_truth)])
