"""Convert programming problems with tests: APPS, TACO or CodeContests. The ground truth is JSON."""

import json
import sys
from typing import Any

from rltrain.data_preprocess.common import At, Drop, Row, converter, kept, row, texts
from rltrain.data_preprocess.sources import Hub, Record

HUBS = {
    "apps": Hub("codeparrot/apps"),
    "taco": Hub("BAAI/TACO"),
    "codecontests": Hub("deepmind/code_contests"),
}
INSTRUCTION = (
    "Answer with a Python program that reads standard input and writes standard output, in one ```python block."
)
_FUNCTION = "Complete this function, keeping its name and arguments, instead of reading input:"
_TESTS = ("public_tests", "private_tests", "generated_tests")


def read_tests(record: Record) -> dict[str, Any]:
    """Return inputs and outputs (and ``fn_name`` if a function is called) of a record of any of the three data sets."""
    if "public_tests" in record:
        groups = [record.get(name) or {} for name in _TESTS]
        tests = {
            f"{side}s": [text for group in groups for text in group.get(side) or []] for side in ("input", "output")
        }
    else:
        try:
            tests = json.loads(*texts(record, "input_output"))
        except ValueError as error:
            raise Drop("the tests are not JSON") from error
    if not isinstance(tests, dict) or not tests.get("inputs"):
        raise Drop("no tests")
    if len(tests["inputs"]) != len(tests.get("outputs") or []):
        raise Drop("the numbers of inputs and outputs differ")
    return tests


def _row(record: Record, at: At) -> Row:
    (question,) = texts(record, "description" if "description" in record else "question")
    tests = read_tests(record)
    parts = [question, at.options.instruction]
    if tests.get("fn_name"):
        parts += [
            _FUNCTION,
            f"```python\n{(record.get('starter_code') or '').strip() or 'def ' + tests['fn_name']}\n```",
        ]
    extra = kept(record, "difficulty", "url", "name", "problem_id")
    truth = json.dumps(tests, ensure_ascii=False)
    text = "\n\n".join(parts)
    return row(at.options.dataset, text, truth, ability="code", extra=extra, **at.place)


main = converter(__doc__, HUBS, _row, name="code_contests", instruction=INSTRUCTION)


if __name__ == "__main__":
    sys.exit(main())
