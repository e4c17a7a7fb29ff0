"""Convert the questions of Search-R1 (PeterJinGo/nq_hotpotqa_train), or records of FlashRAG's sets.

A record has question and golden_answers (or reward_model.ground_truth.target). Its data_source, such as nq, becomes
searchR1_nq, which is scored by exact match of the text in <answer>.
"""

import argparse
import sys
from collections.abc import Mapping

from rltrain.common.errors import DataError
from rltrain.data_preprocess.common import At, Drop, Row, converter, row, texts
from rltrain.data_preprocess.sources import Hub, Record

HUB = Hub("PeterJinGo/nq_hotpotqa_train")
INSTRUCTION = (
    "Look up what you do not know with the tool search, as often as you need. When you know the answer, give it in a "
    "few words between <answer> and </answer>."
)


def _targets(record: Record) -> list[str]:
    answers = record.get("golden_answers")
    truth = (record.get("reward_model") or {}).get("ground_truth")
    if answers is None:
        answers = truth.get("target") if isinstance(truth, Mapping) else truth
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list):
        raise DataError("it must hold 'golden_answers', or 'reward_model.ground_truth.target'.")
    return [answer for answer in answers if isinstance(answer, str) and answer.strip()]


def _row(record: Record, at: At) -> Row:
    (question,) = texts(record, "question")
    question = question.strip()
    question += "" if question.endswith("?") else "?"
    if not (targets := _targets(record)):
        raise Drop("no answer")
    source = str(record.get("data_source") or at.options.source)
    source = source if source.startswith("searchR1_") else f"searchR1_{source}"
    extra = {"question": question} | ({} if record.get("id") is None else {"id": str(record["id"])})
    return row(
        source, f"{question} {at.options.instruction}", targets, ability="qa", extra=extra,
        agent_name="tool_agent", **at.place,
    )  # fmt: skip


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", default="nq", help="data_source of records without one")


main = converter(__doc__, HUB, _row, name="search_r1", instruction=INSTRUCTION, add_options=_options)


if __name__ == "__main__":
    sys.exit(main())
