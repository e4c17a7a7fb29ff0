"""Logging of metrics: always to metrics.jsonl, and to the console and the trackers of ``trainer.logger``.

A tracker that is down, slow or hanging must not stop or slow down a run. So each tracker runs in a separate thread,
failed entries are retried with growing pauses, and the end of the run waits for a limited time. metrics.jsonl has all
metrics, unless the run folder stays unwritable until the end.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rltrain.common.background import Appender
from rltrain.common.clock import Backoff
from rltrain.common.storage import disk_errors, json_lines, swapping
from rltrain.config.schema.trainer import LOGGERS, TrainerConfig
from rltrain.run.callbacks.callback import Callback
from rltrain.run.report.console import Console
from rltrain.run.report.table import METRICS
from rltrain.run.report.trackers import TRACKERS, Rows, RunInfo, Sink
from rltrain.trainer.metrics.step import Metrics

log = logging.getLogger(__name__)

# Entries (steps, tables) kept for a tracker that is down; the oldest are dropped first.
MOST_KEPT = 10_000
# Pauses between attempts.
_BACKOFF = Backoff(1.0, 300.0)
# After this many failures in a row, the tracker counts as down.
_DOWN_AFTER = 3
# An entry that failed this many times while others succeeded is dropped.
_GIVE_UP_AFTER = 5
# Seconds that a run waits for its trackers at its end, and after a failure.
CLOSE_S, _CLOSE_AFTER_FAILURE_S = 60.0, 10.0
# File with the id of the run in each tracker.
IDS_FILE = "tracking.json"
# Key of a generated run name in that file.
_NAME = "run_name"


class JsonLines:
    """Appender of one JSON object per step to a file.

    A line that cannot be written is kept and written with a later one, after a single warning, because this must
    neither stop training nor hide another error. Raises an error of `write_error` if the file cannot be opened at the
    start.
    """

    def __init__(self, file: Path) -> None:
        with disk_errors(file), file.open("ab"):
            self._file, self._lines = file, Appender(file)
        self._has_warned = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if (error := self._lines.add(json.dumps({"step": step, **metrics}) + "\n")) and not self._has_warned:
            self._has_warned = True
            text = "%s cannot be written (%s): training continues, and its lines are written later"
            log.warning(text, self._file, error.strerror)

    def close(self) -> None:
        if error := self._lines.close(_CLOSE_AFTER_FAILURE_S):
            log.warning("%s lacks its last %d lines: %s", self._file, self._lines.num_late, error)


class Sender(threading.Thread):
    """Thread that creates one tracker and sends entries to it.

    The first error is logged, and failed entries are retried with growing pauses.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        backoff: Backoff = _BACKOFF,
        most_kept: int = MOST_KEPT,
    ) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self._tracker, self._make, self._backoff, self._most_kept = name, make, backoff, most_kept
        self._sink: Sink | None = None
        self._changed = threading.Condition()
        # A dict instead of a queue: it is ordered, and an entry can be removed from the middle. Every call of `put`
        # creates a new function, so keys are unique.
        self._waiting: dict[Callable[[Sink], None], int] = {}  # entry -> number of failures
        self._finish: Callable[[Sink], None] | None = None
        self._lost = 0
        self._has_warned = False
        self.given_up = False
        self.start()

    def put(self, send: Callable[[Sink], None]) -> None:
        """Queue one entry to send. Return at once."""
        with self._changed:
            if len(self._waiting) == self._most_kept:
                self._waiting.pop(next(iter(self._waiting)))
                self._lost += 1
            self._waiting[send] = 0
            self._changed.notify()

    def ask_to_finish(self, finish: Callable[[Sink], None]) -> None:
        """Send the waiting entries, then ``finish``, then end."""
        with self._changed:
            self._finish = finish
            self._changed.notify()

    def wait_until_finished(self, within_s: float) -> None:
        """Wait until the thread has ended, and log the number of lost entries."""
        self.join(max(0.0, within_s))
        self.given_up = self.is_alive()
        if self._lost or self.given_up:
            left = len(self._waiting) + self._lost
            log.warning(
                "tracker '%s': not finished, %d entries did not arrive; metrics.jsonl has all", self._tracker, left
            )

    def run(self) -> None:
        failures = 0
        while True:
            with self._changed:
                # The tracker is created at once, so that a missing login is reported before the first step has ended.
                self._changed.wait_for(lambda: self._waiting or self._finish or not self._sink)
                entries, finish = list(self._waiting), self._finish
            try:
                self._sink = self._sink or self._make()
                sent = self._send(entries, self._sink)
                if sent and finish:
                    finish(self._sink)
                    return
            # Any error, even SystemExit, because if the thread ended, its entries would be lost silently.
            except BaseException as error:  # noqa: BLE001
                self._warn_once(error)
                sent = False
            failures = 0 if sent else 1 if finish else failures + 1
            if not sent:
                pause_s = self._backoff.pause_s(failures)
                with self._changed:
                    # The pause ends early when the run ends.
                    self._changed.wait_for(lambda was=finish: self._finish is not was, timeout=pause_s)  # type: ignore[misc]

    def _send(self, entries: list[Callable[[Sink], None]], sink: Sink) -> bool:
        """Try to send all entries in order. Return whether all were sent. Raises if the tracker is down."""
        failed: list[Callable[[Sink], None]] = []
        in_a_row = 0
        for send in entries:  # (a full queue may drop some entries meanwhile)
            try:
                send(sink)
            except BaseException as error:
                failed.append(send)
                in_a_row += 1
                # Raise the error before attempts are counted, because a tracker that is down is not the entries' fault.
                if in_a_row == _DOWN_AFTER:
                    raise
                self._warn_once(error)
            else:
                in_a_row = 0
                with self._changed:
                    self._waiting.pop(send, None)
        with self._changed:
            # An attempt counts only if another entry was sent, because then the entry itself was refused.
            for send in failed if len(failed) < len(entries) else []:
                if send in self._waiting:
                    self._waiting[send] += 1
                    if self._waiting[send] == _GIVE_UP_AFTER:
                        del self._waiting[send]
                        self._lost += 1
        return not failed

    def _warn_once(self, error: BaseException) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = (
                "tracker '%s' failed (%s: %s). Training continues; "
                "entries that were not sent are retried in the background"
            )
            log.warning(text, self._tracker, type(error).__name__, error)


