"""Convert DeepScaleR (agentica-org/DeepScaleR-Preview-Dataset): competition problems with their answers."""

import sys

from rltrain.data_preprocess.common import BOXED, At, Drop, Row, converter, row, texts
from rltrain.data_preprocess.sources import Hub, Record

HUB = Hub("agentica-org/DeepScaleR-Preview-Dataset", splits={"train": "train"})


def _row(record: Record, at: At) -> Row:
    problem, answer = texts(record, "problem", "answer")
    if not answer.strip():
        raise Drop("the answer is empty")
    text, extra = f"{problem} {at.options.instruction}", {"question": problem}
    return row(HUB.name, text, answer, ability="math", extra=extra, **at.place)


main = converter(__doc__, HUB, _row, name="deepscaler", instruction=BOXED)


if __name__ == "__main__":
    sys.exit(main())
