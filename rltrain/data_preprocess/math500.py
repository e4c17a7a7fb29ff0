"""Convert MATH-500 (HuggingFaceH4/MATH-500), 500 held-out problems of MATH, for validation."""

import sys

from rltrain.data_preprocess.common import BOXED, At, Row, converter, kept, row, texts
from rltrain.data_preprocess.sources import Hub, Record

HUB = Hub("HuggingFaceH4/MATH-500", splits={"test": "test"})


def _row(record: Record, at: At) -> Row:
    problem, answer = texts(record, "problem", "answer")
    extra = {"question": problem, **kept(record, "subject", "level", "unique_id")}
    text = f"{problem} {at.options.instruction}"
    return row(HUB.name, text, answer, ability="math", extra=extra, **at.place)


main = converter(__doc__, HUB, _row, name="math500", instruction=BOXED)


if __name__ == "__main__":
    sys.exit(main())
