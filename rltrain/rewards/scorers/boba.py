"""Mathematics problems of AReaL-boba: the answer may be any of several solutions, and numbers may be rounded."""

from fractions import Fraction
from typing import Any

from rltrain.rewards.grading.equivalence import equal
from rltrain.rewards.grading.grade import Grade, vote
from rltrain.rewards.grading.latex import TAIL_CHARS, last_boxed
from rltrain.rewards.grading.truths import solutions
from rltrain.rewards.scorers.registry import scorer

_TOLERANCE = Fraction(1, 10_000)
_MINERVA = ("final answer is", "I hope it is correct")
_PHRASES = ("answer is", "answer:", "答案是", "答案为", "答案：", "答案:", "答案选")
_ENDS = ("\n", "。", ". ", "<|")


def extract_answer(solution: str) -> str | None:
    """Return the answer of a solution: in Minerva's closing phrase, in its last box, or after "answer is" or 答案是."""
    tail = solution[-TAIL_CHARS:]
    hope = tail.rfind(_MINERVA[1])
    start = tail.rfind(_MINERVA[0], 0, hope) if hope >= 0 else -1
    if start >= 0:
        return _phrase(tail[start + len(_MINERVA[0]) : hope])
    if "\\boxed" in tail or "\\fbox" in tail:
        return last_boxed(tail)
    # The last phrase of any kind counts, because a model may state an answer and then correct itself.
    start, phrase = max((tail.rfind(phrase), phrase) for phrase in _PHRASES)
    return _phrase(tail[start + len(phrase) :]) if start >= 0 else None


@scorer("boba", "areal_boba", "inclusionAI/AReaL-boba-*")
def boba(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Grade:
    """Return 1 if the answer is one of the solutions, else 0; numbers to a relative 1e-4, per cents in either form."""
    answer = extract_answer(solution_str)
    right = answer is not None and any(equal(answer, truth, _TOLERANCE) for truth in solutions(ground_truth))
    return {"score": float(right), "acc": float(right), "pred": vote(answer)}


def _phrase(text: str) -> str:
    text = text.lstrip(":： \n*")
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    for end in _ENDS:
        text = text.partition(end)[0]
    return text.strip("* ")
