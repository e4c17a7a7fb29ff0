"""The process of an executor: an event loop in which every trajectory is a task.

Requests arrive as pickles. Replies are lines of JSON, which the other side only parses. A request is ``("start",
number, TrajectoryStart, turns, messages, rewards)``, ``("turn", number, Turn or None)``, ``("close", number)`` or
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

from rltrain.agents.chat import (
    CallTimeout,
    Chat,
    NewMessages,
    TrajectoryFailed,
    TrajectoryStart,
    Turn,
    TurnLimits,
    with_timeout,
)
from rltrain.agents.content import image_bytes
from rltrain.agents.endpoint import Endpoint
from rltrain.agents.loop import run_trajectory
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
    """Seconds of work, without waiting for the policy."""
    waits: bool = False


def main(descriptor: int, parent: int) -> None:
    """Serve requests until the other end closes."""
    channel, requests, _ = opened(descriptor, parent)
    sources, turn_limits = pickle.load(requests)
    try:
        toolbox = Toolbox(sources)
    except Exception as error:  # noqa: BLE001 - the import of a user's file may raise anything
        text = str(error) if isinstance(error, RltrainError) else user_traceback(error)
        _send(channel, {"unusable": text[:MAX_ERROR_CHARS]})
        return
    _send(channel, {"ready": True})
    with suppress(EOFError, ConnectionError):
        asyncio.run(_Trajectories(channel, toolbox, turn_limits).serve(requests))
    os._exit(0)  # without waiting for threads that never end


def _send(channel: socket.socket, line: dict[str, Any]) -> None:
    channel.sendall(json.dumps(line).encode() + b"\n")


@dataclass
class _Trajectories:
    """The trajectories of this process, by number."""

    channel: socket.socket
    toolbox: Toolbox
    turn_limits: TurnLimits
    _by_number: dict[int, _Trajectory] = field(default_factory=dict)
    _endpoint: Endpoint = field(init=False)
    # Tasks are kept here, because the event loop has no strong reference to a task.
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

    def _start(self, number: int, start: TrajectoryStart, *past: Any) -> None:
        trajectory = self._by_number[number] = _Trajectory()
        trajectory.task = asyncio.ensure_future(self._run(number, trajectory, start, past))

    def _turn(self, number: int, turn: Turn | None) -> None:
        if (trajectory := self._by_number.get(number)) and trajectory.chat:
            trajectory.waits = False
            trajectory.chat.deliver(turn)

    def _close(self, number: int) -> None:
        if (trajectory := self._by_number.pop(number, None)) and trajectory.task:
            trajectory.task.cancel()

    async def _watch(self) -> None:
        limit = self.turn_limits.trajectory_timeout_s
        while limit:
            await asyncio.sleep(_TICK_S)
            for number, trajectory in list(self._by_number.items()):
                trajectory.busy_s += 0.0 if trajectory.waits else _TICK_S
                if trajectory.busy_s > limit:
                    self._close(number)
                    self._report(number, {"failed": f"not done after {limit:g} s (multi_turn.trajectory_timeout_s)"})

    async def _run(self, number: int, trajectory: _Trajectory, start: TrajectoryStart, past: tuple[Any, ...]) -> None:
        """Run a trajectory. past: turns, and the messages and rewards after each."""

        def request(new: NewMessages) -> None:
            trajectory.waits = True
            self._report(number, {"request": new.messages, "counts": new.counts, "rewards": new.rewards})

        opening = asyncio.ensure_future(self.toolbox.open(start.row, start.seed))
        try:
            # The call is shielded. Otherwise the instance that a thread creates would be lost and never closed.
            session = await with_timeout(asyncio.shield(opening), self.turn_limits.timeout_s)
            session.names = [name for name in session.names if name in start.tools]
            chat = trajectory.chat = Chat(
                start.prompt, past, self.turn_limits, session, request, self._endpoint.address
            )
            outcome = await run_trajectory(chat, session, start, self.turn_limits)
            new = chat.take_new()
            end: dict[str, Any] = {"end": outcome, "extra": _json_fields(session.extra_fields)}
            end |= {"messages": new.messages, "counts": new.counts, "rewards": new.rewards}
        except BaseException as error:  # noqa: BLE001 - user code: sys.exit must not end the process
            end = {"failed": _reason(error, self.turn_limits)}
        if trajectory.chat:
            self._endpoint.close(trajectory.chat)
            trajectory.chat.deliver(None)  # otherwise a running thread would wait for turns that are never generated
        # Report before closing the session, because closing may take time. Do not report a trajectory closed meanwhile.
        if self._by_number.pop(number, None):
            self._report(number, end)
        self._closing.add(closing := asyncio.ensure_future(self._close_session(opening)))
        closing.add_done_callback(self._closing.discard)

    async def _close_session(self, opening: asyncio.Task[Session]) -> None:
        with suppress(Exception):  # the reason for a failed opening is already reported
            session = await with_timeout(opening, self.turn_limits.timeout_s)
            await with_timeout(session.close(), self.turn_limits.timeout_s)

    def _report(self, number: int, line: dict[str, Any]) -> None:
        try:
            text = json.dumps({"number": number, **line})
        except (TypeError, ValueError) as error:
            text = json.dumps({"number": number, "failed": f"its messages are not JSON: {error}"})
        messages = line.get("request") or line.get("messages") or ()
        size = len(text) - image_bytes(message["content"] for message in messages)
        if size >= MAX_RESULT_BYTES:
            why = f"{size:,} bytes of messages at once; the limit is {MAX_RESULT_BYTES:,}"
            text = json.dumps({"number": number, "failed": why})
        self.channel.sendall(text.encode() + b"\n")


def _json_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that JSON can hold, converted to JSON values."""
    values = {}
    for name, value in fields.items():
        with suppress(TypeError, ValueError, RecursionError):
            values[str(name)] = json.loads(json.dumps(value))
    return values


def _reason(error: BaseException, turn_limits: TurnLimits) -> str:
    if isinstance(error, CallTimeout):
        return f"no result after {turn_limits.timeout_s:g} s (multi_turn.tool_timeout_s)"
    return str(error) if isinstance(error, TrajectoryFailed) else user_traceback(error)[-MAX_ERROR_CHARS:]
