"""Convert Geometry3K (hiyouga/geometry3k): a figure, a problem, an answer. Figures keep the original files' bytes."""

import sys

from rltrain.data_preprocess.common import At, Row, converter, row, stored_images, texts, with_slots
from rltrain.data_preprocess.sources import Hub, Record

HUB = Hub("hiyouga/geometry3k")
INSTRUCTION = "First reason between <think> and </think>, then give the final answer in \\boxed{}."


def _row(record: Record, at: At) -> Row:
    problem, answer = texts(record, "problem", "answer")
    images = stored_images(record.get("images"), at.folder)
    text = f"{with_slots(problem, images)} {at.options.instruction}"
    extra = {"question": problem, "answer": answer}
    return row(HUB.name, text, answer, ability="math", extra=extra, images=images, **at.place)


main = converter(__doc__, HUB, _row, name="geometry3k", instruction=INSTRUCTION)


if __name__ == "__main__":
    sys.exit(main())
