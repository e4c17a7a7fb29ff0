"""Types shared by a slot and its process: the service and the outcome of a call. Few imports, for a fast start."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rltrain.common.errors import ConfigError, RltrainError

# Limit of a call's result as JSON.
MAX_RESULT_BYTES = 1 << 20


@dataclass(frozen=True)
class Service:
    """The functions of a slot, and names for its error messages."""

    open: Callable[[str], Callable[..., Any]]
    """Callable that creates a function from a name, in the slot's process; must be picklable. If it raises an
    RltrainError, that is the whole message. A function with the attribute ``takes_lists`` gets all calls at once
    (`Slot.call_list`), and returns for each the result or an exception.
    """
    function: str
    """The name of a function in messages, such as "the tool"."""
    timeout_key: str
    """The key of `Limits.timeout_s`."""
    memory_key: str
    """The key of `Limits.memory_mb`."""
    result: str = "result"
    """The name of a result in messages."""
    call: str = "call"
    """The name of a call in messages."""
    error: type[RltrainError] = ConfigError
    """Error class for a name that cannot become a function."""
    may_repeat: bool = True
    """True to repeat an interrupted call once; False if it may already have changed something."""

    def late(self, timeout_s: float) -> str:
        """Return the message for a call that timed out."""
        return f"no {self.result} after {timeout_s:g} s ({self.timeout_key})"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call."""

    status: Literal["ok", "timeout", "crashed", "rejected"]
    """``rejected``: the function returned an invalid result."""
    value: Any = None
    """The result, as a JSON value."""
    error: str = ""
    """The error, with its place in the user's code."""
    kind: str = ""
    """Name of the exception, if any."""
