"""Convert GSM8K (openai/gsm8k) from local jsonl or parquet files, or from the Hugging Face hub."""

import sys

from rltrain.base.errors import DataError
from rltrain.data_preprocess.common import At, Row, converter, row, texts
from rltrain.data_preprocess.sources import Hub, Record

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def ground_truth(answer: str) -> str | None:
    """The number after the last ``####`` of a worked answer, commas and dollar signs removed."""
    _, mark, number = answer.rpartition("####")
    number = number.strip().replace(",", "").replace("$", "")
    return number if mark and number else None


def _row(record: Record, at: At) -> Row:
    question, answer = texts(record, "question", "answer")
    truth = ground_truth(answer)
    if truth is None:
        raise DataError("field 'answer' has no number after '####'.")
    extra = {"question": question, "answer": answer}
    text = f"{question} {at.options.instruction}"
    return row(DATA_SOURCE, text, truth, ability="math", extra=extra, **at.place)


main = converter(__doc__, Hub(DATA_SOURCE, "main"), _row, name="gsm8k", instruction=INSTRUCTION)


if __name__ == "__main__":
    sys.exit(main())
