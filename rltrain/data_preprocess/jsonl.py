"""Convert your own jsonl, json or parquet file: say which columns hold what. ``a.b`` is field b of column a."""

import argparse
import sys
from functools import reduce
from typing import Any

from rltrain.data_preprocess.common import At, Drop, Row, converter, row, stored_images, with_slots
from rltrain.data_preprocess.sources import Hub, Record
from rltrain.errors import DataError


def _field(record: Any, name: str) -> Any:
    return reduce(lambda value, part: value.get(part) if isinstance(value, dict) else None, name.split("."), record)


def _row(record: Record, at: At) -> Row:
    options = at.options
    prompt, answer = _field(record, options.prompt_column), _field(record, options.answer_column)
    source = options.data_source or _field(record, options.data_source_column)
    if not isinstance(source, str):
        raise DataError("give --data-source NAME or --data-source-column COLUMN: it picks the scorer.")
    if not isinstance(prompt, str | list) or not prompt:
        raise DataError(f"--prompt-column {options.prompt_column!r} must be text or messages; columns: {list(record)}.")
    if answer is None and options.style == "rule":
        raise Drop("no answer")
    images = stored_images(_field(record, options.image_column), at.folder) if options.image_column else None
    if isinstance(prompt, str):
        slotted = prompt if images is None else with_slots(prompt, images)
        prompt = f"{slotted} {options.instruction}" if options.instruction else slotted
    truth = [str(each) for each in answer] if isinstance(answer, list) else str("" if answer is None else answer)
    extra = {name: _field(record, name) for name in options.keep}
    rest = {"system": options.system, "style": options.style, "ability": options.ability}
    return row(source, prompt, truth, images=images, extra=extra, **rest, **at.place)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-column", default="prompt", help="the question as text, or a list of messages")
    parser.add_argument("--answer-column", default="answer", help="the right answer, or a list of right answers")
    parser.add_argument("--data-source", help="the same for all rows, such as math_dapo")
    parser.add_argument("--data-source-column", default="data_source", help="or the column that names it")
    parser.add_argument("--image-column", help="images: bytes, or paths below the input's folder")
    parser.add_argument("--keep", nargs="*", default=[], metavar="COLUMN", help="columns to keep in extra_info")
    parser.add_argument("--system", help="a system message before the question")
    parser.add_argument("--ability", default="math", help="a label")
    parser.add_argument("--style", choices=("rule", "model"), default="rule", help="a rule or a reward model scores")


main = converter(__doc__, Hub(""), _row, name="jsonl", instruction="", add_options=_add_options)


if __name__ == "__main__":
    sys.exit(main())
