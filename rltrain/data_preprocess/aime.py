"""Convert AIME 2024 or 2025 for validation: records with a problem and an answer, or copies in verl's schema.

The scorer reads the last "Answer:" line. Of problems that a copy repeats (for avg@k) one is kept: rollout.n repeats
them.
"""

import re
import sys

from rltrain.data_preprocess.common import At, Drop, Row, converter, row, texts
from rltrain.data_preprocess.dapo_math_17k import verl_row
from rltrain.data_preprocess.sources import Hub, Record

HUBS = {
    "aime24": Hub("HuggingFaceH4/aime_2024", splits={"test": "train"}),
    "aime25": Hub("math-ai/aime25", splits={"test": "test"}),
}
INSTRUCTION = 'Reason step by step. The last line must be "Answer: " followed by the final answer alone.'


def to_row(record: Record, at: At) -> Row:
    """The row of a problem, with the instruction of the options."""
    source = at.options.dataset
    fields = {name.lower(): value for name, value in record.items()}  # copies differ: Problem, problem, question
    if isinstance(fields.get("prompt"), list):
        return verl_row(fields, at, source)
    (problem,) = texts(fields, "problem" if "problem" in fields else "question")
    # All answers are whole numbers from 0 to 999; some copies write 073, $73$ or 73^\circ.
    number = re.fullmatch(r"\$?0*([0-9]{1,3})(\.0)?(\^\{?\\circ\}?|°)?\$?", str(fields.get("answer")).strip())
    if number is None:
        raise Drop("an answer that is not a number from 0 to 999")
    text, extra = f"{problem}\n\n{at.options.instruction}", {"question": problem}
    return row(source, text, number[1], ability="math", extra=extra, **at.place)


main = converter(__doc__, HUBS, to_row, name="aime", instruction=INSTRUCTION, unique=True)


if __name__ == "__main__":
    sys.exit(main())
