"""Convert AReaL-boba (inclusionAI/AReaL-boba-Data, AReaL-boba-106k.jsonl): maths with several accepted solutions.

Its prompts are written in one model's chat template. The template's marks are removed, so that any model's template can
be used; the text between them stays unchanged. The ground truth is the list of solutions.
"""

import re
import sys

from rltrain.common.errors import DataError
from rltrain.data_preprocess.common import At, Drop, Row, converter, kept, row, texts
from rltrain.data_preprocess.sources import Hub, Record

HUB = Hub("inclusionAI/AReaL-boba-Data", splits={"train": "train"})
_TEMPLATED = re.compile(r"(?:<｜begin▁of▁sentence｜>)?<｜User｜>(.*)<｜Assistant｜>(?:<think>\s*)?", re.DOTALL)


def _row(record: Record, at: At) -> Row:
    (prompt,) = texts(record, "prompt")
    solutions = record.get("solutions")
    if not isinstance(solutions, list):
        raise DataError("field 'solutions' must be a list, as in the original data set.")
    templated = _TEMPLATED.fullmatch(prompt)
    text = templated[1] if templated else prompt
    if "<｜" in text:
        raise Drop("the prompt contains chat template tokens")
    answers = [solution for solution in solutions if isinstance(solution, str) and solution.strip()]
    if not answers:
        raise Drop("no solution")
    extra = kept(record, "query_id", "task")
    return row(HUB.name, text, answers, ability="math", extra=extra, **at.place)


main = converter(__doc__, HUB, _row, name="boba")


if __name__ == "__main__":
    sys.exit(main())
