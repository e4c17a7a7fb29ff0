"""Extraction of a number, or of a list, from a solution in free text."""

import re

from rltrain.rewards.grading import formula
from rltrain.rewards.grading.answers import boxed_and_marked, closing_sentence
from rltrain.rewards.grading.latex import tidy
from rltrain.rewards.grading.units import quantity

_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.])-?(?:[0-9]{1,3}(?:,[0-9]{3}){1,6}|[0-9]{1,30})?(?:\.[0-9]{1,30})?(?:[eE]-?[0-9]{1,2})?(?![0-9])"
)
_DEGREES = re.compile(r"\^?\\circ|\\?%")
_SAID = re.compile(r"=|≈|:|\b(?:is|are|was|were|be|equals?|about|approximately|around|so|thus|therefore)\b")
_MINUS = str.maketrans("−–", "--")
_MOST_CHARS = 512


def stated_number(solution: str) -> tuple[str | None, float | None]:
    """Return the stated answer, and its value if it is a formula or holds exactly one number, else None.

    If there is no box, mark or phrase, the closing sentence is read.
    """
    stated = next(boxed_and_marked(solution), None)
    if stated is None:
        stated = closing_sentence(solution)
    return (None, None) if stated is None else (stated, number_of(stated))


def number_of(text: str) -> float | None:
    """Return the value of a short text as a number, ignoring its unit; of ``x = 5``, the value of the right side."""
    text = text[:_MOST_CHARS].translate(_MINUS)
    right_side = _DEGREES.sub("", quantity(tidy(text.rpartition("=")[2])).value)
    value = None if ":" in right_side else formula.value(right_side)  # a time is not a ratio
    if value is None:
        numbers = {match[0] for match in _NUMBER.finditer(text) if match[0]}
        if len(numbers) > 1:
            numbers = {match[0] for match in _NUMBER.finditer(_SAID.split(text)[-1]) if match[0]}
        return float(numbers.pop().replace(",", "")) if len(numbers) == 1 else None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # the value is complex, or beyond floats
        return None


def stated_list(solution: str) -> str | None:
    """Return the list in brackets, else the text in the box or after mark or phrase, or a last sentence with digits."""
    candidates = [*boxed_and_marked(solution), closing_sentence(solution) or ""]
    bracketed = (match[0] for text in candidates if (match := re.search(r"\[[^\[\]]{1,400}\]", text)))
    has_figures = re.search(r"[0-9]", candidates[-1]) is not None
    return next(bracketed, candidates[0] if len(candidates) > 1 or has_figures else None)


def list_parts(text: str) -> list[float | str]:
    """Return the parts of a list: numbers, or casefolded texts without quotes."""
    parts = [part.strip(" \"'") for part in text.strip("[]() ").split(",")]
    values = [number_of(part) for part in parts]
    return [part.casefold() if value is None else value for part, value in zip(parts, values, strict=True)]
