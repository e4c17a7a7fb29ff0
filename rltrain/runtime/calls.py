"""Calls of a role's methods, checked by mypy and sent by Ray.

A call names the function of a Protocol (``Actor.update``), never a string: mypy finds typos, wrong arguments and wrong
uses of the result, and editors can jump to the signature. The function is sent by its import path. The worker process
calls the method of that name on the role whose class has the Protocol as a base.
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
    """Method of a role, with the arguments for one rank."""

    method: Callable[..., _Result]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def role(self) -> str:
        """Protocol that defines the method."""
        return self.method.__qualname__.partition(".")[0]

    @property
    def name(self) -> str:
        """Name in messages, deadlines and files: ``Actor.update``."""
        return self.method.__qualname__

    @property
    def num_objects(self) -> int:
        """Number of result entries that stay in the object store: all but the last of a tuple."""
        # Modules of roles postpone annotations, so `__annotations__` holds strings, not types.
        returned = get_type_hints(self.method)["return"]
        return len(get_args(returned)) - 1 if get_origin(returned) is tuple else 0


def bind(
    method: Callable[Concatenate[_Role, _Arguments], _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> Call[_Result]:
    """Bind ``method`` of a role to the arguments for one rank."""
    return Call(method, args, kwargs)


class Chunk(Protocol):
    """Result of `Stream.poll` for the driver."""

    @property
    def done(self) -> bool:
        """True if no more will follow."""


_Chunk = TypeVar("_Chunk", bound=Chunk)


@dataclass(frozen=True)
class Stream(Generic[_Chunk]):
    """Objects that workers return while a call runs. ``poll`` is called repeatedly on every rank until it is done.

    arrived(rank, reference of the object, chunk): called for every object. tick(): called periodically.
    """

    poll: Call[tuple[Any, _Chunk]]
    arrived: Callable[[int, Any, _Chunk], None]
    tick: Callable[[], None]


class Polls:
    """Pending calls of `Stream.poll`. open: reference of the chunk -> (rank, reference of the object)."""

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
