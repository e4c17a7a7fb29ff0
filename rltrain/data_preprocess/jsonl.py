"""Convert your own jsonl, json, csv or parquet file by naming its columns. ``a.b`` is field b of column a."""

import argparse
import sys
from functools import reduce
from typing import Any

from rltrain.common.errors import DataError, short
from rltrain.data_preprocess.common import At, Drop, Row, converter, row, stored_images, with_slots
from rltrain.data_preprocess.messages import messages_of
from rltrain.data_preprocess.sources import Hub, Record


def _field(record: Any, name: str) -> Any:
    if isinstance(record, dict) and name in record:  # a name that contains a dot
        return record[name]
    return reduce(lambda value, part: value.get(part) if isinstance(value, dict) else None, name.split("."), record)


def _row(record: Record, at: At) -> Row:
    options = at.options
    if not record:
        raise DataError('it has no columns: each must be an object, such as {"question": "2+3=?", "answer": "5"}.')
    source = options.data_source or _field(record, options.data_source_column)
    if not isinstance(source, str) or not source:
        raise DataError("give --data-source NAME or --data-source-column COLUMN: it selects the scorer.")
    if (prompt_value := _field(record, options.prompt_column)) is None:
        column_names = short(", ".join(map(repr, record)), 300)
        raise DataError(
            f"--prompt-column {options.prompt_column!r} does not exist or is null; columns: {column_names}."
        )
    prompt = messages_of(prompt_value, f"--prompt-column {options.prompt_column!r}")
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise Drop("the prompt is empty")
    answer = _truth(_field(record, options.answer_column), options.answer_column)
    if answer is None and options.style == "rule":
        raise Drop(f"no answer in {options.answer_column!r}")
    images = stored_images(_field(record, options.image_column), at.folder) if options.image_column else None
    if isinstance(prompt, str):
        slotted = prompt if images is None else with_slots(prompt, images)
        prompt = f"{slotted} {options.instruction}" if options.instruction else slotted
    elif prompt[-1]["role"] == "assistant":
        at.notes["that end with the assistant's message: a run writes it as a finished turn, and opens a new one"] += 1
    columns = (options.prompt_column, options.answer_column, options.data_source_column, options.image_column)
    at.unused.update(
        dict.fromkeys(record.keys() - {str(column).partition(".")[0] for column in (*columns, *options.keep)})
    )
    extra = {name: _field(record, name) for name in options.keep}
    rest = {"system": options.system, "style": options.style, "ability": options.ability}
    return row(source, prompt, "" if answer is None else answer, images=images, extra=extra, **rest, **at.place)


def _truth(answer: Any, name: str) -> str | list[str] | None:
    """Return the right answer as text, or several of them, or None if there is none."""
    if isinstance(answer, list):
        return [
            truth
            for truth in (_truth(entry, f"{name}[{at}]") for at, entry in enumerate(answer))
            if isinstance(truth, str)
        ] or None
    if isinstance(answer, dict):
        fields = [field for field in answer if answer[field] is not None]
        way_out = f"Say which field, such as --answer-column {name}.{fields[0]}." if fields else ""
        raise DataError(f"--answer-column {name!r} holds {{{short(', '.join(map(str, fields)))}}}. {way_out}")
    if answer is None or answer != answer:  # NaN, as pandas writes it
        return None
    if isinstance(answer, str) and not answer.strip():
        return None
    # Programs store integers as floats if some rows have no value.
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-column", default="prompt", help="the question as text, or a list of messages")
    parser.add_argument("--answer-column", default="answer", help="the right answer, or a list of right answers")
    parser.add_argument("--data-source", help="data_source of all rows, such as math_dapo")
    parser.add_argument("--data-source-column", default="data_source", help="column with the data_source of each row")
    parser.add_argument("--image-column", help="images: bytes, base64, or paths below the input's folder")
    parser.add_argument("--keep", nargs="*", default=[], metavar="COLUMN", help="columns to keep in extra_info")
    parser.add_argument("--system", help="a system message before the question")
    parser.add_argument("--ability", default="math", help="a label")
    parser.add_argument(
        "--style", choices=("rule", "model"), default="rule", help="the scorer: a rule or a reward model"
    )


main = converter(__doc__, Hub(""), _row, name="jsonl", instruction="", add_options=_add_options)


if __name__ == "__main__":
    sys.exit(main())
