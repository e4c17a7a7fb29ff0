"""Convert GSM8K (openai/gsm8k) from local jsonl or parquet files, or from the Hugging Face hub.

With --tool the rows are for a run with tools: our calculator or interpreter (docs/agents.md), or verl's
calc_gsm8k_reward. The latter knows the right answer and tells the policy whether it is correct, to test a setup.
"""

import argparse
import sys
from typing import Any

from rltrain.common.errors import DataError
from rltrain.data_preprocess.common import At, Row, converter, row, texts
from rltrain.data_preprocess.sources import Hub, Record

# Instruction for each tool.
TOOLS = {
    "calculator": "Calculate with the tool calculator.",
    "python": "Calculate with the tool python.",
    "calc_gsm8k_reward": "Check your answer with the tool calc_gsm8k_reward before you give it.",
}
DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def ground_truth(answer: str) -> str | None:
    """Return the number after the last ``####`` of a worked answer, without commas and dollar signs, or None."""
    _, mark, number = answer.rpartition("####")
    number = number.strip().replace(",", "").replace("$", "")
    return number if mark and number else None


def _row(record: Record, at: At) -> Row:
    question, answer = texts(record, "question", "answer")
    truth = ground_truth(answer)
    if truth is None:
        raise DataError("field 'answer' has no number after '####'.")
    extra: dict[str, Any] = {"question": question, "answer": answer}
    text, tool = f"{question} {at.options.instruction}", at.options.tool
    if tool is None:
        return row(DATA_SOURCE, text, truth, ability="math", extra=extra, **at.place)
    if tool == "calc_gsm8k_reward":
        extra |= {"need_tools_kwargs": True, "tools_kwargs": {tool: {"create_kwargs": {"ground_truth": truth}}}}
    text = f"{text} {TOOLS[tool]}"
    return row(DATA_SOURCE, text, truth, ability="math", extra=extra, agent_name="tool_agent", **at.place)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tool", choices=list(TOOLS), help="rows for a run with this tool; default: without tools")


main = converter(
    __doc__, Hub(DATA_SOURCE, "main"), _row, name="gsm8k", instruction=INSTRUCTION, add_options=_options
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
