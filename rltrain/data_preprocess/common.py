"""Common code of all converters: row layout, output files and command line."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rltrain.common.errors import DataError, RltrainError, first_line, lenient_output, short
from rltrain.common.images import file_bytes
from rltrain.common.storage import replacing
from rltrain.data.images import image_size
from rltrain.data.rows import read_rows
from rltrain.data.stored_images import image_entries
from rltrain.data_preprocess.sources import Hub, Record, open_splits

Row = dict[str, Any]
Splits = Mapping[str, Sequence[Row]]

IMAGE_SLOT = "<image>"
BOXED = "Reason step by step and put the final answer in \\boxed{}."

_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
# Arrow cannot nest more than 2 GiB in one array, so images and program tests are written in groups of rows.
_GROUP_ROWS = 512
# A run reads images on demand, one row group at a time.
PICTURE_GROUP_ROWS = 32
_SHOWN_CHARS = 2000


class Drop(Exception):
    """A record to be dropped. The text is the reason; dropped records are counted by reason."""


class Part(list[Row]):
    """Rows of a split, and the number of dropped records by reason.

    notes: number of rows by note. unused: columns that no option uses.
    """

    def __init__(self, rows: Iterable[Row] = (), dropped: Mapping[str, int] | None = None):
        super().__init__(rows)
        self.dropped = Counter(dropped or {})
        self.notes: Counter[str] = Counter()
        self.unused: dict[str, None] = {}


@dataclass(frozen=True)
class At:
    """Context of a record: split and index in the source (as ``row`` takes them), options, the input's folder, and the
    notes and unused columns of its `Part`.
    """

    place: dict[str, Any]
    options: argparse.Namespace
    folder: Path
    notes: Counter[str]
    unused: dict[str, None]


ToRow = Callable[[Record, At], Row]


def row(
    data_source: str,
    question: str | Sequence[Mapping[str, str]],
    ground_truth: str | list[str],
    *,
    ability: str,
    split: str,
    index: int,
    system: str | None = None,
    extra: Mapping[str, Any] | None = None,
    images: Sequence[Mapping[str, Any]] | None = None,
    style: str = "rule",
    agent_name: str | None = None,
) -> Row:
    """Return one row of verl's schema: a user message (after a system message) or a conversation, and its answer.

    ``ground_truth`` is a list if any of several answers is right. ``style="model"``: a reward model scores.
    ``agent_name="tool_agent"``: the policy can call tools.
    """
    messages = [] if system is None else [{"role": "system", "content": system}]
    prompt = [{"role": "user", "content": question}] if isinstance(question, str) else question
    return {
        "data_source": data_source,
        **({} if agent_name is None else {"agent_name": agent_name}),
        "prompt": [*messages, *({"role": message["role"], "content": message["content"]} for message in prompt)],
        **({} if images is None else {"images": list(images)}),
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **(extra or {})},
    }


def texts(record: Record, *names: str) -> list[str]:
    """Return the named fields of a record. Raises DataError if one is not text."""
    values = [record.get(name) for name in names]
    field_texts = [value for value in values if isinstance(value, str)]
    if len(field_texts) < len(names):
        fields = "fields" if len(names) > 1 else "field"
        raise DataError(f"{fields} {' and '.join(map(repr, names))} must be text, as in the original data set.")
    return field_texts


def kept(record: Record, *names: str) -> Record:
    """Return the named fields that a record has, for ``extra_info``."""
    return {name: record[name] for name in names if record.get(name) is not None}


def with_slots(text: str, images: Sequence[Any]) -> str:
    """Return ``text`` with one ``<image>`` per image. A text without any gets all of them at its start. Raises Drop."""
    num_slots = text.count(IMAGE_SLOT)
    if num_slots == 0 and images:
        return IMAGE_SLOT * len(images) + "\n" + text
    if num_slots != len(images):
        raise Drop(f"the number of {IMAGE_SLOT} differs from the number of images")
    return text


def stored_images(values: Any, folder: Path) -> list[Record]:
    """Return encoded images from hub entries ``{bytes, path}``, bytes, base64, or files in ``folder``. Raises Drop."""
    encoded_images = []
    for entry in image_entries(values or [], str(folder / "_")):
        path = entry.get("path")
        if not entry.get("bytes") and not (isinstance(path, Path) and path.is_file()):
            raise Drop("an image is missing")
        try:
            data = file_bytes(entry)
            image_size({"bytes": data})
        except DataError as error:
            raise Drop("an image cannot be read") from error
        encoded_images.append({"bytes": data, "path": Path(path).name if path else None})
    return encoded_images


def convert_records(hub: Hub, to_row: ToRow, options: argparse.Namespace, *, unique: bool = False) -> dict[str, Part]:
    """Return the rows of every split. ``unique`` drops repeated prompts of a split.

    ``to_row`` raises Drop to drop a record, and DataError if the input does not have the expected format.
    """
    folder = Path(options.input or ".").expanduser()
    folder = folder if folder.is_dir() else folder.parent
    splits = {}
    mended: list[int] = []
    test_input = getattr(options, "test_input", None)
    for split, (name, records) in open_splits(hub, options.input, test_input, mended.append).items():
        part, prompts = Part(), set()
        for index, record in enumerate(records):
            at = At({"split": split, "index": index}, options, folder, part.notes, part.unused)
            try:
                converted_row = to_row(record if isinstance(record, dict) else {}, at)
            except Drop as reason:
                part.dropped[str(reason)] += 1
                continue
            except DataError as error:
                raise DataError(f"{name!r} row {index}: {error}") from error
            prompt = str(converted_row["prompt"]) if unique else str(index)
            if prompt in prompts:
                part.dropped["a repeated prompt"] += 1
                continue
            prompts.add(prompt)
            part.append(converted_row)
        if mended:
            part.notes["with half a character (a lone surrogate), which became \ufffd"] = len(mended)
            mended.clear()
        if not part:
            raise DataError(f"{name!r} leaves no row: {_reasons(part.dropped) or 'it is empty'}.")
        splits[split] = part
    return splits


def write_splits(output: str | Path, splits: Splits) -> dict[str, Path]:
    """Write ``<output>/<split>.parquet`` for every non-empty split. Equal rows give equal bytes.

    Pages have checksums, and files are written atomically. They are read back and checked.
    """
    folder, written = Path(output).expanduser(), {}
    for split, rows in splits.items():
        if not rows:
            continue
        path = folder / f"{split}.parquet"
        with replacing(path) as temporary:
            _write(rows, temporary)
            read_rows(str(temporary))
        written[split] = path
    return written


class _WithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Help that omits empty defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def arguments(description: str, *, output: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every converter has."""
    lenient_output()
    parser = argparse.ArgumentParser(description=description.replace("``", ""), formatter_class=_WithDefaults)
    parser.add_argument("--output", default=output, help="folder for train.parquet and test.parquet")
    return parser


