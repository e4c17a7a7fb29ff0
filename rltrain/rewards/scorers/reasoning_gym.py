"""Tasks of the reasoning-gym package, which scores the text between ``<answer>`` and ``</answer>``.

Data source ``reasoning_gym/<task>``. ``extra_info.entry`` is the generated entry as JSON text, because parquet cannot
store its metadata, whose structure changes from row to row.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from rltrain.common.errors import RewardError
from rltrain.rewards.scorers.registry import scorer

PREFIX = "reasoning_gym/"
_MAX_ANSWER_CHARS = 4096

# Tasks whose graders call eval or sympy's parse_expr on the answer, so that they would run code that a model writes.
TASKS_THAT_EXECUTE_ANSWERS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)


def extract_answer(solution: str) -> str:
    """Return the text in the last pair of answer tags, or all of it; at most its last 4,096 characters."""
    end = solution.rfind("</answer>")
    start = solution.rfind("<answer>", 0, end) if end >= 0 else -1
    text = solution[start + len("<answer>") : end] if start >= 0 else solution
    return text[-_MAX_ANSWER_CHARS:].strip()


def check_task(task: str) -> None:
    """Raise RewardError for a task that does not exist or whose grader runs the answer as code."""
    _grader(task)


@cache
def _grader(task: str) -> Callable[..., float]:
    if task in TASKS_THAT_EXECUTE_ANSWERS:
        raise RewardError(
            f"reasoning_gym/{task}: its grader runs the answer as Python code, which a model could abuse. "
            "Choose another task, or write a custom_reward_function."
        )
    try:
        import reasoning_gym
    except ImportError as error:
        raise RewardError(f"data_source 'reasoning_gym/{task}' needs a package: pip install reasoning-gym") from error
    try:
        return reasoning_gym.get_score_answer_fn(task)
    except ValueError as error:
        raise RewardError(f"reasoning-gym has no task {task!r} ({error}).") from error


@scorer(PREFIX + "*", prepare=lambda source: check_task(source.removeprefix(PREFIX)))
def reasoning_gym_score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return the task's score, 0 to 1; some tasks give partial credit for an answer of the right form."""
    entry = json.loads(extra_info["entry"])
    return float(_grader(extra_info["task"])(extract_answer(solution_str), entry))
