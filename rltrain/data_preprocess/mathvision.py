"""Convert MathVision testmini (MathLLMs/MathVision, 304 questions, each with an image) for validation.

The wording is the published one, which asks for a box. Like here, the published code compares by rule, but with another
grader. Read: id, question, options, decoded_image (or image, a path), answer, level, subject.
"""

import sys

from rltrain.data_preprocess.benchmark import benchmark_row, lettered
from rltrain.data_preprocess.common import At, Row, converter, kept, texts
from rltrain.data_preprocess.sources import Hub, Record

HUB = Hub("MathLLMs/MathVision", splits={"test": "testmini"})
_PUBLISHED = (
    'Please solve the problem step by step and put your answer in one "\\boxed{}". If it is a multiple choice '
    'question, only one letter is allowed in the "\\boxed{}".\n'
)


def _row(record: Record, at: At) -> Row:
    question, answer = texts(record, "question", "answer")
    options = list(record.get("options") or ())
    # If the options are only the letters A to E, the choices are in the image.
    shown = lettered(options, "({}) {}") if "".join(options) != "ABCDE" else ""
    return benchmark_row(
        "mathvision_mini", f"{_PUBLISHED}{question}\n{shown}".rstrip("\n"), answer, at, question_id=record.get("id"),
        category=record.get("subject"), answer_type="choice" if options else "free", ability="visual",
        choices=options, images=[record.get("decoded_image") or record.get("image")],
        extra={"question": question, **kept(record, "level")},
    )  # fmt: skip


main = converter(__doc__, HUB, _row, name="mathvision")


if __name__ == "__main__":
    sys.exit(main())
