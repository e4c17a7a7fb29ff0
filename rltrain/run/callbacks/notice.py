"""Decision whether a step still fits between a signal and the kill (`trainer.stop_notice_s`).

A scheduler kills a fixed time after SIGTERM. A step that cannot be finished and saved within that time is abandoned at
once, which leaves time to save the previous step. This is possible until an update of the step has started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from rltrain.common.clock import SYSTEM, Clock
from rltrain.common.stop import Stop
from rltrain.run.callbacks.callback import Callback
from rltrain.trainer.metrics.step import Answered, Metrics

# A step is expected to take as long as the slowest of this many recent steps.
_REMEMBERED = 5
# Share of the notice that is reserved for a save if no save has been timed yet.
_FIRST_SAVE = 0.25


class Notice(Callback):
    """Callback that times steps. After a signal it decides whether ``stop`` abandons the current step.

    saving_s(): seconds since the running save began; None if there is none. Saves do not overlap.
    """

    def __init__(self, stop: Stop, saving_s: Callable[[], float | None] = lambda: None, clock: Clock = SYSTEM) -> None:
        self._stop, self._saving_s, self._clock = stop, saving_s, clock
        self._step = 0
        self._began = 0.0
        self._updates_began: float | None = None
        self._in_step = False
        self._took: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # seconds of the step and of its updates
        self._save_s: float | None = None
        stop.leave_where(self._why_to_leave)

    def before_step(self, step: int) -> None:
        self._step, self._began, self._updates_began, self._in_step = step, self._clock.monotonic(), None, True

    def on_step(self, made: Answered) -> Metrics:
        now = self._clock.monotonic()
        self._took.append((now - self._began, now - (self._updates_began or now)))
        return {}

    def after_step(self, step: int) -> None:
        self._in_step = False

    def on_phase(self, name: str) -> None:
        """Record the start of the updates. Raises StepLeft."""
        if self._in_step:
            self._stop.raise_if_asked()
            if name.startswith("update_") and self._updates_began is None:
                self._updates_began = self._clock.monotonic()

    def on_save(self, step: int, folder: Path, seconds: float) -> Metrics:
        self._save_s = max(seconds, self._save_s or 0.0)
        return {}

    def _why_to_leave(self) -> str:
        left_s, notice_s = self._stop.left_s, self._stop.notice_s
        # A step whose updates have started is finished, because half-updated weights do not belong to any step.
        if notice_s is None or not self._in_step or self._updates_began is not None:
            return ""
        leaves = f"and trainer.stop_notice_s={notice_s:g} leaves {max(left_s, 0):.0f} s, so it was abandoned"
        if not self._took:
            return f"the duration of step {self._step} is not known yet, {leaves}"
        whole, updates = (max(seconds) for seconds in zip(*self._took, strict=True))
        # Even if the step already takes longer than usual, its updates still have to run.
        needs_s = max(whole - (self._clock.monotonic() - self._began), updates)
        save_s = _FIRST_SAVE * notice_s if self._save_s is None else self._save_s
        saving_s = self._saving_s()
        # A running save continues during the step, so only the time that it still takes after the step is added.
        if saving_s is not None:
            save_s += max(save_s - saving_s - needs_s, 0.0)
        if needs_s + save_s <= left_s:
            return ""
        return f"step {self._step} needs about {needs_s:.0f} s more, its save {save_s:.0f} s, {leaves}"
