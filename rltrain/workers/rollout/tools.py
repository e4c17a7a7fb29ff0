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
from typing import Literal, cast

from rltrain.data.functions import ToolCalls
from rltrain.data.turns.calls import Call
from rltrain.slots.limits import Limits
from rltrain.slots.service import Service
from rltrain.slots.slot import Slot

# An answer to a prompt: place and sample.
Key = tuple[int, int]
_TIMEOUT = "actor_rollout_ref.rollout.multi_turn.tool_timeout_s"
_MEMORY = "actor_rollout_ref.rollout.multi_turn.tool_memory_mb"
Status = Literal["ok", "error", "timeout", "died"]
# Of calls that raised nothing.
_STATUS = {"timeout": "timeout", "rejected": "error", "crashed": "died"}


@dataclass(frozen=True)
class Result:
    """What has come of a call."""

    text: str
    """What the model reads."""
    status: Status
    """``died``: its process has ended, twice where something else may have killed it."""
    reward: float = 0.0
    seconds: float = 0.0


class Tools:
    """The tools of the file ``place``, called in ``number`` processes."""

    def __init__(self, place: str, number: int, limits: Limits) -> None:
        self._place, self._limits = place, limits
        self._service = Service(ToolCalls, "the tool", _TIMEOUT, _MEMORY)
        self._asked: SimpleQueue[tuple[Key, int, Call]] = SimpleQueue()
        self._returned: SimpleQueue[tuple[Key, int, Result]] = SimpleQueue()
        self._results: dict[Key, list[Result | None]] = {}
        for _ in range(number):
            Thread(target=self._work, daemon=True).start()

    def ask(self, key: Key, calls: Sequence[Call]) -> None:
        """Begin the calls of a turn."""
        self._results[key] = [None] * len(calls)
        for place, call in enumerate(calls):
            self._asked.put((key, place, call))

    def forget(self) -> None:
        """Nobody waits any more for what has been asked so far."""
        self._results = {}

    def answered(self, wait_s: float = 0.0) -> list[tuple[Key, list[Result]]]:
        """The turns that have all their results by now. Waits so long for the first result."""
        whole = []
        try:
            item = self._returned.get(timeout=wait_s) if wait_s else self._returned.get_nowait()
            while True:
                key, place, result = item
                if results := self._results.get(key):
                    results[place] = result
                    if None not in results:
                        whole.append((key, [each for each in self._results.pop(key) if each]))
                item = self._returned.get_nowait()
        except Empty:
            return whole

    def _work(self) -> None:
        with Slot(self._service, self._limits) as slot:
            while True:
                key, place, call = self._asked.get()
                if key in self._results:
                    self._returned.put((key, place, self._call(slot, call)))

    def _call(self, slot: Slot, call: Call) -> Result:
        started = time.perf_counter()
        outcome = slot.call(self._place, call.name, call.arguments)
        seconds = time.perf_counter() - started
        if outcome.status == "ok":
            return Result(str(outcome.value["text"]), "ok", float(outcome.value["reward"]), seconds)
        # The last line of a traceback says what happened; the frames are for people.
        words = outcome.error.strip().splitlines() or [outcome.status]
        status = cast(Status, "error" if outcome.kind else _STATUS[outcome.status])
        return Result(f"Error: {words[-1] if outcome.kind else words[0]}", status, 0.0, seconds)
