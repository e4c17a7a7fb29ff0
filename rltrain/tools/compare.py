"""``python -m rltrain.compare RUN RUN ...``: compare runs with the first one, as a table and as a page with curves.

Runs that differ only in their seeds are shown as one line, their mean. Differences are paired, step by step. Their
intervals use t statistics over seeds if two lines share seeds, else over batches of steps (Law and Kelton 2000, section
9.5), because neighbouring steps are correlated.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from yaml import YAMLError, safe_load

from rltrain.common.errors import DataError, RltrainError, command, short
from rltrain.common.logs import count
from rltrain.common.storage import distinct_suffixes, patiently, read_json, write_json, write_text
from rltrain.config.load import load_config
from rltrain.config.notes import unused_keys
from rltrain.config.verl.keys import leaves_of
from rltrain.run.report.charts import Line, Section, Table, line_chart, page
from rltrain.run.report.table import by_step, read_metrics
from rltrain.tools.evaluate.report import console_of, write_table

METRICS = (
    "critic/score/mean", "critic/rewards/mean", "response_length/mean", "actor/entropy", "actor/kl_loss",
    "actor/reward_kl_penalty", "actor/ppo_kl", "actor/grad_norm", "val-core/*/mean@*",
)  # fmt: skip
# Metrics whose best value is the largest; for others the best value is unknown.
_HIGHER_IS_BETTER = ("critic/score/*", "critic/rewards/*", "val-*")
# Keys with the name, location or time of a run.
_NAMES = (
    "trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir", "trainer.rollout_data_dir",
    "trainer.validation_data_dir", "env.command", "env.folder", "env.host", "env.hosts",
)  # fmt: skip
_BATCHES = 10
# Quantiles of Student's t at 97.5 % for 1 to 9 degrees of freedom. For more degrees of freedom the last value is used,
# which is at most 15 % too large.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_HEAD = ("metric", "line", "steps", "first", "last", "best", "mean", "difference [95 %]", "paired over")


@dataclass(frozen=True)
class Run:
    """The newest attempt of a run. Earlier attempts have separate folders (RUN/earlier_1)."""

    name: str
    metrics: pd.DataFrame
    """One row per step, one column per metric; NaN if a step has none."""
    settings: dict[str, Any]
    """Settings by dotted key and, as ``env.…``, versions and machine, without names of runs and folders."""
    unused: frozenset[str] = frozenset()
    """Settings without effect, such as keys of roles that the run does not have."""

    @cached_property
    def seeds(self) -> str:
        """The values of all keys ``seed``, as JSON."""
        return json.dumps({key: value for key, value in self.settings.items() if _is_seed(key)}, sort_keys=True)

    @cached_property
    def kind(self) -> str:
        """All settings except the seeds, as JSON. Without config.yaml: the name instead."""
        rest = {key: value for key, value in self.settings.items() if not _is_seed(key)}
        known = any(not key.startswith("env.") for key in self.settings)
        return json.dumps(rest, sort_keys=True, default=str) if known else self.name


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seeds, or one run: one line of the charts."""

    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        more = len(self.runs) - 1
        return self.runs[0].name + (f" (+{more})" if more else "")

    @cached_property
    def mean(self) -> pd.DataFrame:
        """Mean over the runs, for every step that all of them have."""
        means: pd.DataFrame = self._by_step.mean().where(self._by_step.count() == len(self.runs)).dropna(how="all")
        return means

    @cached_property
    def spread(self) -> pd.DataFrame:
        """Standard deviation over the runs (n - 1)."""
        spread: pd.DataFrame = self._by_step.std(ddof=1).reindex(self.mean.index)
        return spread

    @cached_property
    def _by_step(self) -> Any:
        return pd.concat([run.metrics for run in self.runs]).groupby(level=0)


