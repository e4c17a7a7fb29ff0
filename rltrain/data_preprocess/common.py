"""What every converter shares: the row layout, the files it writes and the command line around it."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rltrain.data.rows import read_rows
from rltrain.errors import DataError, RltrainError

Row = dict[str, Any]
Splits = Mapping[str, Sequence[Row]]

_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_REWARD = pa.struct([("style", pa.string()), ("ground_truth", pa.string())])


def row(
    data_source: str,
    question: str,
    ground_truth: str,
    *,
    ability: str,
    split: str,
    index: int,
    system: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Row:
    """One row of verl's schema: a user message (after a system message, if any) with a rule-checked answer."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return {
        "data_source": data_source,
        "prompt": [*messages, {"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **(extra or {})},
    }


def write_splits(output: str | Path, splits: Splits) -> dict[str, Path]:
    """Write ``<output>/<split>.parquet`` for every split that has rows; the same rows give the same bytes.

    Pages carry checksums, and a file appears whole or not at all. What was written is read back and checked.
    """
    folder = Path(output).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, rows in splits.items():
        if not rows:
            continue
        path = folder / f"{split}.parquet"
        temporary = folder / f".{split}.parquet.{os.getpid()}"
        try:
            pq.write_table(_table(rows), temporary, write_page_checksum=True)
            read_rows(str(temporary))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        written[split] = path
    return written


def arguments(description: str, *, output: str) -> argparse.ArgumentParser:
    """A parser with the option every converter has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", default=output, help="folder for train.parquet and test.parquet")
    return parser


def run(convert: Callable[[argparse.Namespace], Splits], options: argparse.Namespace) -> int:
    """Convert, write, and show what was written: counts and the first row. Returns the exit code."""
    try:
        splits = convert(options)
        written = write_splits(options.output, splits)
    except RltrainError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    for split, path in written.items():
        sys.stdout.write(f"{split}: {len(splits[split])} rows -> {path}\n")
    first = next(iter(written), None)
    if first is not None:
        sys.stdout.write(json.dumps(splits[first][0], indent=2, ensure_ascii=False) + "\n")
    return 0


def at_least(minimum: int) -> Callable[[str], int]:
    """An argparse type: a whole number no smaller than ``minimum``."""

    def parse(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{number} is less than {minimum}")
        return number

    parse.__name__ = f"int >= {minimum}"
    return parse


def _table(rows: Sequence[Row]) -> pa.Table:
    columns = {
        "data_source": pa.array([row["data_source"] for row in rows], pa.string()),
        "prompt": pa.array([row["prompt"] for row in rows], pa.list_(_MESSAGE)),
        "ability": pa.array([row["ability"] for row in rows], pa.string()),
        "reward_model": pa.array([row["reward_model"] for row in rows], _REWARD),
    }
    try:
        columns["extra_info"] = pa.array([row["extra_info"] for row in rows])
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"extra_info changes its types from row to row ({error}); store it as JSON text.") from error
    return pa.table(columns)
