"""Programs (APPS, TACO, CodeContests, Codeforces): the share of unit tests that the last code block passes.

Disabled unless ``reward.allow_code_execution=True``. Every unit test runs in a separate interpreter (`run_program`), so
that tests cannot affect each other. The expected output is not passed to it, because a program could find and print it.
"""

import json
import math
import time
from typing import Any

from rltrain.common.env import shipped
from rltrain.common.errors import RewardError
from rltrain.rewards.scorers.registry import scorer
from rltrain.runtime.slots.limits import current_limits
from rltrain.runtime.slots.program import check_isolation, run_program

_MAX_CODE_CHARS = 65_536
_MAX_TOKEN_CHARS = 64
_TEST_S = 4.0
# The rest of the deadline is reserved for ending processes and replying. At the deadline the slot is killed, and the
# results of passed tests would be lost.
_SHARE_OF_DEADLINE = 0.8
# Minimum seconds reserved for ending processes and replying, which take this long on a busy machine. At most half of a
# short deadline is reserved.
_LEAST_REST_S = 1.5
# Approximate start time of an interpreter in seconds. With less time left, a test cannot pass.
_LEAST_S = 0.05


def extract_code(solution: str) -> str:
    """Return the last fenced block (python or no language), else the whole text; its first 65,536 characters."""
    end = solution.rfind("```")
    start = solution.rfind("```", 0, end) if end >= 0 else -1
    if start < 0:  # no fence, or an unclosed one
        return solution[end + 3 if end >= 0 else 0 :].removeprefix("python")[:_MAX_CODE_CHARS]
    return solution[start + 3 : end].removeprefix("python").removeprefix("3")[:_MAX_CODE_CHARS]


def refuse_unless_allowed(data_source: str) -> None:
    """Raise RewardError if programs are not allowed, and ConfigError if the kernel cannot isolate them."""
    if not current_limits().allow_code_execution:
        raise RewardError(
            f"data_source={data_source!r} is scored by running programs that the model wrote. Read "
            f"{shipped('docs/rewards.md')}, then set reward.allow_code_execution=True, or give a "
            "custom_reward_function or a reward.url."
        )
    check_isolation()


@scorer("apps", "taco", "codecontests", "codeforces", prepare=refuse_unless_allowed)
def code(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, float]:
    """Return the share of passed tests; ``acc`` is 1 if all pass. Tests that do not fit in the deadline count as
    failed."""
    refuse_unless_allowed("code")
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    inputs, outputs, function = list(truth["inputs"]), list(truth["outputs"]), truth.get("fn_name")
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"ground_truth has {len(inputs)} inputs and {len(outputs)} outputs")
    timeout_s = current_limits().timeout_s
    deadline = time.monotonic() + min(_SHARE_OF_DEADLINE * timeout_s, max(timeout_s - _LEAST_REST_S, timeout_s / 2))
    program, passed = extract_code(solution_str), 0
    for test_input, expected in zip(inputs, outputs, strict=True):
        remaining = deadline - time.monotonic()
        output = _output(program, test_input, function, min(_TEST_S, remaining)) if remaining > _LEAST_S else None
        if output is None:  # out of time, also for the other tests
            break
        passed += _same_result(output, expected) if function else same_text(output, _text(expected))
    return {"score": passed / len(inputs), "acc": float(passed == len(inputs))}


def same_text(output: str, expected: str) -> bool:
    """Return True if the texts are equal word by word, decimal numbers to one part in a million."""
    ours, theirs = output.split(), expected.split()
    return len(ours) == len(theirs) and all(a == b or _close(a, b) for a, b in zip(ours, theirs, strict=True))


def _output(program: str, inputs: Any, function: str | None, seconds: float) -> str | None:
    if function:
        return run_program(program, seconds=seconds, function=function, arguments=_arguments(inputs))
    return run_program(program, _text(inputs), seconds=seconds)


def _arguments(inputs: Any) -> list:
    """Return the arguments of a call: one JSON value per line, or the list itself."""
    return [json.loads(line) for line in inputs.splitlines()] if isinstance(inputs, str) else list(inputs)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _same_result(output: str, expected: Any) -> bool:
    try:
        ours = json.loads(output)
        theirs = json.loads(expected) if isinstance(expected, str) else expected
    except (ValueError, RecursionError):
        return output.strip() == json.dumps(expected)
    # Some data sets wrap a function's result in a list of length one.
    return ours == theirs or (isinstance(theirs, list) and len(theirs) == 1 and ours == theirs[0])


def _close(ours: str, theirs: str) -> bool:
    # Integers are only compared as text (by the caller), because a rounded integer is wrong.
    if "." not in theirs or max(len(ours), len(theirs)) > _MAX_TOKEN_CHARS:
        return False
    try:
        return math.isclose(float(ours), float(theirs), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False
