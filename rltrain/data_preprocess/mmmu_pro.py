"""Convert MMMU-Pro vision (MMMU/MMMU_Pro, config vision, 1,730 questions, up to ten choices) for validation.

Question and choices are only in the image. Wordings are from MMMU-Benchmark/MMMU, mmmu-pro/prompts.yaml: ``published``
reasons first, ``direct`` does not. Read: id, image, options, answer, subject.
"""

import ast
import sys
from contextlib import suppress
from typing import Any

from rltrain.common.errors import DataError
from rltrain.data_preprocess.benchmark import BOXED_LETTER, benchmark_row, wordings
from rltrain.data_preprocess.common import At, Row, converter, texts
from rltrain.data_preprocess.sources import Hub, Record

HUB = Hub("MMMU/MMMU_Pro", config="vision", splits={"test": "test"})
_FORMAT = (
    "The last line of your response should be of the following format: 'Answer: $LETTER' (without quotes) where LETTER "
    "is one of options."
)
_WORDINGS = {
    "published": f"Write out the multiple-choice question in the image and then solve it. {_FORMAT} Think step by step "
    "before answering.",
    "direct": f"Answer with the option letter from the given choices directly. {_FORMAT}",
    "boxed": f"Answer the multiple-choice question in the image. {BOXED_LETTER}",
}


def _options(value: Any) -> list[str]:
    """Return the choices, which the hub stores as the text of a list."""
    with suppress(ValueError, SyntaxError):
        value = ast.literal_eval(value) if isinstance(value, str) else value
    if not isinstance(value, list) or not value:
        raise DataError("field 'options' must be a list of choices, as in the original data set.")
    return [str(option) for option in value]


def _row(record: Record, at: At) -> Row:
    (answer,) = texts(record, "answer")
    return benchmark_row(
        "mmmu_pro_vision", _WORDINGS[at.options.prompt], answer.strip(), at, question_id=record.get("id"),
        category=record.get("subject"), answer_type="choice", ability="visual", choices=_options(record.get("options")),
        images=[record.get("image")],
    )  # fmt: skip


main = converter(__doc__, HUB, _row, name="mmmu_pro", add_options=wordings("direct"))


if __name__ == "__main__":
    sys.exit(main())
