"""Interface of the objects that observe a run: trackers, sample logger, user callbacks, drift, stop notice, saver.

By default each method does nothing. `Alarms` is not a callback, because it may end a step before its update and so is
part of the step.
"""

from __future__ import annotations

from pathlib import Path

from rltrain.trainer.metrics.step import Answered, Metrics


class Callback:
    """Hooks of a run. Metrics that a method returns are added to the metrics of the step."""

    def on_wait(self) -> None:
        """Called periodically while the driver waits for workers or scorers. An exception ends the wait."""

    def on_phase(self, name: str) -> None:
        """Called when phase ``name`` of a step, "testing" or "save_checkpoint" begins."""

    def before_step(self, step: int) -> None:
        """Called before ``step`` begins."""

    def on_step(self, made: Answered) -> Metrics:
        """Called after a step. ``made.metrics`` includes the metrics of the callbacks before this one."""
        return {}

    def after_step(self, step: int) -> None:
        """Called after ``step``, even if it failed."""

    def on_validation(self, made: Answered) -> Metrics:
        """Called after a validation. Arguments and result are as for `on_step`."""
        return {}

    def on_save(self, step: int, folder: Path, seconds: float) -> Metrics:
        """Called when the checkpoint ``folder`` of ``step`` is complete, ``seconds`` after its save began."""
        return {}

    def written(self, step: int, wait_s: float) -> bool:
        """Wait up to ``wait_s`` for the files that a checkpoint of ``step`` requires; return whether they are on
        disk."""
        return True

    def on_metrics(self, step: int, metrics: Metrics) -> None:
        """Called with all metrics of a step, or of a validation before the first step."""

    def on_failure(self) -> None:
        """Called when an error ends the run, while the workers are still running; the last chance to save."""

    def closing_warning(self) -> str:
        """Return text to print after the report of a finished run; "" for none."""
        return ""


class CallbackList(Callback):
    """All callbacks of a run, called in their order."""

    def __init__(self, *callbacks: Callback) -> None:
        self._all = list(callbacks)

    def add(self, *callbacks: Callback) -> None:
        """Register callbacks."""
        self._all += callbacks

    def on_wait(self) -> None:
        for callback in self._all:
            callback.on_wait()

    def on_phase(self, name: str) -> None:
        for callback in self._all:
            callback.on_phase(name)

    def before_step(self, step: int) -> None:
        for callback in self._all:
            callback.before_step(step)

    def on_step(self, made: Answered) -> Metrics:
        for callback in self._all:
            made.metrics.update(callback.on_step(made))
        return made.metrics

    def after_step(self, step: int) -> None:
        for callback in self._all:
            callback.after_step(step)

    def on_validation(self, made: Answered) -> Metrics:
        for callback in self._all:
            made.metrics.update(callback.on_validation(made))
        return made.metrics

    def on_save(self, step: int, folder: Path, seconds: float) -> Metrics:
        metrics: Metrics = {}
        for callback in self._all:
            metrics |= callback.on_save(step, folder, seconds)
        return metrics

    def written(self, step: int, wait_s: float) -> bool:
        return all(callback.written(step, wait_s) for callback in self._all)

    def on_metrics(self, step: int, metrics: Metrics) -> None:
        for callback in self._all:
            callback.on_metrics(step, metrics)

    def on_failure(self) -> None:
        for callback in self._all:
            callback.on_failure()

    def closing_warning(self) -> str:
        return "\n".join(filter(None, (callback.closing_warning() for callback in self._all)))
