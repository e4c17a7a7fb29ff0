"""Creation of scorers in a slot's process, and conversion of their return values to a score and extras.

Imports neither torch nor Ray nor NumPy, because every slot process imports it.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rltrain.common.errors import RewardError, RltrainError
from rltrain.common.plugin import user_traceback
from rltrain.rewards.custom import CustomReward, RewardFunction
from rltrain.rewards.processes.score import ScorerCall, parse_result
from rltrain.rewards.scorers.registry import find_scorer
from rltrain.runtime.slots.child import Rejected

_NAMELESS = (
    "\nThe reward function was given as an object, so other processes cannot find its functions by their names: write "
    "them into a file and give FILE.py:NAME."
)


@dataclass(frozen=True)
class ScorerLoader:
    """Creates the scorer of a data source: ``custom`` for all of them, or a built-in one."""

    custom: CustomReward | None

    def __call__(self, source: str) -> Callable[..., Any]:
        try:
            if self.custom is None:
                scorer = find_scorer(source)
                return lambda _, text, truth, extra: _read(source, scorer(last_turn(text, extra), truth, extra))
            return _Lists(self.custom) if self.custom.batch else _Single(self.custom)
        except RltrainError:
            raise
        except BaseException as error:  # noqa: BLE001 - the import of a reward library may raise anything
            raise RewardError(f"the scorer of {source!r} cannot be imported:\n{user_traceback(error)}") from None


def last_turn(solution: str, extra: dict[str, Any]) -> str:
    """Return the last turn of a multi-turn response, because a tool's result may look like an answer."""
    turn = extra.get("last_turn")
    return turn if isinstance(turn, str) else solution


class _Single:
    """The user's function, called once per response."""

    def __init__(self, custom: CustomReward) -> None:
        self._custom, self._function = custom, RewardFunction(custom)
        self.is_async = self._function.is_async

    def __call__(self, *call: Any) -> Any:
        if self.is_async:
            return self._awaited(call)
        with _hint(self._custom):
            return _read(call[0], self._function(*call))

    async def _awaited(self, call: Sequence[Any]) -> dict[str, Any]:
        with _hint(self._custom):
            return _read(call[0], await self._function.begin(*call))


class _Lists:
    """The user's function, called with lists of responses (reward_manager=batch)."""

    takes_lists = True

    def __init__(self, custom: CustomReward) -> None:
        self._custom, self._function = custom, RewardFunction(custom)

    def __call__(self, *calls: ScorerCall) -> list[Any]:
        with _hint(self._custom):
            returned = list(self._function(*map(list, zip(*calls, strict=True))))
        if len(returned) != len(calls):
            raise Rejected(f"the reward function returned {len(returned)} results for {len(calls)} responses")
        return [_read_or_error(call[0], value) for call, value in zip(calls, returned, strict=True)]


@contextmanager
def _hint(custom: CustomReward) -> Iterator[None]:
    """Add a hint to an error of pickling if the function was given as an object."""
    try:
        yield
    except pickle.PicklingError as error:
        if custom.path.endswith(".pkl"):
            error.args = (f"{error}{_NAMELESS}",)
        raise


def _read_or_error(source: str, returned: Any) -> Any:
    try:
        return _read(source, returned)
    except BaseException as error:  # noqa: BLE001 - an item may be an exception, which is the reason for a missing score
        return error


def _read(source: str, returned: Any) -> dict[str, Any]:
    if isinstance(returned, BaseException):
        raise returned
    try:
        score, extras = parse_result(returned)
    except Exception as error:  # noqa: BLE001 - a returned object may raise anything when it is read
        raise Rejected(f"data_source={source!r}: {error}") from None
    return {"score": score, "extras": extras}
