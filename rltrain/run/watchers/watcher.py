"""Whoever watches a run: trackers, kept answers, callbacks, drift, the time that a stop leaves, the saver.

Problem: each of them wants to know of other moments, and a run that knows each by its own methods is wired by hand.
Choice: one interface whose methods do nothing unless a watcher needs the moment, and one list. Left out: `Alarms`,
which may end a step before its update and so belongs to the step.
"""

from __future__ import annotations

from pathlib import Path

from rltrain.trainer.metrics import Answered, Metrics


class Watcher:
    """Each method may be left as it is. Metrics that a method returns become metrics of the step."""

    def on_wait(self) -> None:
        """Called every now and then while the driver waits for workers or scorers. What it raises ends the wait."""

    def on_phase(self, name: str) -> None:
        """Phase ``name`` of a step begins, or "testing", or "save_checkpoint"."""

    def before_step(self, step: int) -> None:
        """``step`` is about to begin."""

    def on_step(self, made: Answered) -> Metrics:
        """A step is made. Its metrics have those of the watchers before this one."""
        return {}

    def after_step(self, step: int) -> None:
        """``step`` is over, also where it failed."""

    def on_validation(self, made: Answered) -> Metrics:
        """A validation is made; likewise."""
        return {}

    def on_save(self, step: int, folder: Path, seconds: float) -> Metrics:
        """The checkpoint ``folder`` of ``step`` is whole and in its place, so long after its save began."""
        return {}

    def written(self, step: int, wait_s: float) -> bool:
        """Whether what a checkpoint of ``step`` presupposes is on the disk, or is within ``wait_s``."""
        return True

    def on_metrics(self, step: int, metrics: Metrics) -> None:
        """All metrics of a step, or of a validation before the first."""

    def on_failure(self) -> None:
        """An error ends the run, and the workers live still: the last moment to keep something."""

    def last_words(self) -> str:
        """What is to stand in the last lines of a run that has got to its end, behind the report; "" for nothing."""
        return ""


class Watchers(Watcher):
    """All of a run, asked in their order."""

    def __init__(self, *watchers: Watcher) -> None:
        self._all = list(watchers)

    def add(self, *watchers: Watcher) -> None:
        """They watch from now on."""
        self._all += watchers

    def on_wait(self) -> None:
        for watcher in self._all:
            watcher.on_wait()

    def on_phase(self, name: str) -> None:
        for watcher in self._all:
            watcher.on_phase(name)

    def before_step(self, step: int) -> None:
        for watcher in self._all:
            watcher.before_step(step)

    def on_step(self, made: Answered) -> Metrics:
        for watcher in self._all:
            made.metrics.update(watcher.on_step(made))
        return made.metrics

    def after_step(self, step: int) -> None:
        for watcher in self._all:
            watcher.after_step(step)

    def on_validation(self, made: Answered) -> Metrics:
        for watcher in self._all:
            made.metrics.update(watcher.on_validation(made))
        return made.metrics

    def on_save(self, step: int, folder: Path, seconds: float) -> Metrics:
        metrics: Metrics = {}
        for watcher in self._all:
            metrics |= watcher.on_save(step, folder, seconds)
        return metrics

    def written(self, step: int, wait_s: float) -> bool:
        return all(watcher.written(step, wait_s) for watcher in self._all)

    def on_metrics(self, step: int, metrics: Metrics) -> None:
        for watcher in self._all:
            watcher.on_metrics(step, metrics)

    def on_failure(self) -> None:
        for watcher in self._all:
            watcher.on_failure()

    def last_words(self) -> str:
        return "\n".join(filter(None, (watcher.last_words() for watcher in self._all)))
