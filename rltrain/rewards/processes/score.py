"""Score of one response: a number from the reward function's result, or the reason why there is none."""

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rltrain.common.errors import replace_surrogates

# Data source, response, ground truth and extra_info: the arguments of a reward function.
ScorerCall = tuple[str, str, Any, dict[str, Any]]

MAX_ERROR_CHARS = 4000
# Kinds of failure: the judge failed, or no judge prompt could be created for the response.
JUDGE, NO_PROMPT = "judge", "no prompt"
# Maximum absolute score, because the norm of the gradients sums squares in float32.
MAX_ABS = 1e15
_MAX_EXTRAS = 64
_MAX_TEXT_CHARS = 256
_SHOWN_CHARS = 400


@dataclass(frozen=True)
class Score:
    """The score of a response. ``value`` is None unless ``status`` is ``ok``; otherwise ``error`` is the reason.

    ``extras`` are the other columns that the reward function returned. ``kind`` is the name of the exception, if any.
    ``call`` holds the shortened data source, response and ground truth of a failed call.
    """

    value: float | None
    status: Literal["ok", "timeout", "crashed", "rejected"]
    error: str | None = None
    extras: dict[str, float | str] = field(default_factory=dict)
    kind: str = ""
    call: tuple[str, str, str] | None = None

    def with_call(self, call: ScorerCall) -> "Score":
        """Return the score, with its call if it is a failure."""
        if self.status == "ok":
            return self
        source, answer, truth = call[0], repr(call[1][:_SHOWN_CHARS]), f"{call[2]!r:.{_SHOWN_CHARS}}"
        if len(call[1]) > _SHOWN_CHARS:
            answer += f"… ({len(call[1]):,} characters)"
        return replace(self, call=(source, answer, truth))

    def report(self) -> str:
        """Describe a failure: the response, the status, and the error with its place in the user's code."""
        about = "" if self.call is None else "data_source={!r}\n  answer: {}\n  ground truth: {}\n".format(*self.call)
        return f"{about}  {self.status}: {self.error}"


@dataclass(frozen=True)
class PendingScore:
    """A response that waits for a judge on the run's devices."""

    rule: Score | None
    """The rule scorer's score; None without a rule scorer."""
    message: int
    """Index of its prompt among the prompts of its call."""
    length: int
    """Characters of the prompt."""


def parse_result(returned: Any) -> tuple[float, dict[str, float | str]]:
    """Convert a reward function's result to score and extras. Raises ValueError unless the score is a finite number."""
    if not isinstance(returned, dict):
        return _finite(returned, "the reward function returned"), {}
    if "score" not in returned:
        raise ValueError(f"the reward function returned a dict without 'score': {sorted(map(str, returned))}")
    extras: dict[str, float | str] = {}
    # Limited, because every name becomes a column of all samples and a metric.
    for name, extra in list(returned.items())[:_MAX_EXTRAS]:
        # Extras are only logged, so one that is not a number, or has an invalid name, must not fail the score.
        with suppress(Exception):
            if name != "score":
                extras[_text(str(name))] = _text(extra) if isinstance(extra, str | bytes) else _finite(extra, "")
    return _finite(returned["score"], "the reward function returned score"), extras


def _text(value: str | bytes) -> str:
    """Return a text that every file format and tracker accepts."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return replace_surrogates(text[:_MAX_TEXT_CHARS]).replace("\0", "\ufffd")


def _finite(value: Any, subject: str) -> float:
    number = value
    # Recognised by `ndim`, because the scoring process does not import NumPy or torch.
    if not isinstance(value, (bool, int, float)) and getattr(value, "ndim", None) == 0:  # NumPy and torch scalars
        number = value.item()
    if not isinstance(number, (bool, int, float)):
        raise ValueError(
            f"{subject} {type(value).__name__} {value!r:.200}; it must be one number or a dict with 'score'"
        )
    # Compared as int, because a Python int of more than 308 digits cannot be converted to float.
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"{subject} {number}; it must be finite")
    if abs(number) > MAX_ABS:
        text = f"{number:.4g}" if isinstance(number, float) else f"an int of {number.bit_length()} bits"
        raise ValueError(
            f"{subject} {text}; it must be within ±{MAX_ABS:g}, so that the loss stays finite. Scale the rewards down"
        )
    return float(number)
