"""The symbolic step: math-verify, where the extra ``math`` is installed. Without it, nothing is equal symbolically.

It runs without its own time limits, which need signals and stop nothing: the slot ends what takes too long.
"""

import logging
import re
from collections.abc import Callable
from functools import cache

_MAX_CHARS = 256
_MAX_DEPTH = 12
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3}|[^\x00-\x7f]")
_DEGREES = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s?\^\{?\\circ\}?")
# Towers of powers, huge powers and factorials: one of them costs the whole deadline.
_BOMB = re.compile(r"\^\{[^{}]{0,20}\^|\^[^{}]\^|\^\{?[-+(]?[0-9]{4}|[0-9]{4}!|!!|\)!|\\(?:int|sum|prod|lim|uparrow)")


@cache
def _compare() -> Callable[[str, str], bool] | None:
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError:
        return None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of having no time limits of its own
    config = [LatexExtractionConfig()]

    def compare(answer: str, truth: str) -> bool:
        radians = [_DEGREES.sub(r"(\\frac{\1\\pi}{180})", text) for text in (truth, answer)]
        parsed = [parse(f"${text}$", config, parsing_timeout=None) for text in radians]
        return bool(verify(*parsed, timeout_seconds=None))

    return compare


def prepare(data_source: str) -> None:
    """Import math-verify, which takes a second, outside any answer's deadline."""
    _compare()


def symbolically_equal(answer: str, truth: str) -> bool:
    """Whether two formulas are equal by algebra. Words and formulas that look like bombs are not looked at."""
    compare = _compare()
    for text in (answer, truth):
        if compare is None or not text or len(text) > _MAX_CHARS or _WORD.search(_COMMAND.sub(" ", text)):
            return False
    if _BOMB.search(answer) or max(answer.count(bracket) for bracket in "({[") > _MAX_DEPTH:
        return False
    return compare is not None and compare(answer, truth)
