"""The process of a host: an event loop in which every trajectory is a task.

Requests arrive as pickles. Replies are sent as lines of JSON, which the other side only parses. A request is
``("begin", number, Start, turns, said, paid)``, ``("turn", number, Turn or None)``, ``("close", number)`` or
``("ping",)``.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, BinaryIO

from rltrain.agents.chat import Asked, Broken, Chat, Late, Start, Terms, Turn, within
from rltrain.agents.content import image_bytes
from rltrain.agents.endpoint import Endpoint
from rltrain.agents.loop import lead
from rltrain.agents.threads import abandoned_s
from rltrain.agents.toolbox import Session, Toolbox
from rltrain.common.errors import RltrainError
from rltrain.common.plugin import user_traceback
from rltrain.runtime.slots.child import MAX_ERROR_CHARS, opened
from rltrain.runtime.slots.service import MAX_RESULT_BYTES

_TICK_S = 0.25


@dataclass
class _Trajectory:
    chat: Chat | None = None
    task: asyncio.Task[None] | None = None
    busy_s: float = 0.0
    """Seconds of work, without the time that it waits for the policy."""
    waits: bool = False


def main(descriptor: int, parent: int) -> None:
    """Serve requests until the other end closes."""
    channel, requests, _ = opened(descriptor, parent)
    places, terms = pickle.load(requests)
    try:
        toolbox = Toolbox(places)
    except Exception as error:  # noqa: BLE001 - the import of a user's file may raise anything
        text = str(error) if isinstance(error, RltrainError) else user_traceback(error)
        _send(channel, {"unusable": text[:MAX_ERROR_CHARS]})
        return
    _send(channel, {"ready": True})
    with suppress(EOFError, ConnectionError):
        asyncio.run(_Stage(channel, toolbox, terms).serve(requests))
    os._exit(0)  # without waiting for threads that never end


def _send(channel: socket.socket, line: dict[str, Any]) -> None:
    channel.sendall(json.dumps(line).encode() + b"\n")


@dataclass
class _Stage:
    """The trajectories of this process, by number."""

    channel: socket.socket
    toolbox: Toolbox
    terms: Terms
    _all: dict[int, _Trajectory] = field(default_factory=dict)
    _endpoint: Endpoint = field(init=False)
    # The event loop keeps no strong reference to a task.
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, requests: BinaryIO) -> None:
        """Serve requests until the other end closes."""
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self._endpoint = Endpoint(loop)

        def read() -> None:
            try:
                while True:
                    loop.call_soon_threadsafe(inbox.put_nowait, pickle.load(requests))
            except BaseException:  # noqa: BLE001 - the other end has closed, or what it sends cannot be read
                os._exit(0)

        Thread(target=read, daemon=True).start()
        self._watching = asyncio.ensure_future(self._watch())
        while True:
            name, *arguments = await inbox.get()
            getattr(self, f"_{name}")(*arguments)

    def _ping(self) -> None:
        _send(self.channel, {"pong": abandoned_s()})

    def _begin(self, number: int, start: Start, *past: Any) -> None:
        trajectory = self._all[number] = _Trajectory()
        trajectory.task = asyncio.ensure_future(self._live(number, trajectory, start, past))

    def _turn(self, number: int, turn: Turn | None) -> None:
        if (trajectory := self._all.get(number)) and trajectory.chat:
            trajectory.waits = False
            trajectory.chat.answered(turn)

    def _close(self, number: int) -> None:
        if (trajectory := self._all.pop(number, None)) and trajectory.task:
            trajectory.task.cancel()

    async def _watch(self) -> None:
        limit = self.terms.trajectory_timeout_s
        while limit:
            await asyncio.sleep(_TICK_S)
            for number, trajectory in list(self._all.items()):
                trajectory.busy_s += 0.0 if trajectory.waits else _TICK_S
                if trajectory.busy_s > limit:
                    self._close(number)
                    self._tell(number, {"failed": f"not done after {limit:g} s (multi_turn.trajectory_timeout_s)"})

    async def _live(self, number: int, trajectory: _Trajectory, start: Start, past: tuple[Any, ...]) -> None:
        """Run a trajectory. past: turns, the messages after each, and their rewards."""

        def ask(asked: Asked) -> None:
            trajectory.waits = True
            self._tell(number, {"ask": asked.messages, "counts": asked.counts, "rewards": asked.rewards})

        opening = asyncio.ensure_future(self.toolbox.open(start.row, start.seed))
        try:
            # Shielded, because the instance that a thread creates would otherwise be lost and never closed.
            session = await within(asyncio.shield(opening), self.terms.timeout_s)
            session.names = [name for name in session.names if name in start.tools]
            chat = trajectory.chat = Chat(start.prompt, past, self.terms, session, ask, self._endpoint.address)
            outcome = await lead(chat, session, start, self.terms)
            asked = chat.last_words()
            end: dict[str, Any] = {"end": outcome, "extra": _of_json(session.extra_fields)}
            end |= {"said": asked.messages, "counts": asked.counts, "rewards": asked.rewards}
        except BaseException as error:  # noqa: BLE001 - user code: sys.exit must not end the process
            end = {"failed": _words_of(error, self.terms)}
        if trajectory.chat:
            self._endpoint.close(trajectory.chat)
            trajectory.chat.answered(None)  # otherwise a running thread would wait for turns that are never generated
        # Reported before it is closed, which may take time. A trajectory that was closed meanwhile is not reported.
        if self._all.pop(number, None):
            self._tell(number, end)
        self._closing.add(closing := asyncio.ensure_future(self._shut(opening)))
        closing.add_done_callback(self._closing.discard)

    async def _shut(self, opening: asyncio.Task[Session]) -> None:
        with suppress(Exception):  # the reason for a failed opening is already reported
            session = await within(opening, self.terms.timeout_s)
            await within(session.close(), self.terms.timeout_s)

    def _tell(self, number: int, line: dict[str, Any]) -> None:
        try:
            text = json.dumps({"number": number, **line})
        except (TypeError, ValueError) as error:
            text = json.dumps({"number": number, "failed": f"what was said is not JSON: {error}"})
        messages = line.get("ask") or line.get("said") or ()
        size = len(text) - image_bytes(message["content"] for message in messages)
        if size >= MAX_RESULT_BYTES:
            why = f"{size:,} bytes were said at once; {MAX_RESULT_BYTES:,} are taken"
            text = json.dumps({"number": number, "failed": why})
        self.channel.sendall(text.encode() + b"\n")


def _of_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that JSON can hold, converted to JSON values."""
    held = {}
    for name, value in fields.items():
        with suppress(TypeError, ValueError, RecursionError):
            held[str(name)] = json.loads(json.dumps(value))
    return held


def _words_of(error: BaseException, terms: Terms) -> str:
    if isinstance(error, Late):
        return f"no result after {terms.timeout_s:g} s (multi_turn.tool_timeout_s)"
    return str(error) if isinstance(error, Broken) else user_traceback(error)[-MAX_ERROR_CHARS:]
