"""GSM8K: the number after the last ``####``, compared as text (Cobbe et al. 2021)."""

import re
from typing import Any

from rltrain.rewards.grading.equivalence import equal
from rltrain.rewards.grading.grade import Grade, vote
from rltrain.rewards.grading.truths import solutions
from rltrain.rewards.scorers.registry import scorer

# These values are verl's, so that scores are comparable.
_TAIL_CHARS = 300
_MARK = "#### "
# Single pass: one repeated character class, no backtracking.
_STRICT = re.compile(r"-?\$?[0-9.,]+")
_NUMBER = re.compile(r"-?[0-9][0-9.,]*")


def extract_answer(solution: str, method: str = "strict") -> str | None:
    """Return the number in the last 300 characters, without commas and dollar signs, or None.

    ``strict``: the number directly after the last ``#### `` that has one. ``flexible``: the last number of the text.
    """
    tail = solution[-_TAIL_CHARS:]
    if method == "flexible":
        numbers = _NUMBER.findall(tail)
        return _clean(numbers[-1].rstrip(".,")) if numbers else None
    mark = tail.rfind(_MARK)
    while mark >= 0:
        match = _STRICT.match(tail, mark + len(_MARK))
        if match:
            return _clean(match.group())
        mark = tail.rfind(_MARK, 0, mark)
    return None


@scorer("openai/gsm8k")
def gsm8k(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Grade:
    """Return 1 if the strict answer is the ground truth as text without commas and ``$``; else 0."""
    answer = extract_answer(solution_str)
    right = answer is not None and any(answer in _spellings(truth) for truth in solutions(ground_truth))
    # Votes use the compared text: 72.0 and 72 differ.
    return {"score": float(right), "pred": answer or ""}


@scorer("rltrain/gsm8k")
def gsm8k_number(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Grade:
    """Return 1 if the strict answer and the ground truth are the same number, else 0: ``72.0`` is 72."""
    answer = extract_answer(solution_str)
    right = answer is not None and any(equal(answer, _marked(truth)) for truth in solutions(ground_truth))
    return {"score": float(right), "pred": vote(answer)}


def _spellings(truth: str) -> tuple[str, str]:
    """Return a truth unchanged, and without the zeros after an integer."""
    number = _clean(_marked(truth))
    whole, point, zeros = number.partition(".")
    return number, whole if point and not zeros.strip("0") else number


def _marked(truth: str) -> str:
    """Return the text after the mark if a truth is a whole solution."""
    return truth.rpartition(_MARK)[2].strip()


def _clean(number: str) -> str:
    return number.replace(",", "").replace("$", "")
