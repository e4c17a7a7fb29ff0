"""Competition maths (Hendrycks et al. 2021): the last ``\\boxed{}``, as text, as an exact number, then by algebra."""

from typing import Any

from rltrain.rewards.grading.ladder import equal
from rltrain.rewards.grading.latex import TAIL_CHARS, last_boxed
from rltrain.rewards.grading.truths import solutions
from rltrain.rewards.grading.verdict import Verdict, vote
from rltrain.rewards.scorers.registry import scorer


def graded(solution: str, truth: Any) -> tuple[float, str]:
    """1 where the last box of a solution holds the truth, exactly (of several truths, one of them), else 0; and what it
    votes with."""
    answer = last_boxed(solution[-TAIL_CHARS:])
    return float(answer is not None and any(equal(answer, right) for right in solutions(truth))), vote(answer)


@scorer(
    "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "agentica-org/DeepScaleR-*",
    "numina_*",
)  # fmt: skip
def math_boxed(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Verdict:
    """1 if the last box holds the ground truth, else 0."""
    right, pred = graded(solution_str, ground_truth)
    return {"score": right, "pred": pred}
