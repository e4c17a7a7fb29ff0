"""What grows over a run: memory, files and threads of its processes, devices, the object store, /dev/shm.

Problem: a leak kills a run after days, and then nobody knows what leaked. Choice: every now and then all processes are
looked at, the largest of each kind are metrics, and a process that keeps growing is named in one warning, with how long
it can go on. Left out: limits, as the system has its own.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from rltrain.controller.group import WorkerGroup
from rltrain.controller.processes import Node, Process, ask_nodes, this_process
from rltrain.run.watchers.watcher import Watcher
from rltrain.trainer.metrics import Answered, Metrics

log = logging.getLogger(__name__)

# Processes are looked at every so many steps, and no less often than this.
_STEPS, _SECONDS = 10, 60.0
# So many looks, in three thirds, decide whether something grows. There are windows of all looks, and of one in so many:
# with a look a minute they span 12 minutes, 3 hours and 26 hours.
_WINDOW = 12
_STRIDES = (1, 16, 128)
# What counts as growth over a window: so much, and this share of what was there before.
_MEMORY, _SHARE = 128 << 20, 0.05
_NUMBER, _NUMBER_SHARE = 24, 0.25
_DEVICE = "perf/max_memory_allocated_gb"
# A warning names this many processes at most: all ranks of a cluster may leak.
_NAMED = 4


@dataclass(frozen=True)
class _Look:
    step: int
    value: float


class _History:
    """The looks at one number of one process. free_bytes: on its host, at the newest look."""

    def __init__(self) -> None:
        self.host, self.step, self.free_bytes, self._num = "", 0, 0, 0
        self._windows: list[deque[_Look]] = [deque(maxlen=_WINDOW) for _ in _STRIDES]
        self._least: dict[int, _Look] = {}

    def add(self, look: _Look, host: str, free_bytes: int) -> None:
        self.host, self.step, self.free_bytes, self._num = host, look.step, free_bytes, self._num + 1
        for stride, window in zip(_STRIDES, self._windows, strict=True):
            # A leak gives nothing back. Sampling every k-th look would alias; the minimum of k looks does not.
            self._least[stride] = min(self._least.get(stride, look), look, key=lambda each: each.value)
            if self._num % stride == 0:
                window.append(self._least.pop(stride))

    def growing(self, what: str) -> Sequence[_Look]:
        """The shortest window in which it grows; () if there is none."""
        return next((window for window in self._windows if _grows(window, what)), ())


class Drift(Watcher):
    """ask(): begins to look at all nodes; what it returns says what has come. ranks: by host and process id."""

    def __init__(self, ask: Callable[[], Callable[[], list[Node]]], ranks: Mapping[tuple[str, int], int]) -> None:
        self._ask = ask
        self._ranks = ranks
        self._come: Callable[[], list[Node]] | None = None
        self._asked_step, self._asked_at = -_STEPS, 0.0
        # (what, kind) -> who -> looks
        self._looks: dict[tuple[str, str], dict[str, _History]] = defaultdict(lambda: defaultdict(_History))
        self._told: set[tuple[str, str]] = set()

    @classmethod
    def of(cls, group: WorkerGroup) -> Drift:
        """Of all nodes of these workers."""
        return cls(lambda: ask_nodes(group.workers, group.nodes), group.ranks)

    def before_step(self, step: int) -> None:
        """Look, if it is time to."""
        now = time.monotonic()
        if step - self._asked_step >= _STEPS or now - self._asked_at >= _SECONDS:
            self._come, self._asked_step, self._asked_at = self._ask(), step, now

    def on_step(self, made: Answered) -> Metrics:
        """``drift/*`` where there was a look during this step."""
        if self._come is None:
            return {}
        step, found = made.step, made.metrics
        nodes, self._come = self._come(), None
        driver, here = this_process("driver"), socket.gethostname()
        processes = [(here, driver)] if driver else []
        processes += [(node.name, process) for node in nodes for process in node.processes]
        free = {node.name: node.free_bytes for node in nodes}
        metrics: Metrics = {}

        def look(what: str, kind: str, who: str, value: float, host: str) -> None:
            self._looks[what, kind][who].add(_Look(step, value), host, free.get(host, 0))
            name = f"drift/{what}" if what in ("files", "threads") else f"drift/{kind}_gb"
            value = value if what in ("files", "threads") else value / 2**30
            metrics[name] = max(value, metrics.get(name, 0.0))

        for host, process in processes:
            who = self._name(host, process)
            look("memory", process.kind, who, process.num_bytes, host)
            look("files", process.kind, who, process.num_files, host)
            look("threads", process.kind, who, process.num_threads, host)
        for node in nodes:
            look("memory", "object_store", f"the object store on {node.name}", node.store_bytes, node.name)
            look("memory", "shm", f"/dev/shm on {node.name}", node.shm_bytes, node.name)
        if _DEVICE in found:
            look("memory", "device", "the device that holds most", found[_DEVICE] * 2**30, "")
        self._forget(step, set(free))
        self._tell()
        return metrics

    def _name(self, host: str, process: Process) -> str:
        rank = self._ranks.get((host, process.pid))
        kind = {"engine": "engine process", "ray": "process of Ray"}.get(process.kind, process.kind)
        return f"{kind}{'' if rank is None else f' rank {rank}'} (pid {process.pid} on {host})"

    def _forget(self, step: int, hosts: set[str]) -> None:
        """Processes of these hosts that have ended: scorers come and go. A host may answer too late for this look."""
        for by_name in self._looks.values():
            for who in [who for who, looks in by_name.items() if looks.step != step and looks.host in hosts]:
                del by_name[who]

    def _tell(self) -> None:
        for (what, kind), by_name in self._looks.items():
            found = {who: by_name[who].growing(what) for who in by_name if (what, who) not in self._told}
            rates = {who: _rate(looks) for who, looks in found.items() if looks}
            if rates:
                first, *others = sorted(rates, key=lambda who: -rates[who])
                self._told |= {(what, who) for who in rates}
                named = "".join(f", {who}" for who in others[: _NAMED - 1])
                more = f", and {len(others) - _NAMED + 1} more" if len(others) >= _NAMED else ""
                also = f" So do{named[1:]}{more}." if others else ""
                log.warning("%s %s%s", first, _words(found[first], what, kind, by_name[first].free_bytes), also)


def _grows(looks: Sequence[_Look], what: str) -> bool:
    """Whether the numbers of a full window have grown, and do not go up and down, level off, or jump once."""
    if len(looks) < _WINDOW:
        return False
    values, third = [each.value for each in looks], _WINDOW // 3
    parts = [values[first : first + third] for first in range(0, _WINDOW, third)]
    if max(parts[0]) >= min(parts[2]):
        return False
    before, middle, now = map(median, parts)
    least, share = (_MEMORY, _SHARE) if what == "memory" else (_NUMBER, _NUMBER_SHARE)
    grown, jump = now - before, max(after - each for each, after in pairwise(values))
    steady = now - middle >= (middle - before) / 2 > 0 and jump <= grown / 2
    return steady and grown >= max(least, share * before)


def _rate(looks: Sequence[_Look]) -> float:
    """Growth a step."""
    return (looks[-1].value - looks[0].value) / max(looks[-1].step - looks[0].step, 1)


def _words(looks: Sequence[_Look], what: str, kind: str, free_bytes: int) -> str:
    first, last, rate = looks[0], looks[-1], _rate(looks)
    if what != "memory":
        has = f"has more and more {what}: {first.value:.0f} at step {first.step}, {last.value:.0f} at step {last.step}"
        return f"{has} (drift/{what}). A restart by the same command frees them."
    free = f"{free_bytes / 2**30:.1f} GiB are free there, enough for about {free_bytes / rate:,.0f} steps. "
    return (
        f"holds more and more memory: {first.value / 2**30:.2f} GiB at step {first.step}, {last.value / 2**30:.2f} GiB "
        f"at step {last.step}, {rate / 2**20:.1f} MiB a step (drift/{kind}_gb). {free if free_bytes else ''}"
        "A restart by the same command frees it."
    )
