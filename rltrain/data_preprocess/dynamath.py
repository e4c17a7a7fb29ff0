"""Convert DynaMath (DynaMath/DynaMath_Sample, 501 seed questions in ten variants: 5,010) for validation.

``extra_info.id`` is the seed question and ``variant`` its variant, so that a validation reports the worst case (all ten
right) next to the accuracy. All ten files are required. The published wording asks for JSON, and a model reads
responses that are not JSON; here rules do. Read: id, question, decoded_image (or image, a path), ground_truth,
answer_type, subject, knowledge_level.
"""

import argparse
import re
import sys
from pathlib import Path

from rltrain.common.errors import DataError
from rltrain.data_preprocess.benchmark import BOXED_LETTER, BY_RULE_FOR_JUDGE, benchmark_row, choices_within, wordings
from rltrain.data_preprocess.common import BOXED, At, Part, Row, arguments, convert_records, kept, run, texts
from rltrain.data_preprocess.sources import Hub, Record
from rltrain.rewards.scorers.benchmarks import NUM_VARIANTS

_NAME = "DynaMath/DynaMath_Sample"
_PUBLISHED = """## Question
 {question}
## Answer Instruction Please provide an answer to the question outlined above. Your response should adhere to the \
following JSON format, which includes two keys: 'solution' and 'short answer'. The 'solution' key can contain detailed \
steps needed to solve the question, and the 'short answer' key should provide a concise response. {hint}

Example of expected JSON response format:

{{
    "solution": "[Detailed step-by-step explanation]",
    "short answer": "[Concise Answer]"
}}"""
_HINTS = {
    "choice": "Provide the corresponing choice option in the 'short answer' key, such as 'A', 'B', 'C', or 'D'.",
    "float": "Format the answer as a three-digit floating-point number and provide it in the 'short answer' key.",
}
_OTHER_HINT = "Float numbers in the answer should be formatted as three-digit floating-point numbers."


def _row(record: Record, at: At) -> Row:
    question, truth, published_kind = texts(record, "question", "ground_truth", "answer_type")
    kind = "choice" if published_kind == "multiple choice" else published_kind
    if at.options.prompt == "published":
        text = _PUBLISHED.format(question=question, hint=_HINTS.get(kind, _OTHER_HINT))
    else:
        decimals = " Give three decimals." if kind == "float" else ""
        text = f"{question}\n{BOXED_LETTER if kind == 'choice' else BOXED}{decimals}"
    return benchmark_row(
        "dynamath", text, truth.strip(), at, question_id=record.get("id"), category=record.get("subject"),
        answer_type=kind, ability="visual", choices=choices_within(question, truth.strip()) if kind == "choice" else (),
        images=[record.get("decoded_image") or record.get("image")], scored_by=BY_RULE_FOR_JUDGE,
        extra={"question": question, "variant": int(at.place["split"]), **kept(record, "knowledge_level")},
    )  # fmt: skip


def _convert(options: argparse.Namespace) -> dict[str, Part]:
    """Return all variants as one split, variant by variant."""
    # On the hub the files have shorter names than the splits.
    folder = Path(options.input or ".").expanduser()
    has_short_names = any(re.match(r"sample[0-9]", file.name) for file in folder.rglob("sample*"))
    prefix = "sample" if options.input and has_short_names else "sample_variant"
    splits = {str(number): f"{prefix}{number}" for number in range(1, NUM_VARIANTS + 1)}
    parts = convert_records(Hub(_NAME, splits=splits), _row, options)
    if len(parts) < NUM_VARIANTS:
        raise DataError(
            f"--input {options.input!r} has variants {', '.join(parts)} of {NUM_VARIANTS}. Give the folder with "
            f"all of them, named {prefix}1.parquet to {prefix}{NUM_VARIANTS}.parquet."
        )
    joined = Part()
    for part in parts.values():
        joined += [{**row, "extra_info": {**row["extra_info"], "split": "test"}} for row in part]
        joined.dropped += part.dropped
        joined.notes += part.notes
    return {"test": joined}


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = arguments(__doc__ or "", output="data/dynamath")
    parser.add_argument("--input", help="folder with the files of all variants; default: the hub")
    wordings()(parser)
    return run(_convert, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
