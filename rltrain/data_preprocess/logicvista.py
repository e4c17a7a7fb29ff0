"""Convert LogicVista (448 questions, each with an image) for validation: lscpku/LogicVista, or VLMEvalKit's
LogicVista.tsv.

The choices are in the image or in the question. If several letters are right, the answer must name them all. The
published wording is only the question, and a model extracts the letters; here the rule is that of `choices`. Read:
image, question, answer, skill, and id or index.
"""

import re
import sys

from rltrain.data_preprocess.benchmark import BY_RULE_FOR_JUDGE, benchmark_row, wordings
from rltrain.data_preprocess.common import At, Drop, Row, converter, texts
from rltrain.data_preprocess.sources import Hub, Record

HUB = Hub("lscpku/LogicVista", splits={"test": "test"})
_BOXED = (
    "Reason step by step and put the letter of the right choice, or all letters if several are right, in \\boxed{}."
)


def _row(record: Record, at: At) -> Row:
    question, answer = texts(record, "question", "answer")
    # Answers such as "A, C" and "AC", and sometimes the number of a figure.
    if not re.fullmatch(r"(?:(?:[A-Za-z]|[A-J]{2,8}|[0-9]{1,2})(?:[\s,;]+|$))+", answer.strip()):
        raise Drop("the answer does not name a choice")
    labels = sorted(set(re.findall(r"[0-9]+|[A-Z]", answer.upper())))
    skills = record.get("skill")
    skill = skills[0] if isinstance(skills, list) and skills else skills
    text = f"{question}\n{_BOXED}" if at.options.prompt == "boxed" else question
    return benchmark_row(
        "logicvista", text, ", ".join(labels), at, question_id=record.get("id", record.get("index")), ability="visual",
        category=skill, answer_type="choices", images=[record.get("image")], scored_by=BY_RULE_FOR_JUDGE,
        extra={"question": question},
    )  # fmt: skip


main = converter(__doc__, HUB, _row, name="logicvista", add_options=wordings())


if __name__ == "__main__":
    sys.exit(main())
