"""Convert GSM8K (openai/gsm8k) from local jsonl or parquet files, or from the Hugging Face hub."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rltrain.data_preprocess.common import Row, Splits, arguments, row, run
from rltrain.errors import DataError

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SUFFIXES = (".jsonl", ".parquet")


def ground_truth(answer: str) -> str | None:
    """The number after the last ``####`` of a worked answer, commas and dollar signs removed."""
    _, mark, number = answer.rpartition("####")
    number = number.strip().replace(",", "").replace("$", "")
    return number if mark and number else None


def convert(options: argparse.Namespace) -> Splits:
    """Rows of the train and test files (or of the hub's)."""
    if options.input is None:
        return {split: _rows(_from_hub(split), split, f"openai/gsm8k {split}") for split in ("train", "test")}
    source = Path(options.input).expanduser()
    if source.is_file():
        files = {"train": source}
    else:
        files = {split: file for split in ("train", "test") if (file := _find(source, split))}
    if options.test_input is not None:
        files["test"] = Path(options.test_input).expanduser()
    if not files:
        raise DataError(
            f"--input {options.input!r} has no train or test file ({' or '.join(SUFFIXES)}). "
            "Give the folder that holds train.jsonl and test.jsonl, or a file."
        )
    return {split: _rows(_read(file), split, str(file)) for split, file in files.items()}


def _find(folder: Path, split: str) -> Path | None:
    """The file of a split: ``train.jsonl``, ``train-00000-of-00001.parquet`` (the hub's), in the folder or below."""
    found = sorted(
        (file for file in folder.rglob(f"{split}*") if file.suffix in SUFFIXES and "socratic" not in str(file)),
        key=lambda file: (len(file.relative_to(folder).parts), file.name),
    )
    return found[0] if found else None


def _read(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        raise DataError(f"{str(file)!r} does not exist.")
    try:
        if file.suffix == ".parquet":
            with pq.ParquetFile(file, page_checksum_verification=True) as source:
                return source.read().to_pylist()
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{str(file)!r} cannot be read as {file.suffix.lstrip('.') or 'jsonl'}: {error}") from error


def _from_hub(split: str) -> Iterable[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "without --input the data comes from the Hugging Face hub, which needs: pip install datasets. "
            "Or give local files: --input FOLDER with train.jsonl and test.jsonl."
        ) from error
    try:
        return datasets.load_dataset(DATA_SOURCE, "main", split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"the hub could not be reached ({error}). Give local files with --input FOLDER.") from error


def _rows(records: Iterable[dict[str, Any]], split: str, file: str) -> list[Row]:
    rows = []
    for index, record in enumerate(records):
        question, answer = (record.get(name) if isinstance(record, dict) else None for name in ("question", "answer"))
        if not isinstance(question, str) or not isinstance(answer, str):
            raise DataError(f"{file!r} row {index}: fields 'question' and 'answer' must be text, as in GSM8K.")
        truth = ground_truth(answer)
        if truth is None:
            raise DataError(f"{file!r} row {index}: field 'answer' has no number after '####'.")
        extra = {"question": question, "answer": answer}
        text = f"{question} {INSTRUCTION}"
        rows.append(row(DATA_SOURCE, text, truth, ability="math", split=split, index=index, extra=extra))
    return rows


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = arguments(__doc__ or "", output="~/data/gsm8k")
    parser.add_argument("--input", help="folder with the train and test files, or the train file; default: the hub")
    parser.add_argument("--test-input", help="the test file, if it is not in the same folder")
    return run(convert, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