class Tracker(Callback, AbstractContextManager["Tracker"]):
    """Sender of metrics and tables to all outputs of ``trainer.logger``.

    The exit of its context finishes these outputs.
    """

    def __init__(self, loggers: Sequence[str], run: RunInfo, total_steps: int, close_s: float | None = None) -> None:
        self._close_s = CLOSE_S if close_s is None else close_s
        self._console = Console(run.first_step, total_steps, shown="console" in loggers)
        self._always = JsonLines(run.folder / METRICS)
        # Ids under which a resumed run continues.
        self._ids_file = run.folder / IDS_FILE
        # A run from step 0 is new; with the old ids its steps would mix with steps of the previous run.
        self._ids = read_ids(self._ids_file) if run.first_step else {}
        self._ids |= {} if run.chosen else {_NAME: run.name}
        self._ids_lock = threading.Lock()
        self._senders: list[Sender] = []
        # The summary is kept here, so that a tracker gets all of it at the end, even if steps were lost.
        self._summary: dict[str, float] = {}
        for line in json_lines(run.folder / METRICS):
            self._summarise(line["step"], line)
        for name in dict.fromkeys(loggers):
            if package := missing_package(name):
                log.warning("trainer.logger=%s needs 'pip install %s'; it is skipped", name, package)
            elif name in TRACKERS:
                own = replace(run, run_id=self._ids.get(name))
                self._senders.append(Sender(name, lambda name=name, own=own: self._make(name, own)))  # type: ignore[misc]

    @classmethod
    def of(
        cls, trainer: TrainerConfig, settings: dict[str, Any], folder: Path, first_step: int, total_steps: int
    ) -> Tracker:
        """Create the tracker of a run in ``folder`` that continues after ``first_step``. settings: all settings of the
        run, which trackers show.
        """
        names, chosen = (trainer.project_name, trainer.experiment_name), True
        if names[1] == TrainerConfig.experiment_name:  # with the default, all runs would have the same name
            kept = read_ids(folder / IDS_FILE).get(_NAME) if first_step else None
            names, chosen = (names[0], kept or f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}"), False
        return cls(trainer.logger, RunInfo(*names, settings, folder, first_step, chosen=chosen), total_steps)

    def _make(self, name: str, run: RunInfo) -> Sink:
        sink = TRACKERS[name](run)
        if sink.run_id:
            # Trackers run in threads, and the file that is written last must contain all ids.
            with self._ids_lock:
                self._ids[name] = sink.run_id
                try:
                    with swapping(self._ids_file) as temporary:
                        temporary.write_text(json.dumps(self._ids, indent=1), encoding="utf-8")
                # The tracker works; creating it again would start a new run with every attempt.
                except OSError as error:
                    log.warning(
                        "%s cannot be written, so a resumed run begins new tracker runs: %s", self._ids_file, error
                    )
        return sink

    def on_metrics(self, step: int, metrics: Metrics) -> None:
        """Send the metrics of ``step``."""
        self._always.log(step, metrics)
        self._console.log(step, metrics)
        self._summarise(step, metrics)
        for sender in self._senders:
            sender.put(lambda sink: sink.log(step, metrics))

    def _summarise(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            if (key == "critic/score/mean" or key.startswith("val-core/")) and math.isfinite(value):
                best = max(value, self._summary.get(f"summary/best/{key}", value))
                self._summary |= {f"summary/best/{key}": best, f"summary/last/{key}": value}
        self._summary["summary/steps"] = step

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Rows) -> None:
        """Send a table of texts and numbers, such as sampled responses, to every tracker.

        name: such as "val/generations".
        """
        for sender in self._senders:
            sender.put(lambda sink: sink.log_table(step, name, list(columns), [list(row) for row in rows]))

    def on_phase(self, name: str) -> None:
        self._console.phase(name)

    def close(self, failed: bool = False) -> None:
        """Finish all outputs, waiting at most a minute for trackers that do not respond."""
        self._console.close()
        self._always.close()
        # All are requested to finish before any wait, so that they finish in parallel within one deadline.
        senders, self._senders = self._senders, []
        for sender in senders:
            sender.ask_to_finish(lambda sink: sink.finish(self._summary, failed))
        deadline = time.monotonic() + (_CLOSE_AFTER_FAILURE_S if failed else self._close_s)
        for sender in senders:
            sender.wait_until_finished(deadline - time.monotonic())

    def __exit__(self, kind: object, error: BaseException | None, where: Any) -> None:
        self.close(failed=error is not None)


def hanging() -> bool:
    """Return whether a tracker of a closed run still does not respond."""
    return any(isinstance(thread, Sender) and thread.given_up for thread in threading.enumerate())


def missing_package(logger: str) -> str | None:
    """Return the package to install for ``logger``, or None."""
    package = LOGGERS[logger]
    return package if package and importlib.util.find_spec(package) is None else None


def read_ids(file: Path) -> dict[str, str]:
    """Return the id of the run in each tracker; empty if the file cannot be read."""
    try:
        ids = json.loads(file.read_text("utf-8")) if file.exists() else {}
        return {str(name): str(run_id) for name, run_id in ids.items()}
    except (OSError, ValueError, AttributeError) as error:
        log.warning("%s cannot be read, so trackers begin new runs: %s", file, error)
        return {}
