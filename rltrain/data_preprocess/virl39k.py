"""Convert ViRL39K (TIGER-Lab/ViRL39K): visual reasoning with several or no images per question.

The hub stores the images in images.zip, so a local folder is required: its parquet file and the unpacked ``images``
folder. Pass rates (a prior for the difficulty) and category are stored in ``extra_info``.
"""

import sys

from rltrain.data_preprocess.common import At, Drop, Row, converter, kept, row, stored_images, texts, with_slots
from rltrain.data_preprocess.geometry3k import INSTRUCTION
from rltrain.data_preprocess.math_dataset import boxed_answer
from rltrain.data_preprocess.sources import Hub, Record

HUB = Hub("TIGER-Lab/ViRL39K", splits={"train": "train"})
_KEPT = ("PassRate_32BTrained", "PassRate_7BBase", "category", "source", "qid")


def _row(record: Record, at: At) -> Row:
    question, answer = texts(record, "question", "answer")
    truth = boxed_answer(answer)
    if truth is None:
        raise Drop("the answer has no \\boxed{}")
    images = stored_images(record.get("image"), at.folder)
    text = f"{with_slots(question, images)} {at.options.instruction}"
    extra = {"question": question, **kept(record, *_KEPT)}
    return row(HUB.name, text, truth, ability="visual", extra=extra, images=images, **at.place)


main = converter(__doc__, HUB, _row, name="virl39k", instruction=INSTRUCTION)


if __name__ == "__main__":
    sys.exit(main())
