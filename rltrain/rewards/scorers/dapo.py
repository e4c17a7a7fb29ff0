"""DAPO and AIME (Yu et al. 2025): the line after the last ``Answer:``; +1 or -1."""

from typing import Any

from rltrain.rewards.grading.equivalence import equal, number
from rltrain.rewards.grading.grade import Grade, vote
from rltrain.rewards.grading.latex import last_boxed, normalise, tidy
from rltrain.rewards.grading.truths import solutions
from rltrain.rewards.scorers.registry import scorer

# These values are verl's, so that scores are comparable.
_TAIL_CHARS = 300
_MARK = "answer"
_COLONS = (":", "：")
_DISPLAYS = (
    ("$$", "$$"),
    ("\\[", "\\]"),
    ("\\begin{equation}", "\\end{equation}"),
    ("\\begin{align*}", "\\end{align*}"),
    ("$\n", "$"),
    ("\\(", "\\)"),
)


def extract_answer(solution: str) -> str | None:
    """Return the rest of the line after the last ``Answer:`` in the last 300 characters, or its box if it has one."""
    tail = solution[-_TAIL_CHARS:]
    lower = "".join(c.lower() if c.isascii() else c for c in tail)  # keeps every position
    mark = lower.rfind(_MARK)
    while mark >= 0:
        rest = tail[mark + len(_MARK) :].lstrip()
        if rest.startswith(_COLONS):
            line = _first_line(rest[1:].lstrip("* \t\r\n").partition("<|")[0]).strip("* \t")
            boxed = last_boxed(line)
            return line if boxed is None else boxed
        mark = lower.rfind(_MARK, 0, mark)
    return None


def _first_line(text: str) -> str:
    """Return the first line, or the whole displayed formula that begins there."""
    for opening, closing in _DISPLAYS:
        if text.startswith(opening):
            end = text.find(closing, len(opening))
            behind = text[end + len(closing) :].partition("\n")[0].strip(" .*\r")
            if end >= 0 and not behind:
                return " ".join(text[len(opening) : end].split())
    return (text.splitlines() or [""])[0]


@scorer("math", "math_dapo*", "aime*")
def dapo(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Grade:
    """Return +1 if the answer is the ground truth (apart from typesetting and units), else -1; ``acc`` is 1 or 0."""
    answer = extract_answer(solution_str)
    # If the ground truth is a plain number, the answer must be a plain number too; a sum with that value does not
    # count.
    right = answer is not None and any(
        equal(answer, truth, symbolic=number(normalise(tidy(truth))) is None) for truth in solutions(ground_truth)
    )
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": vote(answer)}
