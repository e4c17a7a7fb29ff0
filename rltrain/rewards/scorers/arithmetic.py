"""Problems with an integer as the answer, such as ``12+7=?``."""

import re
from typing import Any

from rltrain.rewards.grading.truths import solutions
from rltrain.rewards.scorers.registry import scorer

_TAIL_CHARS = 300
# A minus sign directly after a digit is an operator, not a sign.
_NUMBER = re.compile(r"(?:(?<![0-9])-)?[0-9][0-9.,]*")


def extract_answer(solution: str) -> str | None:
    """Return the number after the last ``=``, or without a ``=`` the last number; None if it is not an integer."""
    tail = solution[-_TAIL_CHARS:]
    equals = tail.rfind("=")
    numbers = _NUMBER.findall(tail, equals + 1)
    if not numbers:
        return None
    return _integer(numbers[0] if equals >= 0 else numbers[-1])


@scorer("rltrain/arithmetic", "rltrain/rectangles", "rltrain/moving_square", "rltrain/guess_number")
def arithmetic(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return 1 if the response's integer is the ground truth, else 0."""
    answer = extract_answer(solution_str)
    return float(answer is not None and answer in map(_integer, solutions(ground_truth)))


def _integer(number: str) -> str | None:
    """Return the canonical text of an integer. It is not converted to int, because a response may have a million
    digits.
    """
    number = number.rstrip(".,").replace(",", "")
    sign, digits = ("-", number[1:]) if number.startswith("-") else ("", number)
    if not digits.isascii() or not digits.isdigit():
        return None
    digits = digits.lstrip("0") or "0"
    return digits if digits == "0" else sign + digits
