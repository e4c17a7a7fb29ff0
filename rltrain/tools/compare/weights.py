"""How far the weights of two runs are from each other, from the models that their checkpoints export."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from rltrain.models.files.entries import Entries, NoEntries, read_entries
from rltrain.tools.compare.runs import Run

# Numbers that are in memory at once, of each model.
_PIECE = 2**24


@dataclass(frozen=True)
class Distance:
    """Relative L2 distances ||b - a|| / ||a||, where a is the first run's."""

    step: int
    whole: float
    """Of all weights together."""
    by_tensor: dict[str, float]
    """The largest first."""
    unlike: tuple[str, ...]
    """Names that only one of them has, or in another shape."""


def exported_steps(folder: Path) -> set[int]:
    """The steps whose checkpoints hold a model in Hugging Face's form."""
    files = folder.glob("global_step_*/huggingface/config.json")
    return {int(number) for file in files if (number := file.parts[-3].rpartition("_")[2]).isdecimal()}


def distance(first: Run, other: Run) -> Distance | str:
    """At the newest step that both have exported; the reason where they cannot be compared."""
    steps = exported_steps(first.folder) & exported_steps(other.folder)
    if not steps:
        return "no checkpoint of the same step with an exported model in both"
    step = max(steps)
    try:
        mine, others = (read_entries(str(run.folder / f"global_step_{step}" / "huggingface")) for run in (first, other))
    except NoEntries as error:
        return f"step {step}: {error}"
    alike = {
        name for name, empty in others.empty.items() if name in mine.empty and mine.empty[name].shape == empty.shape
    }
    shared = [name for name in mine.empty if name in alike]
    squares = {name: _squares(mine, others, name) for name in shared}
    by_tensor = {name: _relative(*pair) for name, pair in squares.items()}
    gaps, sizes = zip(*squares.values(), strict=True) if squares else ((), ())
    return Distance(
        step,
        _relative(sum(gaps), sum(sizes)),
        dict(sorted(by_tensor.items(), key=lambda item: -item[1])),
        tuple(sorted((mine.empty.keys() | others.empty.keys()) - set(shared))),
    )


def _squares(mine: Entries, others: Entries, name: str) -> tuple[float, float]:
    """||b - a||^2 and ||a||^2 of one tensor, summed in float64."""
    gap = size = 0.0
    for first, last in _pieces(mine.empty[name].shape):
        a, b = (entries.rows(name, first, last).double() for entries in (mine, others))
        gap += float((b - a).square().sum())
        size += float(a.square().sum())
    return gap, size


def _pieces(shape: torch.Size) -> Iterator[tuple[int, int]]:
    num_rows = shape[0] if shape else 1
    rows_at_once = max(1, _PIECE // max(1, math.prod(shape[1:])))
    return ((first, min(first + rows_at_once, num_rows)) for first in range(0, num_rows, rows_at_once))


def _relative(gap: float, size: float) -> float:
    return 0.0 if not gap else math.sqrt(gap / size) if size else math.inf
