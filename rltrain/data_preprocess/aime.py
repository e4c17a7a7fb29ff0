"""Convert AIME 2024 or 2025 for validation: records with a problem and an answer, or copies in verl's schema.

The scorer reads the last "Answer:" line. If a copy repeats problems (for avg@k), each is kept once, because rollout.n
repeats them. A problem of another year than --dataset is an error, if its year, id or url contains the year.
"""

import re
import sys

from rltrain.common.errors import DataError
from rltrain.data_preprocess.common import At, Drop, Row, converter, row, texts
from rltrain.data_preprocess.dapo_math_17k import verl_row
from rltrain.data_preprocess.sources import Hub, Record

HUBS = {
    "aime24": Hub("HuggingFaceH4/aime_2024", splits={"test": "train"}),
    "aime25": Hub("math-ai/aime25", splits={"test": "test"}),
}
INSTRUCTION = 'Reason step by step. The last line must be "Answer: " followed by the final answer alone.'


def to_row(record: Record, at: At) -> Row:
    """Return the row of a problem, with the instruction of the options."""
    source = at.options.dataset
    fields = {name.lower(): value for name, value in record.items()}  # copies differ: Problem, problem, question
    if isinstance(fields.get("prompt"), list):
        return verl_row(fields, at, source)
    (problem,) = texts(fields, "problem" if "problem" in fields else "question")
    year = _year(fields)
    if year and not source.endswith(year[-2:]):
        raise DataError(
            f"this is a problem of AIME {year}, and --dataset is {source}. Give the file or the --dataset of that year."
        )
    # All answers are integers from 0 to 999; some copies write 073, $73$ or 73^\circ.
    number = re.fullmatch(r"\$?0*([0-9]{1,3})(\.0)?(\^\{?\\circ\}?|°)?\$?", str(fields.get("answer")).strip())
    if number is None:
        raise Drop("the answer is not a number from 0 to 999")
    text, extra = f"{problem}\n\n{at.options.instruction}", {"question": problem}
    extra |= {} if fields.get("id") is None else {"id": str(fields["id"])}
    return row(source, text, number[1], ability="math", extra=extra, **at.place)


def _year(fields: Record) -> str | None:
    """Return the year of a record, from its year, its id (2024-II-4) or the address of a solution, or None."""
    named = (re.search(r"(?<![0-9])20[0-9]{2}(?![0-9])", str(fields.get(name))) for name in ("year", "id", "url"))
    return next((match[0] for match in named if match), None)


main = converter(__doc__, HUBS, to_row, name="aime", instruction=INSTRUCTION, unique=True)


if __name__ == "__main__":
    sys.exit(main())
