"""Convert MathVerse testmini (AI4Math/MathVerse, 788 problems in five versions with an image: 3,940) for validation.

Versions move information from the text to the image; ``acc_<version>`` separates them. Published wordings are the
columns query_cot (``--prompt published``) and query_wo (``direct``). In the published protocol, a model extracts and
judges; here rules do. Read: sample_index, problem_index, problem_version, question, question_for_eval, image, answer,
question_type, metadata (subject), query_wo, query_cot.
"""

import sys

from rltrain.data_preprocess.benchmark import (
    BOXED_LETTER,
    BY_RULE_FOR_JUDGE,
    benchmark_row,
    choices_within,
    metadata,
    wordings,
)
from rltrain.data_preprocess.common import BOXED, At, Row, converter, kept, texts
from rltrain.data_preprocess.sources import Hub, Record

HUB = Hub("AI4Math/MathVerse", config="testmini", splits={"test": "testmini"})
_COLUMNS = {"published": "query_cot", "direct": "query_wo"}


def _row(record: Record, at: At) -> Row:
    question, answer, version = texts(record, "question", "answer", "problem_version")
    is_choice = record.get("question_type") == "multi-choice"
    if at.options.prompt == "boxed":
        text = f"{question}\n{BOXED_LETTER if is_choice else BOXED}".lstrip("\n")
    else:
        (text,) = texts(record, _COLUMNS[at.options.prompt])
    # In the version whose question is in the image, only question_for_eval has the text of the question.
    whole = record.get("question_for_eval") or question
    extra = {"question": whole, "subject": metadata(record, "subject"), **kept(record, "problem_index")}
    return benchmark_row(
        "mathverse_mini", text, answer.strip(), at, question_id=record.get("sample_index"), category=version,
        ability="visual", answer_type="choice" if is_choice else "free",
        choices=choices_within(whole, answer.strip()) if is_choice else (), images=[record.get("image")],
        scored_by=BY_RULE_FOR_JUDGE, extra=kept(extra, *extra),
    )  # fmt: skip


main = converter(__doc__, HUB, _row, name="mathverse", add_options=wordings("direct"))


if __name__ == "__main__":
    sys.exit(main())
