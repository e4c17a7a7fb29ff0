"""Tools at work: the calls of many conversations, in processes that can be killed.

Problem: a call may take seconds, hang or end its process, and the engine must go on with other conversations
meanwhile. Choice: threads, each with a slot of its own, work on one list of calls; the engine asks now and then which
turns have all their results. Left out: tools with state, which need the same process call after call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from rltrain.agents.toolbox import ToolCalls
from rltrain.data.turns.calls import Call
from rltrain.slots.limits import Limits
from rltrain.slots.service import Service
from rltrain.slots.slot import Slot

# An answer to a prompt: place and sample.
Key = tuple[int, int]
_TIMEOUT = "actor_rollout_ref.rollout.multi_turn.tool_timeout_s"
_MEMORY = "actor_rollout_ref.rollout.multi_turn.tool_memory_mb"
# Of calls that raised nothing.
_STATUS = {"timeout": "timeout", "rejected": "error", "crashed": "died"}


@dataclass(frozen=True)
class Result:
    """What has come of a call."""

    text: str
    """What the model reads."""
    status: str
    """``ok``, ``error``, ``timeout`` or ``died``: its process ended, twice where something else may have killed it."""
    reward: float = 0.0
    seconds: float = 0.0


@dataclass(eq=False)
class _Turn:
    """The results of a turn's calls, as far as they are there."""

    key: Key
    results: list[Result | None]


class Tools:
    """The tools of the file ``place``, called in ``number`` processes."""

    def __init__(self, place: str, number: int, limits: Limits) -> None:
        self._place, self._limits = place, limits
        self._service = Service(ToolCalls, "the tool", _TIMEOUT, _MEMORY)
        self._asked: SimpleQueue[tuple[_Turn, int, Call]] = SimpleQueue()
        # A turn of which something is new, or why no tool can be called any more.
        self._returned: SimpleQueue[_Turn | BaseException] = SimpleQueue()
        # Places and samples begin anew in every step, so a turn is known by the object.
        self._turns: dict[Key, _Turn] = {}
        for _ in range(number):
            Thread(target=self._work, daemon=True).start()

    def ask(self, key: Key, calls: Sequence[Call]) -> None:
        """Begin the calls of a turn; one without calls is answered at once."""
        turn = self._turns[key] = _Turn(key, [None] * len(calls))
        for place, call in enumerate(calls):
            self._asked.put((turn, place, call))
        self._returned.put(turn)

    def forget(self) -> None:
        """Nobody waits any more for what has been asked so far."""
        self._turns = {}

    def answered(self, wait_s: float = 0.0) -> list[tuple[Key, list[Result]]]:
        """The turns that have all their results by now. Waits so long for the first news.

        Raises RltrainError where the tools cannot be imported.
        """
        whole = []
        try:
            turn = self._returned.get(timeout=wait_s) if wait_s else self._returned.get_nowait()
            while True:
                if isinstance(turn, BaseException):
                    raise turn
                if self._turns.get(turn.key) is turn and None not in turn.results:
                    del self._turns[turn.key]
                    whole.append((turn.key, [result for result in turn.results if result]))
                turn = self._returned.get_nowait()
        except Empty:
            return whole

    def _work(self) -> None:
        try:
            with Slot(self._service, self._limits) as slot:
                while True:
                    turn, place, call = self._asked.get()
                    if self._turns.get(turn.key) is turn:
                        turn.results[place] = self._call(slot, call)
                        self._returned.put(turn)
        except BaseException as error:  # noqa: BLE001 - a thread that ended in silence would be waited for without end
            self._returned.put(error)

    def _call(self, slot: Slot, call: Call) -> Result:
        started = time.perf_counter()
        outcome = slot.call(self._place, call.name, call.arguments)
        seconds = time.perf_counter() - started
        if outcome.status == "ok":
            return Result(str(outcome.value["text"]), "ok", float(outcome.value["reward"]), seconds)
        # The last line of a traceback says what happened; the frames are for people.
        words = outcome.error.strip().splitlines() or [outcome.status]
        status = "error" if outcome.kind else _STATUS[outcome.status]
        return Result(f"Error: {words[-1] if outcome.kind else words[0]}", status, 0.0, seconds)
