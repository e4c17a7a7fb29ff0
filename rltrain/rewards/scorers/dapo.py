"""DAPO and AIME (Yu et al. 2025): the line after the last ``Answer:``; +1 or -1."""

from typing import Any

from rltrain.rewards.grading.ladder import equal
from rltrain.rewards.grading.latex import last_boxed, tidy
from rltrain.rewards.registry import scorer

# As in verl, so that scores compare.
_TAIL_CHARS = 300
_MARK = "answer"
_COLONS = (":", "：")


def extract_answer(solution: str) -> str | None:
    """The rest of the line after the last ``Answer:`` in the last 300 characters; of its box, where it has one."""
    tail = solution[-_TAIL_CHARS:]
    lower = "".join(c.lower() if c.isascii() else c for c in tail)  # keeps every position
    mark = lower.rfind(_MARK)
    while mark >= 0:
        rest = tail[mark + len(_MARK) :].lstrip()
        if rest.startswith(_COLONS):
            line = (rest[1:].lstrip("* \t\n").splitlines() or [""])[0].partition("<|")[0].strip("* \t")
            boxed = last_boxed(line)
            return line if boxed is None else boxed
        mark = lower.rfind(_MARK, 0, mark)
    return None


@scorer("math", "math_dapo*", "aime*")
def dapo(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, float | str]:
    """+1 if the answer is the ground truth (typesetting and units aside), else -1; ``acc`` is 1 or 0."""
    answer = extract_answer(solution_str)
    last = tidy(answer or "").rpartition("=")[2].strip()  # "m + n = 34" answers "34"
    # No algebra: the truths of these sources are plain numbers, and math-verify need not be installed.
    right = bool(last) and equal(last, str(ground_truth), symbolic=False)
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": answer or ""}
