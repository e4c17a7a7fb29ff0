"""Convert We-Math testmini (We-Math/We-Math, 525 composite problems and their sub-problems: 1,740) for validation.

``extra_info.id`` and ``key`` identify the rows of one problem (2steps_1, 2steps_2, 2steps_multi, …), so that a
validation reports the strict and the loose score next to the accuracy. Read: ID, key, question, option, answer,
image_path, knowledge concept.
"""

import re
import sys

from rltrain.common.errors import DataError
from rltrain.data_preprocess.benchmark import BOXED_LETTER, benchmark_row, choices_within, wordings
from rltrain.data_preprocess.common import At, Row, converter, texts
from rltrain.data_preprocess.sources import Hub, Record

HUB = Hub("We-Math/We-Math", splits={"test": "testmini"})
_PUBLISHED = (
    "Now, we require you to solve a multiple-choice math question. Please briefly describe your thought process and "
    "provide the final answer(option).\nQuestion: {question}\nOption: {option}\nRegarding the format, please answer "
    "following the template below, and be sure to include two <> symbols:\n"
    "<Thought process>: <<your thought process>> <Answer>: <<your option>>"
)


def _row(record: Record, at: At) -> Row:
    question, option, answer, key = texts(record, "question", "option", "answer", "key")
    if not re.fullmatch(r"[23]steps_(?:[123]|multi)", key):
        raise DataError(f"field 'key' is {key!r}, not 2steps_1, 2steps_2, 2steps_multi.")
    text = f"{question}\n{option}\n{BOXED_LETTER}"
    if at.options.prompt == "published":
        text = _PUBLISHED.format(question=question, option=option)
    extra = {"question": question, "key": key, "concept": str(record.get("knowledge concept") or "")}
    return benchmark_row(
        "wemath_mini", text, answer.strip(), at, question_id=record.get("ID"), category=key,
        answer_type="choice", ability="visual", choices=choices_within(option, answer.strip()),
        images=[record.get("image_path")], extra=extra,
    )  # fmt: skip


main = converter(__doc__, HUB, _row, name="wemath", add_options=wordings())


if __name__ == "__main__":
    sys.exit(main())
