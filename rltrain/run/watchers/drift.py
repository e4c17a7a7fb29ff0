"""What a run holds: memory, files and threads of its processes, devices, the object store, /dev/shm.

Problem: a leak kills a run after days, and then nobody knows what leaked. Choice: every now and then all processes are
looked at, and the largest of each kind are metrics (``drift/*``). Left out: to judge what grows, which a plot over the
steps shows and whoever watches a cluster is told of.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rltrain.controller.group import WorkerGroup
from rltrain.controller.processes import Node, ask_nodes, this_process
from rltrain.run.watchers.watcher import Watcher
from rltrain.trainer.metrics import Answered, Metrics

# Processes are looked at every so many steps, and no less often than this.
_STEPS, _SECONDS = 10, 60.0
_DEVICE = "perf/max_memory_allocated_gb"


class Drift(Watcher):
    """ask(): begins to look at all nodes; what it returns says what has come."""

    def __init__(self, ask: Callable[[], Callable[[], list[Node]]]) -> None:
        self._ask = ask
        self._come: Callable[[], list[Node]] | None = None
        self._asked_step, self._asked_at = -_STEPS, 0.0

    @classmethod
    def of(cls, group: WorkerGroup) -> Drift:
        """Of all nodes of these workers."""
        return cls(lambda: ask_nodes(group.workers, group.nodes))

    def before_step(self, step: int) -> None:
        """Look, if it is time to."""
        now = time.monotonic()
        if step - self._asked_step >= _STEPS or now - self._asked_at >= _SECONDS:
            self._come, self._asked_step, self._asked_at = self._ask(), step, now

    def on_step(self, made: Answered) -> Metrics:
        """``drift/*`` where there was a look during this step."""
        if self._come is None:
            return {}
        nodes, self._come = self._come(), None
        driver = this_process("driver")
        metrics: Metrics = {}

        def largest(name: str, value: float) -> None:
            metrics[f"drift/{name}"] = max(value, metrics.get(f"drift/{name}", 0.0))

        for process in [*([driver] if driver else []), *(process for node in nodes for process in node.processes)]:
            largest(f"{process.kind}_gb", process.num_bytes / 2**30)
            largest("files", process.num_files)
            largest("threads", process.num_threads)
        for node in nodes:
            largest("object_store_gb", node.store_bytes / 2**30)
            largest("shm_gb", node.shm_bytes / 2**30)
        if _DEVICE in made.metrics:
            largest("device_gb", made.metrics[_DEVICE])
        return metrics
