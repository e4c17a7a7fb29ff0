"""What a comparison says: as text for a terminal, and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from rltrain.base.errors import short
from rltrain.base.logs import count
from rltrain.tools.compare.differences import PARITY, Difference, difference
from rltrain.tools.compare.runs import Group, differing
from rltrain.tools.compare.weights import Distance, distance

# Of the tensors that are farthest apart.
_SHOWN_TENSORS, _WIDTH = 5, 40


@dataclass(frozen=True)
class Comparison:
    """Everything is relative to the first group, and for weights to its first run."""

    groups: Sequence[Group]
    differences: Mapping[str, Sequence[Difference | None]]
    """By metric, of every group but the first."""
    settings: Mapping[str, Mapping[str, Any]]
    environment: Mapping[str, Mapping[str, Any]]
    """Both: by key, the value of every run; only those that differ."""
    weights: Mapping[str, Distance | str]
    """By run, of every run but the first."""

    @classmethod
    def of(cls, groups: Sequence[Group], metrics: Sequence[str]) -> Comparison:
        """Reads the weights of checkpoints, piece by piece."""
        first, *others = groups
        runs = [run for group in groups for run in group.runs]
        return cls(
            groups,
            {metric: [difference(metric, first, other) for other in others] for metric in metrics},
            # A run without settings has none that differ.
            differing({run.name: run.settings for run in runs if run.settings}),
            differing({run.name: run.environment for run in runs if run.environment}),
            {run.name: distance(runs[0], run) for run in runs[1:]},
        )

    def text(self) -> str:
        """Tables one below the other."""
        parts = [_table(title, rows) if len(rows) > 1 else f"{title}: none" for title, rows in self.tables()]
        parts += ["\n".join(["weights, ||b - a|| / ||a||", *self._weights()])] if self.weights else []
        return "\n\n".join(parts)

    def tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """Each with its title; the first row of each is its head. Those of what differs may have no other row."""
        runs = [run.name for group in self.groups for run in group.runs]
        found = [("runs", [("Line", "Runs", "Steps", "From", "To"), *map(_group_row, self.groups)])]
        found.append(("curves, over the steps in common", list(self._curves())))
        for title, values in (("settings that differ", self.settings), ("environments that differ", self.environment)):
            names = [name for name in runs if any(name in row for row in values.values())]
            rows = [(key, *(short(row[name], _WIDTH) for name in names)) for key, row in values.items()]
            found.append((title, [("Key", *names), *rows]))
        return [*found, ("means of a step", list(self._phases()))]

    def _curves(self) -> Any:
        yield "Metric", "Line", "Steps", "Mean", "Spread", "Mean difference", "Mean relative difference", "Rule"
        for metric, differences in self.differences.items():
            for group, found in zip(self.groups, [None, *differences], strict=True):
                values = group.mean[metric].dropna() if metric in group.mean else pd.Series()
                if found:
                    values = values[values.index.isin(self.groups[0].mean[metric].dropna().index)]
                if values.empty:
                    yield metric, group.name, "0", "-", "", "", "", ""
                    continue
                spread = f"{group.spread[metric].mean():.4g}" if len(group.runs) > 1 else ""
                yield metric, group.name, str(len(values)), f"{values.mean():.4g}", spread, *_words(found)

    def _phases(self) -> Any:
        first, *others = [(group.name, _phase_means(group)) for group in self.groups]
        yield "Row", first[0], *(cell for name, _ in others for cell in (name, "ratio"))
        labels = dict.fromkeys(label for _, means in (first, *others) for label in means)
        for label in labels:
            mine, cells = first[1].get(label), list[str]()
            for _, means in others:
                value = means.get(label)
                cells += [_number(value), f"{value / mine:.2f}" if value is not None and mine else ""]
            yield label, _number(mine), *cells

    def _weights(self) -> Any:
        for name, found in self.weights.items():
            if isinstance(found, str):
                yield f"  {name}: {found}"
                continue
            lacking = f"; {count(len(found.unlike), 'tensor')} not in both, or in other shapes, such as "
            unlike = lacking + found.unlike[0] if found.unlike else ""
            yield f"  {name}, step {found.step}: {found.whole:.3g} over {count(len(found.by_tensor), 'tensor')}{unlike}"
            for tensor, relative in list(found.by_tensor.items())[:_SHOWN_TENSORS]:
                yield f"    {relative:.3g}  {tensor}"

    def as_json(self) -> dict[str, Any]:
        """The same, and more digits; null where a number is not known or not finite."""
        first, *others = self.groups
        return finite({
            "runs": [
                {"name": run.name, "folder": str(run.folder.resolve()), "line": group.name, "seeds": run.seeds,
                 "steps": len(run.metrics), "means_of_a_step": run.phases}
                for group in self.groups for run in group.runs
            ],
            "first": first.name,
            "metrics": {
                metric: {
                    "mean": {
                        group.name: group.mean[metric].mean() for group in self.groups if metric in group.mean
                    },
                    "spread": {
                        group.name: group.spread[metric].mean()
                        for group in self.groups if len(group.runs) > 1 and metric in group.spread
                    },
                    "differences": {
                        other.name: found and {
                            "mean_absolute": found.absolute, "mean_relative": found.relative,
                            "steps": found.num_steps, "steps_left_out_of_relative": found.num_zeros,
                            "limit_of_relative": PARITY.get(metric), "passes": found.passes,
                        }
                        for other, found in zip(others, differences, strict=True)
                    },
                }
                for metric, differences in self.differences.items()
            },
            "settings": self.settings,
            "environment": self.environment,
            "weights": {
                name: {"not_compared": found} if isinstance(found, str) else {
                    "step": found.step, "whole": found.whole, "by_tensor": found.by_tensor, "unlike": found.unlike
                }
                for name, found in self.weights.items()
            },
        })  # fmt: skip


def _group_row(group: Group) -> tuple[str, ...]:
    steps = group.mean.index
    seeds = differing({run.name: run.seeds for run in group.runs})
    runs = ", ".join(run.name for run in group.runs)
    runs += f" (they differ in {' and '.join(seeds)} alone)" if seeds else ""
    return group.name, runs, str(len(steps)), str(steps.min()), str(steps.max())


def _words(found: Difference | None) -> tuple[str, str, str]:
    """Difference, relative difference, rule."""
    if not found:
        return "", "", ""
    relative = "-" if found.relative is None else f"{100 * found.relative:.2f} %"
    relative += f" (without {count(found.num_zeros, 'step')} of 0)" if found.num_zeros else ""
    rule = {None: "", True: "passes", False: "FAILS"}[found.passes]
    return f"{found.absolute:.4g}", relative, f"{rule} (4 %)" if rule else ""


def _phase_means(group: Group) -> dict[str, float]:
    """Over the runs that have the row."""
    labels = dict.fromkeys(label for run in group.runs for label in run.phases)
    values = {label: [run.phases[label] for run in group.runs if label in run.phases] for label in labels}
    return {label: sum(numbers) / len(numbers) for label, numbers in values.items()}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> str:
    """Columns that are as wide as their longest cell; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = "  ".join("-" * width for width in widths)
    head, *body = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([title, head, rule, *body])


def finite(value: Any) -> Any:
    """Numbers that JSON lacks are null."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
