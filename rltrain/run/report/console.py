"""Terminal output during training: a progress bar with numbers and the phase, or one line per step."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from rltrain.common import logs

log = logging.getLogger(__name__)

# Metrics shown for a step, in this order. On a narrow terminal the last ones are omitted.
SHOWN = {
    "train/loss": "loss", "critic/score/mean": "score", "reward/error_rate": "reward_errors", "actor/kl_loss": "kl",
    "actor/reward_kl_penalty": "kl_in_reward", "response_length/mean": "length", "actor/entropy": "entropy",
    "perf/throughput": "tok/s/device", "actor/grad_norm": "grad_norm", "actor/pg_loss": "pg_loss", "actor/lr": "lr",
    "train/grad_norm": "grad_norm", "train/lr": "lr", "timing_s/step": "step_s",
}  # fmt: skip
_ONLY_IF_NOT_ZERO = {"reward/error_rate"}
# Number of recent steps from which the remaining time is estimated.
_RECENT = 20
_VALIDATION = re.compile(r"(val-core/.*)/((?:mean|best|maj|worst|std|pass)@.*)")


class _Phase(ProgressColumn):
    """Column with the running phase and its seconds."""

    def render(self, task: Task) -> Text:
        name, since = task.fields["phase"], task.fields["since"]
        return Text(f"{name} {time.monotonic() - since:.0f} s" if name else "")


class _Bar(Progress):
    """Two lines: the numbers of the newest step, and step, bar, phase and remaining time."""

    numbers: tuple[str, ...] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        lines = accumulate(self.numbers, "{}  {}".format)
        yield Text(max((line for line in lines if len(line) <= logs.console.width), key=len, default=""), no_wrap=True)
        yield self.make_tasks_table(self.tasks)


class Console:
    """Terminal output. Steps are written to train.log, and to the terminal if ``shown``. Validation lines stay
    visible."""

    def __init__(self, first_step: int, total_steps: int, *, shown: bool) -> None:
        self._total = total_steps
        self._steps: deque[Mapping[str, float]] = deque(maxlen=_RECENT)
        self._bar: _Bar | None = None
        if shown and logs.console.is_terminal:
            place, left = TextColumn("step {task.completed}/{task.total}"), TextColumn("{task.fields[left]}")
            columns = (place, BarColumn(bar_width=24), _Phase(), left)
            self._bar = _Bar(*columns, console=logs.console, refresh_per_second=2)
            fields: dict[str, Any] = {"phase": "", "since": time.monotonic(), "left": ""}
            self._task = self._bar.add_task("", total=total_steps, completed=first_step, **fields)
            self._bar.start()
        logs.show_steps(shown and self._bar is None)

    def phase(self, name: str) -> None:
        """Show that phase ``name`` of a step starts."""
        if self._bar:
            self._bar.update(self._task, phase=name, since=time.monotonic())

    def log(self, step: int, metrics: dict[str, float]) -> None:
        place = f"{step}/{self._total}"
        if "timing_s/step" in metrics:
            fields = shown(metrics)
            self._steps.append(metrics)
            left = timedelta(seconds=round(seconds_left(self._steps, self._total - step)))
            # Log the line even with a bar, because train.log has every step; `show_steps` controls the terminal.
            logs.STEPS.info("step %s  %s", place, "  ".join((*fields, f"left={left}")))
            if self._bar:
                self._bar.numbers = fields
                self._bar.update(self._task, completed=step, left=f"{left} left")
        for name, numbers in validation_lines(metrics).items():
            log.info("validation %s  %s  %s", place, name, "  ".join(numbers))

    def close(self) -> None:
        if self._bar:
            self.phase("")
            self._bar.stop()
            self._bar = None


def shown(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Return the metrics of a step that are shown, as text."""
    return tuple(
        f"{label}={metrics[name]:.4g}"
        for name, label in SHOWN.items()
        if name in metrics and (metrics[name] or name not in _ONLY_IF_NOT_ZERO)
    )


def seconds_left(steps: Sequence[Mapping[str, float]], num_steps: int) -> float:
    """Return the estimated seconds of ``num_steps`` more steps, from the metrics of the newest ``steps``."""
    # The remaining time includes validation and saving.
    recent = [step.get("timing_s/wall", step["timing_s/step"]) for step in [*steps][-_RECENT:]]
    return sum(recent) / len(recent) * num_steps


def validation_lines(metrics: dict[str, float]) -> dict[str, list[str]]:
    """Return the metrics of each data source and variable."""
    lines: dict[str, list[str]] = {}
    for key, value in metrics.items():
        if key.startswith("val/loss"):
            lines.setdefault(key.removeprefix("val/"), []).append(f"{value:.4g}")
        elif match := _VALIDATION.fullmatch(key):
            lines.setdefault(match[1], []).append(f"{match[2]}={value:.4g}")
    return lines
