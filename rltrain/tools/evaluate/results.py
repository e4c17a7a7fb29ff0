"""The folder of an evaluation: its settings, the responses so far, and the result.

An evaluation may take hours and may be killed. So the responses to a part of the prompts are one file in ``parts``,
written atomically, and all statistics are computed from these files: a resumed evaluation has the same result as an
uninterrupted one. At the end the parts are joined to one file, in the format of a run's validation.
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

from rltrain.common.errors import ConfigError, DataError
from rltrain.common.storage import patiently, read_json, replacing, write_json

# Result of one model, in its folder. Results of several models, next to their folders. The page.
RESULT, RESULTS, PAGE = "evaluation.json", "evaluations.json", "evaluation.html"
_ASKED, _PARTS = "asked.json", "parts"
_PART = re.compile(r"rows_(\d+)_(\d+)\.parquet")
_NUM_SHOWN = 4


class ResultFolder:
    """The folder ``folder`` of an evaluation. ``identity``: its settings and digests, from `request.identity`."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder, self.identity = folder, identity

    def check(self) -> None:
        """Raise ConfigError if the folder has an evaluation with other settings."""
        then = read_json(self.folder / _ASKED)
        if then is None:
            return
        keys = sorted(key for key in then.keys() | self.identity.keys() if then.get(key) != self.identity.get(key))
        if keys:
            differences = [
                key if key in ("model", "data", "reward function") else f"{key}: {then.get(key)} then, {now} now"
                for key, now in ((key, self.identity.get(key)) for key in keys[:_NUM_SHOWN])
            ]
            more = f" and {len(keys) - _NUM_SHOWN} more" if len(keys) > _NUM_SHOWN else ""
            raise ConfigError(
                f"{self.folder} holds another evaluation ({'; '.join(differences)}{more}). Use these settings, or give "
                "another out=FOLDER."
            )

    def result(self) -> dict[str, Any] | None:
        """Return the result, or None if the evaluation is unfinished."""
        return read_json(self.folder / RESULT)

    def begin(self) -> None:
        """Write the settings."""
        write_json(self.folder / _ASKED, self.identity)

    def part(self, rows: NDArray[np.int32]) -> Path:
        """Return the file of the responses to consecutive prompts."""
        return self.folder / _PARTS / f"rows_{rows[0]:06d}_{rows[-1]:06d}.parquet"

    def missing(self, num_prompts: int, at_once: int) -> list[NDArray[np.int32]]:
        """Return the prompts without responses, in chunks of equal size, at most ``at_once`` (see `Validation`)."""
        lacks = np.ones(num_prompts, dtype=bool)
        for first, last, _ in self._parts():
            lacks[first : last + 1] = False
        rows = np.flatnonzero(lacks).astype(np.int32)
        runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if len(rows) else []
        return [part for run in runs for part in np.array_split(run, -(-len(run) // at_once))]

    def join(self, step: int) -> Path:
        """Join all responses, in the order of the prompts: ``samples/val_STEP.parquet``, as `view` reads it."""
        file = self.folder / "samples" / f"val_{step:06d}.parquet"
        table = self.answers()
        if table is not None:  # otherwise an earlier run of the command has already joined them
            with replacing(file) as temporary:
                pq.write_table(table, temporary, compression="zstd")
        return file

    def answers(self) -> pa.Table | None:
        """Return the responses so far, before `finish`; None if there are none. Raises DataError for an unreadable
        file."""
        try:
            parts = [patiently(part, lambda part=part: pq.read_table(part)) for _, _, part in self._parts()]  # type: ignore[misc]
        except pa.ArrowException as error:
            raise DataError(
                f"{self.folder / _PARTS} has a file that cannot be read ({error}). Remove it and rerun the command to "
                "regenerate its responses."
            ) from error
        return _joined(parts) if parts else None

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result and remove the parts."""
        write_json(self.folder / RESULT, result)
        shutil.rmtree(self.folder / _PARTS, ignore_errors=True)

    def _parts(self) -> Iterator[tuple[int, int, Path]]:
        """Yield the first and last prompt and the file of each part, ascending."""
        try:
            names = sorted(os.listdir(self.folder / _PARTS))
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            if match := _PART.fullmatch(name):
                yield int(match[1]), int(match[2]), self.folder / _PARTS / name


def _joined(parts: Sequence[pa.Table]) -> pa.Table:
    """Concatenate parts. A column that a part lacks is filled with null; a column is text if it is text in any part."""
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
