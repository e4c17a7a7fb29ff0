"""The folder of an evaluation: what it was asked, the answers so far, and what was found.

Problem: an evaluation may take hours, and be killed in the middle. Choice: the answers to some prompts at a time are
one file in ``parts``, there whole or not at all, and all numbers are computed from these files: whoever goes on gets
those of an evaluation that never stopped. At the end the parts become one file, as a run keeps a validation.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rltrain.base.errors import ConfigError, DataError
from rltrain.base.storage import patiently, read_json, replacing, write_json

# Of one model; of several, next to the folders of each; the page of either.
RESULT, RESULTS, PAGE = "evaluation.json", "evaluations.json", "evaluation.html"
_ASKED, _PARTS = "asked.json", "parts"
_PART = re.compile(r"rows_(\d+)_(\d+)\.parquet")
_NUM_SHOWN = 4


class Kept:
    """The folder ``folder`` of an evaluation; ``asked``: of what, as `request.identity` says it."""

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        self.folder, self.asked = folder, asked

    def check(self) -> None:
        """Raise ConfigError where the folder has an evaluation that was asked for otherwise."""
        then = read_json(self.folder / _ASKED)
        if then is None:
            return
        keys = sorted(key for key in then.keys() | self.asked.keys() if then.get(key) != self.asked.get(key))
        if keys:
            told = [
                key if key in ("model", "data", "reward function") else f"{key}: {then.get(key)} then, {now} now"
                for key, now in ((key, self.asked.get(key)) for key in keys[:_NUM_SHOWN])
            ]
            more = f" and {len(keys) - _NUM_SHOWN} more" if len(keys) > _NUM_SHOWN else ""
            raise ConfigError(
                f"{self.folder} holds an evaluation of something else ({'; '.join(told)}{more}). Put that back, or "
                "give another out=FOLDER."
            )

    def result(self) -> dict[str, Any] | None:
        """What was found, once all is finished."""
        return read_json(self.folder / RESULT)

    def begin(self) -> None:
        """Write down what is asked for."""
        write_json(self.folder / _ASKED, self.asked)

    def part(self, rows: NDArray[np.int32]) -> Path:
        """The file of the answers to prompts that follow on one another."""
        return self.folder / _PARTS / f"rows_{rows[0]:06d}_{rows[-1]:06d}.parquet"

    def missing(self, num_prompts: int, at_once: int) -> list[NDArray[np.int32]]:
        """The prompts without answers, at most ``at_once`` of them in a row, in equal parts (see `Validation`)."""
        lacks = np.ones(num_prompts, dtype=bool)
        for first, last, _ in self._parts():
            lacks[first : last + 1] = False
        rows = np.flatnonzero(lacks).astype(np.int32)
        runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if len(rows) else []
        return [part for run in runs for part in np.array_split(run, -(-len(run) // at_once))]

    def join(self, step: int) -> Path:
        """All answers in one file, in the order of the prompts: ``samples/val_STEP.parquet``, as `view` reads it."""
        file = self.folder / "samples" / f"val_{step:06d}.parquet"
        table = self.answers()
        if table is not None:  # else an earlier start has come so far
            with replacing(file) as temporary:
                pq.write_table(table, temporary, compression="zstd")
        return file

    def answers(self) -> pa.Table | None:
        """The answers so far, before `finish`; None without any. Raises DataError for a file that cannot be read."""
        try:
            parts = [patiently(part, lambda part=part: pq.read_table(part)) for _, _, part in self._parts()]  # type: ignore[misc]
        except pa.ArrowException as error:
            raise DataError(
                f"{self.folder / _PARTS} has a file that cannot be read ({error}). Remove it, and run the same command "
                "again: its answers are made again."
            ) from error
        return _joined(parts) if parts else None

    def finish(self, result: dict[str, Any]) -> None:
        """Write down what was found; the parts are no longer needed."""
        write_json(self.folder / RESULT, result)
        shutil.rmtree(self.folder / _PARTS, ignore_errors=True)

    def _parts(self) -> Iterator[tuple[int, int, Path]]:
        """First and last prompt of each part, and its file, ascending."""
        try:
            names = sorted(os.listdir(self.folder / _PARTS))
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            if match := _PART.fullmatch(name):
                yield int(match[1]), int(match[2]), self.folder / _PARTS / name


def _joined(parts: Sequence[pa.Table]) -> pa.Table:
    """The parts as one. What a scorer gave for some prompts alone is lacking in the parts of the others, and what is a
    text in one part is a text in all.
    """
    texts = {field.name for part in parts for field in part.schema if pa.types.is_string(field.type)}
    cast = [
        part.cast(
            pa.schema(
                field.with_type(pa.string())
                if field.name in texts and (pa.types.is_floating(field.type) or pa.types.is_integer(field.type))
                else field
                for field in part.schema
            )
        )
        for part in parts
    ]
    return pa.concat_tables(cast, promote_options="permissive")
