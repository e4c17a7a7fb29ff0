"""Convert MathVista testmini (AI4Math/MathVista, 1,000 questions, each with an image) for validation.

The published wording is the column ``query``: a hint at the kind of answer, the question, its choices. In the published
protocol, a model extracts the answer; here rules do. Read: pid, question, decoded_image (or image, a path), choices,
unit, precision, answer, question_type, answer_type, metadata (task), query.
"""

import sys

from rltrain.data_preprocess.benchmark import (
    BOXED_LETTER,
    BY_RULE_FOR_JUDGE,
    benchmark_row,
    letter_of,
    lettered,
    metadata,
    wordings,
)
from rltrain.data_preprocess.common import BOXED, At, Row, converter, kept, texts
from rltrain.data_preprocess.sources import Hub, Record

HUB = Hub("AI4Math/MathVista", splits={"test": "testmini"})


def _row(record: Record, at: At) -> Row:
    question, query, answer, kind = texts(record, "question", "query", "answer", "answer_type")
    choices = list(record.get("choices") or ())
    is_choice = record.get("question_type") == "multi_choice"
    truth = letter_of(answer, choices) if is_choice else answer
    unit = f" (Unit: {record['unit']})" if record.get("unit") else ""
    text = query
    if at.options.prompt == "boxed" and is_choice:
        text = f"{question}{unit}\n{lettered(choices, '({}) {}')}\n{BOXED_LETTER}"
    elif at.options.prompt == "boxed":
        decimals = f" Give {int(record['precision'])} decimals." if kind == "float" and record.get("precision") else ""
        text = f"{question}{unit}\n{BOXED}{decimals}"
    return benchmark_row(
        "mathvista_mini", text, truth, at, question_id=record.get("pid"), ability="visual",
        category=metadata(record, "task"), answer_type="choice" if is_choice else kind,
        choices=choices, images=[record.get("decoded_image") or record.get("image")], scored_by=BY_RULE_FOR_JUDGE,
        extra={"question": question, **kept(record, "precision", "unit")},
    )  # fmt: skip


main = converter(__doc__, HUB, _row, name="mathvista", add_options=wordings())


if __name__ == "__main__":
    sys.exit(main())
