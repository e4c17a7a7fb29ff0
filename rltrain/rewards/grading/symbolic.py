"""Whether two formulas are equal by algebra: math-verify, behind a guard.

math-verify hands the formulas to sympy, where a short text can cost hours (towers of powers, huge factorials), and it
reads words as products of letters. So only what looks like a formula of modest size gets there. math-verify's own time
limits are off: they need signals and do not stop C code. The process that scores is killed at its deadline instead.

A source that needs algebra must not be scored without it: `prepare` raises at the start of a run where the package is
missing, because a silent 0 for ``1+x`` instead of ``x+1`` would only be seen in the rewards.
"""

import logging
import re
from collections.abc import Callable
from functools import cache

from rltrain.errors import RewardError

_MAX_CHARS = 256
_MAX_DEPTH = 12
_COMMAND = re.compile(r"\\(?:begin|end)\{p?matrix\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3}|[^\x00-\x7f]")
_DEGREES = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s?\^\{?\\circ\}?")
# Towers of powers, huge powers and factorials: one of them costs the whole deadline.
_BOMB = re.compile(r"\^\{[^{}]{0,20}\^|\^[^{}]\^|\^\{?[-+(]?[0-9]{4}|[0-9]{4}!|!!|\)!|\\(?:int|sum|prod|lim|uparrow)")


@cache
def _math_verify() -> Callable[[str, str], bool]:
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limits of its own
    config = [LatexExtractionConfig()]

    def compare(answer: str, truth: str) -> bool:
        # A degree is a factor of pi / 180, so that 180^\circ equals \pi. The truth comes first, as verify is not
        # symmetric.
        radians = [_DEGREES.sub(r"(\\frac{\1\\pi}{180})", text) for text in (truth, answer)]
        parsed = [parse(f"${text}$", config, parsing_timeout=None) for text in radians]
        return bool(verify(*parsed, timeout_seconds=None))

    return compare


def prepare(data_source: str) -> None:
    """Import math-verify outside any answer's deadline (it takes a second). Raises RewardError where it is missing."""
    try:
        _math_verify()
    except ImportError as error:
        raise RewardError(
            f"data_source={data_source!r} is graded by algebra, which needs math-verify: pip install 'rltrain[math]'."
        ) from error


def symbolically_equal(answer: str, truth: str) -> bool:
    """Whether two formulas are equal by algebra. Words and formulas that look like bombs are not looked at."""
    for text in (answer, truth):
        if not text or len(text) > _MAX_CHARS or _WORD.search(_COMMAND.sub(" ", text)):
            return False
    # The truth is not searched: no model wrote it.
    if _BOMB.search(answer) or max(answer.count(bracket) for bracket in "({[") > _MAX_DEPTH:
        return False
    return _math_verify()(answer, truth)
