"""What a slot runs, and what comes back: shared by the slot and its process, which imports little."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rltrain.base.errors import ConfigError, RltrainError

# Of JSON, per call.
MAX_RESULT_BYTES = 1 << 20


@dataclass(frozen=True)
class Service:
    """What a slot runs, and the words of its messages."""

    open: Callable[[str], Callable[..., Any]]
    """Makes a function of a name, in the slot's process: it has to be picklable. An RltrainError that it raises is the
    whole message. A function with the attribute ``takes_lists`` gets all calls at once (`Slot.call_list`), and returns
    the result of each, or the exception that says why there is none."""
    function: str
    """What messages call a function, such as "the tool"."""
    timeout_key: str
    """The key of `Limits.timeout_s`."""
    memory_key: str
    """The key of `Limits.memory_mb`."""
    result: str = "result"
    """What messages call a result."""
    call: str = "call"
    """What messages call a call."""
    error: type[RltrainError] = ConfigError
    """What is raised where a name cannot become a function."""
    may_repeat: bool = True
    """Whether a call that was interrupted is made once more; False where it may already have changed something."""

    def late(self, timeout_s: float) -> str:
        """Tell of a call without a result in time."""
        return f"no {self.result} after {timeout_s:g} s ({self.timeout_key})"


@dataclass(frozen=True)
class Outcome:
    """What became of a call."""

    status: Literal["ok", "timeout", "crashed", "rejected"]
    """``rejected``: the function returned something that is no result."""
    value: Any = None
    """The result, as JSON holds it."""
    error: str = ""
    """What happened, and where in the user's code."""
    kind: str = ""
    """Name of the exception, if there was one."""