def converter(
    description: str | None,
    hubs: Hub | Mapping[str, Hub],
    to_row: ToRow,
    *,
    name: str,
    instruction: str | None = None,
    unique: bool = False,
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> Callable[..., int]:
    """Return the ``main`` of a converter's command line. Several ``hubs`` become choices of ``--dataset``."""

    def main(argv: list[str] | None = None) -> int:
        choices = {name: hubs} if isinstance(hubs, Hub) else hubs
        parser = arguments(description or "", output=f"data/{name}")
        if len(choices) > 1:
            parser.add_argument(
                "--dataset", choices=list(choices), default=next(iter(choices)), help="the data set to convert"
            )
        parser.add_argument("--input", help="folder with the data files, or one file; default: the hub")
        if any(len(hub.splits) > 1 for hub in choices.values()):
            parser.add_argument("--test-input", help="the test file, if it is not in the same folder")
        if instruction is not None:
            parser.add_argument("--instruction", default=instruction, help="text after each question")
        add_options(parser)
        options = parser.parse_args(argv)
        hub = choices[getattr(options, "dataset", name)]
        return run(lambda given: convert_records(hub, to_row, given, unique=unique), options)

    return main


def run(convert: Callable[[argparse.Namespace], Splits], options: argparse.Namespace) -> int:
    """Convert, write, and print a summary: counts, dropped records, the first row. Returns the exit code."""
    try:
        splits = convert(options)
        written = write_splits(options.output, splits)
    except RltrainError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    for split, path in written.items():
        rows = splits[split]
        sys.stdout.write(f"{split}: {len(rows)} rows -> {path}\n")
        if isinstance(rows, Part) and rows.dropped:
            sys.stdout.write(f"{split}: {rows.dropped.total()} dropped: {_reasons(rows.dropped)}\n")
        for note, number in rows.notes.items() if isinstance(rows, Part) else ():
            sys.stdout.write(f"{split}: {number} rows {note}\n")
        if isinstance(rows, Part) and rows.unused:
            names = " ".join(sorted(rows.unused))
            sys.stdout.write(f"{split}: columns that are left out: {short(names, 300)} (--keep NAME … keeps them)\n")
    first = next(iter(written), None)
    if first is not None:
        text = json.dumps(splits[first][0], indent=2, ensure_ascii=False, default=lambda data: f"<{len(data)} bytes>")
        sys.stdout.write("\n".join(line[:_SHOWN_CHARS] for line in text.splitlines()) + "\n")
    return 0


def at_least(minimum: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least ``minimum``."""

    def parse(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{number} is less than {minimum}")
        return number

    parse.__name__ = f"int >= {minimum}"
    return parse


def _write(rows: Sequence[Row], path: Path) -> None:
    several = any(isinstance(row["reward_model"]["ground_truth"], list) for row in rows)
    truth = pa.list_(pa.string()) if several else pa.string()
    types = {
        "data_source": pa.string(),
        "agent_name": pa.string(),
        "prompt": pa.list_(_MESSAGE),
        "images": pa.list_(_IMAGE),
        "videos": pa.list_(pa.struct([("video", pa.list_(_IMAGE)), ("fps", pa.float64())])),
        "ability": pa.string(),
        "reward_model": pa.struct([("style", pa.string()), ("ground_truth", truth)]),
    }
    try:
        types["extra_info"] = pa.array([row["extra_info"] for row in rows]).type
        schema = pa.schema([(name, types[name]) for name in rows[0]])
        with pq.ParquetWriter(path, schema, write_page_checksum=True) as writer:
            size = PICTURE_GROUP_ROWS if {"images", "videos"} & rows[0].keys() else _GROUP_ROWS
            for start in range(0, len(rows), size):
                part = [_as_several(row) if several else row for row in rows[start : start + size]]
                writer.write_table(pa.Table.from_pylist(part, schema))
    except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError) as error:
        raise DataError(_misfit(rows, types) or f"the rows cannot be written ({short(first_line(error))}).") from error


def _as_several(row: Row) -> Row:
    """Return a row with a list of right answers, like the others. Arrow would split a text into its characters."""
    truth = row["reward_model"]["ground_truth"]
    return row if isinstance(truth, list) else {**row, "reward_model": {**row["reward_model"], "ground_truth": [truth]}}


def _misfit(rows: Sequence[Row], types: Mapping[str, pa.DataType]) -> str:
    """Return a message about the field that cannot be written, or ""."""
    for name, kind in types.items():
        for row in rows if name in rows[0] and name not in ("images", "extra_info") else ():
            try:
                pa.array(
                    [_as_several(row)[name] if pa.types.is_list(types["reward_model"][1].type) else row[name]], kind
                )
            except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError) as error:
                return f"row {row['extra_info']['index']}: {name} cannot be written ({short(first_line(error))})."
    for name in dict.fromkeys(name for row in rows for name in row["extra_info"]):
        kinds: dict[str, int] = {}
        for row in rows:
            if (value := row["extra_info"].get(name)) is not None:
                kinds.setdefault(type(value).__name__, row["extra_info"]["index"])
        try:
            pa.array([row["extra_info"].get(name) for row in rows])
        except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError) as error:
            where = ", ".join(f"row {index}: {kind}" for kind, index in kinds.items())
            why = "changes its type" if len(kinds) > 1 else f"cannot be written ({short(first_line(error))})"
            return f"extra_info.{name} {why} ({short(where)}); store it as JSON text."
    return ""


def _reasons(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} ({count})" for reason, count in Counter(dropped).most_common())
