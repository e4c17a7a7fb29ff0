"""Convert CLEVR counting (BUAADreamer/clevr_count_70k): count the objects in an image, with answers like ``[3]``."""

import re
import sys

from rltrain.data_preprocess.common import At, Drop, Row, converter, row, stored_images, texts, with_slots
from rltrain.data_preprocess.sources import Hub, Record

HUB = Hub("BUAADreamer/clevr_count_70k")
INSTRUCTION = "Give the final answer as a number alone between square brackets, such as [12]."


def _row(record: Record, at: At) -> Row:
    problem, answer = texts(record, "problem", "answer")
    numbers = re.findall(r"[0-9]+", answer)
    if len(numbers) != 1:
        raise Drop("the answer is not a single number")
    images = stored_images(record.get("images"), at.folder)
    text = f"{with_slots(problem, images)} {at.options.instruction}"
    extra = {"question": problem, "answer": answer}
    return row(HUB.name, text, numbers[0], ability="visual", extra=extra, images=images, **at.place)


main = converter(__doc__, HUB, _row, name="clevr_count", instruction=INSTRUCTION)


if __name__ == "__main__":
    sys.exit(main())
