"""MathVision and MathVerse: the letter of a choice, or by the ladder whether the answer means the ground truth."""

from typing import Any

from rltrain.rewards.grading.answers import boxed_and_marked
from rltrain.rewards.grading.ladder import equal
from rltrain.rewards.grading.truths import solutions
from rltrain.rewards.grading.verdict import Verdict, verdict
from rltrain.rewards.scorers.multiple_choice import read_choice
from rltrain.rewards.scorers.registry import scorer


@scorer("mathvision*", "mathverse*")
def visual_math(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Verdict:
    """1 if the choice, or what the box, the mark or the phrase states, is the ground truth, else 0."""
    truths = solutions(ground_truth)
    if extra_info.get("answer_type") == "choice":
        letter = read_choice(solution_str, extra_info)
        return verdict(letter in truths, letter, extra_info)
    answer = next(boxed_and_marked(solution_str), None)
    return verdict(answer is not None and any(equal(answer, truth) for truth in truths), answer, extra_info)
