"""Calls of a role's methods as values that mypy checks and Ray carries.

A call names the function of a Protocol (``Actor.update``), never a string: a typing error, a wrong argument or a wrong
use of the result is found by mypy, and a reader gets to the signature with one click. The function travels by its
import path, and the worker process takes the method of that name from the role whose class has the Protocol as a base.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, get_args, get_origin, get_type_hints

_Role = TypeVar("_Role")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


@dataclass(frozen=True)
class Call(Generic[_Result]):
    """A method of a role, with the arguments for one rank."""

    method: Callable[..., _Result]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def role(self) -> str:
        """The Protocol that has the method."""
        return self.method.__qualname__.partition(".")[0]

    @property
    def name(self) -> str:
        """How messages, deadlines and files speak of it: ``Actor.update``."""
        return self.method.__qualname__

    @property
    def num_objects(self) -> int:
        """Entries of the result that stay in the object store: of a tuple all but the last."""
        # Modules of roles postpone annotations, so `__annotations__` holds strings and not types.
        returned = get_type_hints(self.method)["return"]
        return len(get_args(returned)) - 1 if get_origin(returned) is tuple else 0


def bind(
    method: Callable[Concatenate[_Role, _Arguments], _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> Call[_Result]:
    """``method`` of a role with the arguments for one rank."""
    return Call(method, args, kwargs)


class Chunk(Protocol):
    """What `Stream.poll` tells the driver."""

    @property
    def done(self) -> bool:
        """No more will come."""


_Chunk = TypeVar("_Chunk", bound=Chunk)


@dataclass(frozen=True)
class Stream(Generic[_Chunk]):
    """What workers hand out while a call runs: ``poll`` is called on every rank again and again until it is done.

    arrived(rank, reference of the object, chunk): something came. tick(): called every now and then.
    """

    poll: Call[tuple[Any, _Chunk]]
    arrived: Callable[[int, Any, _Chunk], None]
    tick: Callable[[], None]


class Polls:
    """Calls of `Stream.poll` under way. open: result for the driver -> (rank, object)."""

    def __init__(self, workers: Sequence[Any], stream: Stream[Any] | None) -> None:
        self._workers, self._stream = workers, stream
        self.open: dict[Any, tuple[int, Any]] = {}
        for rank in range(len(workers)) if stream else ():
            self._ask(rank)

    @property
    def ranks(self) -> set[int]:
        return {rank for rank, _ in self.open.values()}

    def _ask(self, rank: int) -> None:
        assert self._stream
        payload, chunk = self._workers[rank].poll.options(num_returns=2).remote(self._stream.poll)
        self.open[chunk] = rank, payload

    def receive(self, reference: Any, chunk: Any) -> None:
        assert self._stream
        rank, payload = self.open.pop(reference)
        self._stream.arrived(rank, payload, chunk)
        if not chunk.done:
            self._ask(rank)

    def tick(self) -> None:
        if self._stream:
            self._stream.tick()
