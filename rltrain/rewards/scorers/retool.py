"""ReTool (Feng et al. 2025): the last ``\\boxed{}``, +1 or -1; a wrong answer loses less where tools were called."""

from typing import Any

from rltrain.rewards.grading.verdict import Verdict
from rltrain.rewards.scorers import math_boxed
from rltrain.rewards.scorers.registry import scorer

_PER_TURN, _LEAST_LOSS = 0.1, -0.6


@scorer("retool/*")
def retool(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Verdict:
    """+1, or min(-0.6, -1 + 0.1 (num_turns - 2) / 2) as in verl's recipe; ``acc`` is 1 or 0."""
    acc, pred = math_boxed.graded(solution_str, ground_truth)
    # Two turns more for each call: the policy's, and the tool's.
    called = (extra_info.get("num_turns", 2) - 2) / 2
    return {"score": 1.0 if acc else min(_LEAST_LOSS, -1.0 + _PER_TURN * called), "acc": acc, "pred": pred}
