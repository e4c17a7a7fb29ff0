"""Sources of a data set's records: local parquet, json, jsonl and csv files, or the Hugging Face hub."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rltrain.common.errors import DataError
from rltrain.common.storage import matching
from rltrain.data.checks import check_names
from rltrain.data.files import kind_of, records
from rltrain.data.tables import unreadable

Record = dict[str, Any]

SUFFIXES = (".jsonl", ".json", ".parquet", ".ndjson", ".jsonl.gz", ".json.gz", ".csv", ".csv.gz", ".tsv")
BOTH = {"train": "train", "test": "test"}
_READ_ROWS = 512
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.parquet")


@dataclass(frozen=True)
class Hub:
    """A data set by its hub name. ``splits``: the hub's split for each of ours. A single file is the first split."""

    name: str
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: BOTH)


def open_splits(
    hub: Hub,
    given: str | None,
    test_given: str | None = None,
    mended: Callable[[int], object] = lambda row: None,
) -> dict[str, tuple[str, Iterable[Record]]]:
    """Return name and records of every split, from ``--input`` (file, pattern, or folder like on the hub) or the hub.

    mended(row): see `records`. Raises DataError for an input without usable files, with a fix.
    """
    if given is None and not hub.name:
        raise DataError("give --input FILE (parquet, json, jsonl or csv), or a folder with a train and a test file.")
    if given is None:
        return {split: (f"{hub.name} {name}", _from_hub(hub, name)) for split, name in hub.splits.items()}
    source = Path(given).expanduser()
    if source.is_dir():
        files = {split: paths for split, name in hub.splits.items() if (paths := _find(source, hub, name))}
    else:
        files = {next(iter(hub.splits)): matching(given) or [source]}
    if test_given is not None:
        files["test"] = matching(test_given) or [Path(test_given).expanduser()]
    if not files:
        names = [f"{name}.jsonl" for name in hub.splits.values()]
        raise DataError(
            f"--input {given!r} has no {' or '.join(hub.splits.values())} file ({', '.join(SUFFIXES)}). "
            f"Give the folder that holds {' and '.join(names)}, or a file."
        )
    return {split: (str(paths[0]), _read_all(paths, mended)) for split, paths in files.items()}


def _find(folder: Path, hub: Hub, split: str) -> list[Path]:
    """Return the file of a split (``train.jsonl``, or all ``train-00000-of-00002.parquet``), in the folder or below."""
    if hub.config and (folder / hub.config).is_dir():
        folder = folder / hub.config
    files = sorted(
        (file for file in folder.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file()),
        key=lambda file: (len(file.relative_to(folder).parts), not file.name.endswith(SUFFIXES[:3]), file.name),
    )
    # The pattern must not match variant10 for "variant1".
    named = [file for file in files if re.match(rf"{re.escape(split)}{r'(?![0-9])' * split[-1].isdigit()}", file.name)]
    if not named and len(hub.splits) == 1:
        named = files
        if len({_SHARD.sub(r"\1", file.name) for file in files}) > 1:
            names = ", ".join(file.name for file in files[:5])
            raise DataError(f"--input {str(folder)!r} holds several data files ({names}); give the one to convert.")
    shard = _SHARD.fullmatch(named[0].name) if named else None
    if shard is None:
        return named[:1]
    shards = sorted(named[0].parent.glob(f"{shard[1]}-?????-of-{shard[2]}.parquet"))
    if len(shards) != int(shard[2]):
        raise DataError(f"{str(named[0].parent)!r} holds {len(shards)} of {int(shard[2])} parts of {shard[1]!r}.")
    return shards


def _read_all(files: list[Path], mended: Callable[[int], object]) -> Iterator[Record]:
    for file in files:
        if not file.is_file():
            raise DataError(f"{str(file)!r} does not exist.")
        kind = kind_of(str(file), file)
        if kind != "parquet":
            yield from records(str(file), file, kind, mended)
            continue
        try:
            with pq.ParquetFile(file, page_checksum_verification=True) as source:
                check_names(str(file), source.schema_arrow.names)
                for batch in source.iter_batches(batch_size=_READ_ROWS):
                    yield from batch.to_pylist()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise unreadable(str(file), error) from error


def _from_hub(hub: Hub, split: str) -> Iterator[Record]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "without --input the data comes from the Hugging Face hub, which needs: pip install datasets. "
            f"Or give local files: --input FOLDER with {' and '.join(f'{name}.jsonl' for name in hub.splits.values())}."
        ) from error
    try:
        data = datasets.load_dataset(hub.name, hub.config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"the hub could not be reached ({error}). Give local files with --input FOLDER.") from error
    # in Arrow's format, so that images stay encoded bytes
    for table in data.with_format("arrow").iter(batch_size=_READ_ROWS):
        yield from table.to_pylist()
