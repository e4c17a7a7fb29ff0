"""GSM8K: the number after the last ``####``, compared as text (Cobbe et al. 2021)."""

import re
from typing import Any

from rltrain.rewards.grading.ladder import equal
from rltrain.rewards.grading.truths import solutions
from rltrain.rewards.grading.verdict import Verdict, vote
from rltrain.rewards.scorers.registry import scorer

# As in verl, so that scores compare.
_TAIL_CHARS = 300
_MARK = "#### "
# One pass each: a single class of characters repeated, nothing to go back to.
_STRICT = re.compile(r"-?\$?[0-9.,]+")
_NUMBER = re.compile(r"-?[0-9][0-9.,]*")


def extract_answer(solution: str, method: str = "strict") -> str | None:
    """The answer's number, commas and dollar signs removed, or None. Only the last 300 characters are read.

    ``strict``: the number right after the last ``#### `` that has one. ``flexible``: the last number of the text.
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
def gsm8k(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Verdict:
    """1 if the strict answer is the ground truth, character by character after commas and ``$`` are removed; else 0."""
    answer = extract_answer(solution_str)
    right = answer is not None and any(answer in _spellings(truth) for truth in solutions(ground_truth))
    # Answers vote as they are compared: 72.0 and 72 are two.
    return {"score": float(right), "pred": answer or ""}


@scorer("rltrain/gsm8k")
def gsm8k_number(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Verdict:
    """1 if the strict answer and the ground truth are one number, else 0: ``72.0`` is 72, as mathematics has it."""
    answer = extract_answer(solution_str)
    right = answer is not None and any(equal(answer, _marked(truth)) for truth in solutions(ground_truth))
    return {"score": float(right), "pred": vote(answer)}


def _spellings(truth: str) -> tuple[str, str]:
    """A truth as it stands, and without the zeros behind a whole number."""
    number = _clean(_marked(truth))
    whole, point, zeros = number.partition(".")
    return number, whole if point and not zeros.strip("0") else number


def _marked(truth: str) -> str:
    """What stands behind the mark, where a truth is a whole solution."""
    return truth.rpartition(_MARK)[2].strip()


def _clean(number: str) -> str:
    return number.replace(",", "").replace("$", "")
