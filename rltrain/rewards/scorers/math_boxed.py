"""Competition maths (Hendrycks et al. 2021): the last ``\\boxed{}``, as text, as an exact number, then by algebra."""

from typing import Any

from rltrain.rewards.grading.ladder import equal
from rltrain.rewards.grading.latex import TAIL_CHARS, last_boxed
from rltrain.rewards.grading.symbolic import prepare
from rltrain.rewards.registry import scorer


def is_right(solution: str, truth: str) -> bool:
    """Whether the last box of a solution holds the truth, exactly; the truth may be boxed too."""
    answer = last_boxed(solution[-TAIL_CHARS:])
    boxed_truth = last_boxed(truth)
    return answer is not None and equal(answer, truth if boxed_truth is None else boxed_truth)


@scorer(
    "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "agentica-org/DeepScaleR-*",
    "numina_*", prepare=prepare,
)  # fmt: skip
def math_boxed(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if the last box holds the ground truth, else 0."""
    return float(is_right(solution_str, str(ground_truth)))