def compare(folders: Sequence[Path], out: Path, patterns: Sequence[str] = ()) -> None:
    """Print the tables, and write compare.json and compare.html to ``out``. patterns: see `chosen_metrics`.

    Raises DataError for a folder that is not a run, for a metric that no run has and for runs without a common step;
    DiskError if ``out`` cannot be written.
    """
    runs = [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    groups, metrics = grouped(runs), chosen_metrics(runs, patterns)
    for group in groups:
        if group.mean.index.intersection(groups[0].mean.index).empty:
            names = [run.name for run in group.runs] if group is groups[0] else [groups[0].name, group.name]
            raise DataError(f"{' and '.join(names)} have no step in common. Compare runs that have the same steps.")
    rows = [row for metric in metrics for row in metric_rows(metric, groups)]
    keys = sorted({key for run in runs for key in run.settings} - frozenset.intersection(*(run.unused for run in runs)))
    settings = {key: {run.name: run.settings.get(key) for run in runs} for key in keys}
    differing = {
        key: row for key, row in settings.items() if len({json.dumps(v, default=str) for v in row.values()}) > 1
    }
    tables = [
        Table(_HEAD, [_cells(row) for row in rows]),
        Table(("setting", *(run.name for run in runs)),
              [(key, *(short(value, 40) for value in row.values())) for key, row in differing.items()]),
    ]  # fmt: skip
    write_table(console_of(), (tables[0].head, tables[0].rows))
    sys.stdout.write(f"settings and versions that differ: {len(differing)}\n")
    if differing:
        write_table(console_of(), (tables[1].head, tables[1].rows))
    lines = {group.name: [run.name for run in group.runs] for group in groups}
    write_json(out / "compare.json", {"lines": lines, "metrics": rows, "settings": differing})
    charts = [line_chart(metric, [*_lines(metric, groups)]) for metric in metrics]
    bands = any(len(group.runs) > 1 for group in groups)
    note = "A band is the standard deviation over runs that differ only in their seeds." if bands else ""
    sections = [Section("Curves", note, charts), Section("Values", tables=tables[:1])]
    sections.append(Section("Settings and versions that differ", tables=tables[1:]))
    write_text(out / "compare.html", page(" and ".join(lines), "Differences are from the first run.", [], sections))
    sys.stdout.write(f"written: {out / 'compare.json'}, {out / 'compare.html'}\n")


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest suffixes that distinguish the paths."""
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise DataError(f"{' '.join(map(str, folders))}: a run is named twice. Name every run once.")
    return distinct_suffixes(resolved, "/")


def _read(folder: Path, name: str) -> Run:
    steps = [line for line in read_metrics(folder) if isinstance(line.get("step"), int)]
    if not steps:
        raise DataError(f"{folder} has no step in its metrics.jsonl: the run has no metrics yet.")
    metrics = by_step(steps).select_dtypes("number").astype(float)
    # The folder of an earlier start has only metrics. Its settings are in the folder of the run.
    places = [folder, folder.parent] if folder.name.startswith("earlier_") else [folder]
    files = [file for place in places if (file := place / "config.yaml").is_file()]
    try:
        settings = dict(leaves_of(safe_load(patiently(files[0], files[0].read_bytes)) or {})) if files else {}
    except YAMLError as error:
        raise DataError(f"{files[0]} cannot be read: {str(error).splitlines()[0]}.") from error
    found = (read_json(place / "env.json") for place in places)
    settings |= {f"env.{key}": value for key, value in (next(filter(None, found), None) or {}).items()}
    kept = {key: value for key, value in settings.items() if key not in _NAMES}
    return Run(name, metrics.replace([np.inf, -np.inf], np.nan), kept, _unused(settings))


def _unused(settings: Mapping[str, Any]) -> frozenset[str]:
    try:
        loaded = load_config([], [{key: value for key, value in settings.items() if not key.startswith("env.")}])
    except RltrainError:  # the settings are from another version: compare all of them
        return frozenset()
    return frozenset(unused_keys(loaded))


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Return the lines in the order of their first runs. Runs with the same seeds are compared, not averaged."""
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        kinds.setdefault(run.kind, []).append(run)
    groups = []
    for members in kinds.values():
        repeated = len({run.seeds for run in members}) == len(members)
        groups += [Group(tuple(members))] if repeated else [Group((run,)) for run in members]
    return sorted(groups, key=lambda group: runs.index(group.runs[0]))


def chosen_metrics(runs: Sequence[Run], patterns: Sequence[str] = ()) -> list[str]:
    """Return the metrics that match the patterns, in their order; without patterns, `METRICS`.

    If there are no patterns, the reward is omitted if it equals the score in every run, for example if there is no KL
    penalty. Raises DataError if no run has a metric that matches a pattern.
    """
    names = sorted({str(name) for run in runs for name in run.metrics})
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = ", ".join(difflib.get_close_matches(pattern, names, n=3))
            hint = f"Near: {near}." if near else "metrics.jsonl of a run has all names."
            raise DataError(f"--metrics {pattern}: no run has this metric. {hint}")
    score, reward = METRICS[:2]
    if not patterns and all(_column(run.metrics, score).equals(_column(run.metrics, reward)) for run in runs):
        names = [name for name in names if name != reward]
    return list(dict.fromkeys(n for pattern in patterns or METRICS for n in names if fnmatchcase(n, pattern)))


def metric_rows(metric: str, groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Yield the values of one metric for every line, and its difference from the first line."""
    first = groups[0]
    for group in groups:
        values = _column(group.mean, metric)
        row: dict[str, Any] = {"metric": metric, "line": group.name, "steps": len(values)}
        if len(values):
            row |= {"first": values.iloc[0], "last": values.iloc[-1], "mean": values.mean()}
        if len(values) and any(fnmatchcase(metric, pattern) for pattern in _HIGHER_IS_BETTER):
            row |= {"best": values.max()}
        if len(values) and len(group.runs) > 1:
            row |= {"spread": _column(group.spread, metric).mean()}
        yield row | (difference(metric, first, group) if group is not first else {})


def difference(metric: str, first: Group, other: Group) -> dict[str, Any]:
    """Return the mean of b - a over the common steps, with its 95 % interval; empty without a common step.

    The units of the interval are seeds that both lines have, if there are two or more, else ten batches of steps.
    """
    gaps = (_column(other.mean, metric) - _column(first.mean, metric)).dropna()
    if gaps.empty:
        return {}
    mine, others = ({run.seeds: _column(run.metrics, metric) for run in group.runs} for group in (first, other))
    units = [float((others[seeds] - mine[seeds]).loc[gaps.index].mean()) for seeds in mine.keys() & others.keys()]
    found = {"difference": float(gaps.mean()), "over": f"{len(units)} seeds, {count(len(gaps), 'step')}"}
    if len(units) < max(2, len(mine), len(others)):
        units, found["over"] = [], count(len(gaps), "step")
        if len(gaps) >= 2 * _BATCHES:  # with fewer steps the variance is not known well enough
            units = [float(part.mean()) for part in np.array_split(gaps.to_numpy(), _BATCHES)]
    if not units:
        return found
    half = _T[min(len(units), _BATCHES) - 2] * float(np.std(units, ddof=1)) / len(units) ** 0.5
    return found | {"low": float(gaps.mean()) - half, "high": float(gaps.mean()) + half}


def _column(frame: pd.DataFrame, metric: str) -> pd.Series:
    return frame[metric].dropna() if metric in frame else pd.Series(dtype=float)


def _cells(row: Mapping[str, Any]) -> list[str]:
    texts = {name: f"{value:.4g}" for name, value in row.items() if isinstance(value, float)}
    mean = texts.get("mean", "") + (f" ± {texts['spread']}" if "spread" in texts else "")
    interval = f" [{texts['low']}, {texts['high']}]" if "low" in texts else ""
    values = (texts.get(name, "") for name in ("first", "last", "best"))
    return [row["metric"], row["line"], str(row["steps"]), *values, mean, texts.get("difference", "") + interval,
            row.get("over", "")]  # fmt: skip


def _lines(metric: str, groups: Sequence[Group]) -> Iterator[Line]:
    for group in groups:
        if len(values := _column(group.mean, metric)):
            spread = _column(group.spread, metric).reindex(values.index) if len(group.runs) > 1 else None
            band = () if spread is None else (values - spread, values + spread)
            yield Line(group.name, values.index, values, *band)


@command
def main(argv: list[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="rltrain compare",
        description="Compare runs with the first one: first, last, best and mean values of metrics, paired differences "
        "with 95 % intervals, settings and versions that differ, and a page with the curves. Runs that differ only in "
        "their seeds are one line.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (trainer.default_local_dir)")
    parser.add_argument("--metrics", nargs="+", default=[], metavar="NAME",
                        help=f"metrics, with * for any text (default: {' '.join(METRICS)})")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("compare"), metavar="FOLDER",
                        help="folder of compare.json and compare.html (default: compare)")  # fmt: skip
    arguments = parser.parse_args(argv)
    if len(arguments.runs) < 2:
        raise DataError(f"{arguments.runs[0]} is one run. Give two or more; rltrain report shows one.")
    compare(arguments.runs, arguments.out, arguments.metrics)
    return 0


if __name__ == "__main__":
    sys.exit(main())
