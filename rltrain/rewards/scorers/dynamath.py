"""DynaMath (Zou et al. 2025): every variant of a question, and the share of questions with all variants right."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rltrain.rewards.grading.answers import boxed_and_marked
from rltrain.rewards.grading.ladder import equal
from rltrain.rewards.grading.stated_numbers import number_of, stated_number
from rltrain.rewards.grading.truths import solutions
from rltrain.rewards.grading.verdict import Verdict, verdict
from rltrain.rewards.scorers.multiple_choice import read_choice
from rltrain.rewards.scorers.registry import scorer

NUM_VARIANTS = 10
# As published, absolute.
_TOLERANCE = 0.001
_ROUNDING = 1e-9


def worst_case(extra_infos: Sequence[dict[str, Any]], accs: Sequence[float]) -> dict[str, float]:
    """Share of seed questions of which all ten variants are right   (Zou et al. 2025, section 3.1).

    Questions that lack a variant, as where only some rows are validated on, are left out.
    """
    variants: dict[str, dict[int, float]] = defaultdict(dict)
    for extra_info, acc in zip(extra_infos, accs, strict=True):
        if acc in (0.0, 1.0) and "variant" in extra_info:
            variants[str(extra_info.get("id"))][int(extra_info["variant"])] = acc
    worst = [min(accs_of_one.values()) for accs_of_one in variants.values() if len(accs_of_one) == NUM_VARIANTS]
    return {"worst_case": sum(worst) / len(worst)} if worst else {}


@scorer("dynamath*", summary=worst_case)
def dynamath(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Verdict:
    """1 if the choice, the number (to 0.001) or the text is the ground truth, else 0."""
    truth, kind = solutions(ground_truth)[0], extra_info.get("answer_type")
    if kind == "choice":
        letter = read_choice(solution_str, extra_info)
        return verdict(letter == truth, letter, extra_info)
    if kind == "float":
        stated, value = stated_number(solution_str)
        right = number_of(truth)
        is_right = None not in (value, right) and abs((value or 0.0) - (right or 0.0)) <= _TOLERANCE + _ROUNDING
        return verdict(is_right, None if value is None else stated, extra_info)
    text = next(boxed_and_marked(solution_str), None)
    is_right = text is not None and (_plain(text) == _plain(truth) or equal(text, truth))
    return verdict(is_right, text, extra_info)


def _plain(text: str) -> str:
    return " ".join(text.casefold().replace("\\text", "").strip(" {}.*\"'").split())
