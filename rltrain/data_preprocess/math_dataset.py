"""Convert MATH (DigitalLearningGmbH/MATH-lighteval, Hendrycks et al. 2021): the answer is the solution's last box."""

import sys

from rltrain.data_preprocess.common import BOXED, At, Drop, Row, converter, kept, row, texts
from rltrain.data_preprocess.sources import Hub, Record
from rltrain.rewards.scorers.math_boxed import last_boxed

HUB = Hub("DigitalLearningGmbH/MATH-lighteval")


def boxed_answer(solution: str) -> str | None:
    """Return the content of the last ``\\boxed{}``, or of ``\\boxed 5`` (in a few solutions) up to ``$``."""
    boxed = last_boxed(solution)
    if boxed is None:
        boxed = solution.rpartition("\\boxed ")[2].partition("$")[0] if "\\boxed " in solution else None
    return (boxed or "").strip() or None


def _row(record: Record, at: At) -> Row:
    problem, solution = texts(record, "problem", "solution")
    truth = boxed_answer(solution)
    if truth is None:
        raise Drop("the solution has no \\boxed{}")
    extra = {"question": problem, "answer": solution, **kept(record, "level", "type")}
    text = f"{problem} {at.options.instruction}"
    return row(HUB.name, text, truth, ability="math", extra=extra, **at.place)


main = converter(__doc__, HUB, _row, name="math", instruction=BOXED)


if __name__ == "__main__":
    sys.exit(main())
