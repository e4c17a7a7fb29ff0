"""The score of one answer: what a reward function returned, read as a number, or why there is none."""

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rltrain.base.errors import storable

# Data source, answer, ground truth and extra_info: the arguments of a reward function.
ScorerCall = tuple[str, str, Any, dict[str, Any]]

MAX_ERROR_CHARS = 4000
# The kinds of failures of a judge, and of answers about which no judge can be asked.
JUDGE, UNASKED = "judge", "unasked"
# A norm of gradients squares what it adds up, in float32.
MOST = 1e15
_MAX_EXTRAS = 64
_MAX_TEXT_CHARS = 256
_SHOWN_CHARS = 400


@dataclass(frozen=True)
class Score:
    """What an answer earned. ``value`` is None unless ``status`` is ``ok``; ``error`` then says what happened.

    ``extras`` are the further columns that the reward function returned. ``kind`` is the name of the exception, if
    there was one. ``call`` has data source, answer and ground truth of a failed answer, shortened.
    """

    value: float | None
    status: Literal["ok", "timeout", "crashed", "rejected"]
    error: str | None = None
    extras: dict[str, float | str] = field(default_factory=dict)
    kind: str = ""
    call: tuple[str, str, str] | None = None

    def about(self, call: ScorerCall) -> "Score":
        """The same score; a failure knows its call."""
        if self.status == "ok":
            return self
        source, answer, truth = call[0], repr(call[1][:_SHOWN_CHARS]), f"{call[2]!r:.{_SHOWN_CHARS}}"
        if len(call[1]) > _SHOWN_CHARS:
            answer += f"… ({len(call[1]):,} characters)"
        return replace(self, call=(source, answer, truth))

    def report(self) -> str:
        """What happened to an answer that failed, to which answer, and where in the user's code."""
        about = "" if self.call is None else "data_source={!r}\n  answer: {}\n  ground truth: {}\n".format(*self.call)
        return f"{about}  {self.status}: {self.error}"


@dataclass(frozen=True)
class Asked:
    """An answer that a judge on the run's devices has still to judge."""

    rule: Score | None
    """What the scorer says of it; None where none runs."""
    message: int
    """The place of its message among those of its call."""
    length: int
    """Characters of the message."""


def read_returned(returned: Any) -> tuple[float, dict[str, float | str]]:
    """Score and extras out of what a reward function returned. ValueError unless the score is one finite number."""
    if not isinstance(returned, dict):
        return _finite(returned, "the reward function returned"), {}
    if "score" not in returned:
        raise ValueError(f"the reward function returned a dict without 'score': {sorted(map(str, returned))}")
    extras: dict[str, float | str] = {}
    # Bounded, because every name becomes a column of all samples and a metric.
    for name, extra in list(returned.items())[:_MAX_EXTRAS]:
        # An extra is only shown. One that is no number, or whose name has no text, must not cost the answer its score.
        with suppress(Exception):
            if name != "score":
                extras[_text(str(name))] = _text(extra) if isinstance(extra, str | bytes) else _finite(extra, "")
    return _finite(returned["score"], "the reward function returned score"), extras


def _text(value: str | bytes) -> str:
    """A text that every file and tracker takes."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return storable(text[:_MAX_TEXT_CHARS]).replace("\0", "\ufffd")


def _finite(value: Any, what: str) -> float:
    number = value
    # Asked for its ndim, because the process that scores imports neither NumPy nor torch of itself.
    if not isinstance(value, (bool, int, float)) and getattr(value, "ndim", None) == 0:  # NumPy and torch scalars
        number = value.item()
    if not isinstance(number, (bool, int, float)):
        raise ValueError(f"{what} {type(value).__name__} {value!r:.200}; it must be one number, or a dict with 'score'")
    # An int of Python's has no bound: it is compared as it is, and has no float beyond 308 digits.
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"{what} {number}; it must be finite")
    if abs(number) > MOST:
        text = f"{number:.4g}" if isinstance(number, float) else f"an int of {number.bit_length()} bits"
        raise ValueError(f"{what} {text}; beyond ±{MOST:g} a loss is not finite any more. Scale the rewards down")
    return float(number)
