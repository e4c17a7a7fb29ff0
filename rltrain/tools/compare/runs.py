"""A run as it is compared, read from its folder; runs that differ in nothing but seeds are one group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
from yaml import YAMLError, safe_load

from rltrain.base.errors import DataError
from rltrain.base.storage import patiently
from rltrain.config.verl.keys import leaves_of
from rltrain.run.report.table import read_metrics, summary

# What says where and when a run was made, and nothing of what it does.
_NAMES = (
    "trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir", "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
)  # fmt: skip
_OF_A_START = ("command", "folder", "host", "hosts")
_SEED = "seed"


@dataclass(frozen=True)
class Run:
    """The newest start of a run; what earlier starts have left is a run of its own (RUN/earlier_1)."""

    name: str
    folder: Path
    metrics: pd.DataFrame
    """One row a step, one column a metric; NaN where a step has none."""
    settings: dict[str, Any]
    """By dotted key, without names of runs and folders; empty where the run has no config.yaml."""
    environment: dict[str, Any]
    phases: dict[str, float]
    """The means of the report's rows, by label."""

    @property
    def seeds(self) -> dict[str, Any]:
        """The keys that a repetition changes."""
        return {key: value for key, value in self.settings.items() if key.rpartition(".")[2] == _SEED}


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone, or one run."""

    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        """That of the run; of several the first with how many there are."""
        first = self.runs[0].name
        return first if len(self.runs) == 1 else f"{first} (+{len(self.runs) - 1})"

    @cached_property
    def mean(self) -> pd.DataFrame:
        """Over the runs, of every step that all of them have."""
        if len(self.runs) == 1:
            return self.runs[0].metrics
        steps = self._by_step
        means: pd.DataFrame = steps.mean().where(steps.count() == len(self.runs)).dropna(how="all")
        return means

    @cached_property
    def spread(self) -> pd.DataFrame:
        """The standard deviation over the runs (of a sample, n - 1); of one run there is none."""
        spread: pd.DataFrame = self._by_step.std(ddof=1).reindex(self.mean.index)
        return spread

    @cached_property
    def _by_step(self) -> Any:
        return pd.concat([run.metrics for run in self.runs]).groupby(level=0)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Raises DataError for what is no run, or has no step; StorageError where it cannot be read."""
    return [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _names(folders: Sequence[Path]) -> list[str]:
    """The ends of the paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise DataError(f"{' '.join(map(str, folders))}: one run is named twice. Give every run once.")
    lengths = range(1, 1 + max(map(len, parts)))
    length = next(length for length in lengths if len({part[-length:] for part in parts}) == len(parts))
    return ["/".join(part[-length:]) for part in parts]


def _read(folder: Path, name: str) -> Run:
    lines = [line for line in read_metrics(folder) if isinstance(line.get("step"), int)]
    if not lines:
        raise DataError(f"{folder} has no step in its metrics.jsonl: nothing was measured yet.")
    # A step may have two lines: its own, and that of a validation.
    metrics = pd.DataFrame(lines).groupby("step").last().select_dtypes("number").astype(float)
    settings = {key: value for key, value in leaves_of(_settings(folder)) if key not in _NAMES}
    environment = {key: value for key, value in _environment(folder).items() if key not in _OF_A_START}
    phases = {label: mean for label, _, mean, *_ in summary(lines)[1]}
    return Run(name, folder, metrics, settings, environment, phases)


def _settings(folder: Path) -> Mapping[str, Any]:
    try:
        return safe_load(_text(folder, "config.yaml")) or {}
    except YAMLError as error:
        raise DataError(f"{folder / 'config.yaml'} cannot be read: {str(error).splitlines()[0]}.") from error


def _environment(folder: Path) -> dict[str, Any]:
    try:
        return json.loads(_text(folder, "env.json") or "{}")
    except ValueError as error:
        raise DataError(f"{folder / 'env.json'} cannot be read: {error}.") from error


def _text(folder: Path, name: str) -> str:
    """Empty where there is none: what an earlier start has left may be metrics alone; its settings are the run's."""
    for file in (folder / name, folder.parent / name):
        try:
            return patiently(file, partial(file.read_text, "utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            if not folder.name.startswith("earlier_"):
                break
    return ""


def grouped(runs: Sequence[Run]) -> list[Group]:
    """In the order of their first runs. Runs with the same seeds are a comparison and no repetition."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        rest = {key: value for key, value in run.settings.items() if key not in run.seeds}
        # Of a run without settings nobody can say what it has in common with others.
        what = json.dumps([rest, run.environment], sort_keys=True, default=str) if run.settings else run.name
        alike.setdefault(what, []).append(run)
    groups = []
    for members in alike.values():
        repeated = len({json.dumps(run.seeds, sort_keys=True) for run in members}) == len(members)
        groups += [Group(tuple(members))] if repeated else [Group((run,)) for run in members]
    return sorted(groups, key=lambda group: runs.index(group.runs[0]))


def differing(values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By key, the value of every run where not all have the same. values: by run, then by key."""
    keys = sorted({key for of_run in values.values() for key in of_run})
    tables = {key: {name: of_run.get(key) for name, of_run in values.items()} for key in keys}
    texts = {key: {json.dumps(value, default=str) for value in row.values()} for key, row in tables.items()}
    return {key: row for key, row in tables.items() if len(texts[key]) > 1}
