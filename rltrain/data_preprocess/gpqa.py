"""Convert GPQA-diamond (Idavidrein/gpqa, config gpqa_diamond, 198 questions) for validation.

The file has the right answer in a separate column, and the four choices are permuted here. With ``--seed 0`` and the
published file, they have the order of the first pass of OpenAI's simple-evals, whose wording is the published one here.

Read: Question, Correct Answer, Incorrect Answer 1 to 3, High-level domain, Subdomain, Record ID. The set is gated, and
its authors ask not to publish its questions in plain text: do not share the output files.
"""

import argparse
import random
import sys

from rltrain.data_preprocess.benchmark import BOXED_LETTER, benchmark_row, lettered, wordings
from rltrain.data_preprocess.common import At, Row, converter, kept, texts
from rltrain.data_preprocess.sources import Hub, Record

HUB = Hub("Idavidrein/gpqa", config="gpqa_diamond", splits={"test": "train"})
_ANSWERS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_PUBLISHED = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n"
)


def permutation(seed: int, index: int) -> list[int]:
    """Return the order of the answers of question ``index``, which depends only on (seed, index)."""
    draws = random.Random(seed)
    return [draws.sample(range(len(_ANSWERS)), len(_ANSWERS)) for _ in range(index + 1)][-1]


def _row(record: Record, at: At) -> Row:
    question, *answers = (text.strip() for text in texts(record, "Question", *_ANSWERS))
    order = permutation(at.options.seed, at.place["index"])
    choices = [answers[place] for place in order]
    text = f"{question}\n\n{lettered(choices, '{}) {}')}"
    text = f"{text}\n\n{BOXED_LETTER}" if at.options.prompt == "boxed" else f"{_PUBLISHED}{text}"
    extra = {"question": question, "seed": at.options.seed, "subdomain": record.get("Subdomain")}
    return benchmark_row(
        "gpqa_diamond", text, "ABCD"[order.index(0)], at, question_id=record.get("Record ID"), ability="science",
        category=record.get("High-level domain"), answer_type="choice", choices=choices, extra=kept(extra, *extra),
    )  # fmt: skip


def _add_options(parser: argparse.ArgumentParser) -> None:
    wordings()(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the permutation of the choices")


main = converter(__doc__, HUB, _row, name="gpqa", add_options=_add_options)


if __name__ == "__main__":
    sys.exit(main())
