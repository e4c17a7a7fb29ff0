"""Memory of the processes of a run as metrics (``drift/*``), to show which kind of process grows."""

from __future__ import annotations

import os
from collections.abc import Callable

from rltrain.common.clock import SYSTEM, Clock
from rltrain.run.callbacks.callback import Callback
from rltrain.runtime.processes import own_memory_gb
from rltrain.trainer.metrics.step import Answered, Metrics

# Memory is read every `_STEPS` steps, and at least every `_SECONDS` seconds.
_STEPS, _SECONDS = 10, 60.0


class Drift(Callback):
    """Metrics of the largest process of each kind over all nodes.

    ask(): requests metrics from all nodes, and returns a function for the replies received so far.
    """

    def __init__(self, ask: Callable[[], Callable[[], list[Metrics]]], clock: Clock = SYSTEM) -> None:
        self._ask, self._clock = ask, clock
        self._replies: Callable[[], list[Metrics]] | None = None
        self._asked_step, self._asked_at = -_STEPS, 0.0

    def before_step(self, step: int) -> None:
        """Request the metrics if they are due."""
        now = self._clock.monotonic()
        if step - self._asked_step >= _STEPS or now - self._asked_at >= _SECONDS:
            self._replies, self._asked_step, self._asked_at = self._ask(), step, now

    def on_step(self, made: Answered) -> Metrics:
        """Return ``drift/*`` if metrics were requested in this step."""
        if self._replies is None:
            return {}
        nodes, self._replies = self._replies(), None
        metrics = {"drift/driver_gb": own_memory_gb(os.getpid())}
        for node in nodes:
            metrics |= {name: max(value, metrics.get(name, 0.0)) for name, value in node.items()}
        return metrics
