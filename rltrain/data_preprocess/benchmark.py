"""Common code of benchmark converters: wordings, lettered choices, and rows with the fields that the scorers read.

``extra_info`` of such a row has ``id``, ``category``, ``answer_type`` (``choice``, ``choices`` or the data set's type),
``choices``, and ``scored_by``: whether the published protocol also scores by rule, or uses a model.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rltrain.common.errors import DataError
from rltrain.data_preprocess.common import At, Row, row, stored_images, with_slots
from rltrain.data_preprocess.sources import Record
from rltrain.rewards.grading.choices import LETTERS, listed_choices

BOXED_LETTER = "Reason step by step and put the letter of the right choice in \\boxed{}."
BY_RULE = "rule"
BY_RULE_FOR_JUDGE = "rule; the published protocol uses a judge"


def wordings(*others: str) -> Callable[[argparse.ArgumentParser], object]:
    """Return a function that adds ``--prompt``: the published wording, ``others``, or ours with a box."""

    def add(parser: argparse.ArgumentParser) -> None:
        names = ("published", *others, "boxed")
        parser.add_argument("--prompt", choices=names, default="published", help="wording of the question")

    return add


def lettered(choices: Sequence[str], form: str) -> str:
    """Return one line per choice, in the format ``form`` such as ``({}) {}``."""
    return "\n".join(form.format(letter, choice) for letter, choice in zip(LETTERS, choices, strict=False))


def letter_of(choice: str, choices: Sequence[str]) -> str:
    """Return the letter of a choice. Raises DataError unless it occurs exactly once."""
    if list(choices).count(choice) != 1:
        raise DataError(f"the answer {choice!r} is not one of the choices {list(choices)}.")
    return LETTERS[list(choices).index(choice)]


def choices_within(text: str, answer: str) -> list[str]:
    """Return the choices in a question, or [] if they are ambiguous or do not include the letter ``answer``."""
    choices = listed_choices(text)
    return choices if answer in tuple(LETTERS[: len(choices)]) else []


def metadata(record: Record, name: str) -> Any:
    """Return a field of the column ``metadata``, or None."""
    fields = record.get("metadata")
    return fields.get(name) if isinstance(fields, Mapping) else None


def benchmark_row(
    data_source: str,
    text: str,
    truth: str,
    at: At,
    *,
    question_id: Any,
    category: Any,
    answer_type: str,
    ability: str,
    choices: Sequence[str] = (),
    images: Any = None,
    scored_by: str = BY_RULE,
    extra: Mapping[str, Any] | None = None,
) -> Row:
    """Return the row of a question. images: as stored in the record, or None for a text-only set. Raises DataError."""
    if not truth.strip():
        raise DataError("the answer is empty.")
    if answer_type == "choice" and truth not in tuple(LETTERS[: len(choices)] or LETTERS):
        raise DataError(f"the answer {truth!r} is not the letter of one of {len(choices) or len(LETTERS)} choices.")
    named = {"id": question_id, "category": category, "choices": list(choices) or None}
    told = {
        name: value if isinstance(value, list) else str(value) for name, value in named.items() if value is not None
    }
    told |= {"answer_type": answer_type, "scored_by": scored_by, **(extra or {})}
    stored = None if images is None else stored_images(images, at.folder)
    slots = text if stored is None else with_slots(text, stored)
    return row(data_source, slots, truth, ability=ability, extra=told, images=stored, **at.place)
