"""The best checkpoint by a validation metric (`trainer.keep_best`), and early stopping (`trainer.patience`).

Validation results are in metrics.jsonl, which a resumed run reads, so no further state is saved.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from rltrain.common.errors import ConfigError
from rltrain.common.storage import json_lines
from rltrain.config.schema.trainer import TrainerConfig


class Best:
    """Values of the metric by step of the validation, in ``values``."""

    def __init__(self, cfg: TrainerConfig, file: Path | None = None, step: int = 0) -> None:
        """Read the values up to ``step`` from ``file`` (metrics.jsonl). Raises StorageError if it cannot be read."""
        self._metric, self._patience, self._sign = cfg.keep_best, cfg.patience, 1 if cfg.keep_best_mode == "max" else -1
        self.values: dict[int, float] = {}
        for line in json_lines(file) if file and step and self._metric else ():
            if line.get("step", math.inf) <= step:
                self._remember(int(line["step"]), line.get(self._metric or ""))

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of the validation after ``step``. Raises ConfigError if the metric is missing."""
        if not self._metric or not metrics:
            return
        if self._metric not in metrics:
            near = difflib.get_close_matches(self._metric, metrics, n=3, cutoff=0.0)
            raise ConfigError(
                f"trainer.keep_best={self._metric}: a validation has no metric of that name. Choose another, such as "
                f"{', '.join(near)}, and rerun the command."
            )
        self._remember(step, metrics[self._metric])

    def _remember(self, step: int, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self.values[step] = value

    def of(self, steps: Iterable[int]) -> int | None:
        """Return the best of ``steps``, the earliest if several are equal; None if none of them was validated."""
        validated = [step for step in sorted(steps) if step in self.values]
        return max(validated, key=lambda step: self._sign * self.values[step], default=None)

    def stalled(self) -> str:
        """Return the reason to stop early, or ""."""
        best = self.of(self.values)
        since = [] if best is None else [step for step in self.values if step > best]
        if best is None or not self._patience or len(since) < self._patience:
            return ""
        return (
            f"stopped early after step {max(since)}: the last {len(since)} validations found no better {self._metric} "
            f"than the {self.values[best]:.4g} of step {best} (trainer.patience={self._patience})"
        )
