"""Scorers of image and multiple-choice benchmarks. Each has a rule that gets the response, the texts of the ground
truth and ``extra_info``, and returns whether the answer is right, and the extracted answer (None: not found).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from rltrain.rewards.grading.answers import boxed_and_marked
from rltrain.rewards.grading.choices import LETTERS, chosen_labels, chosen_letter
from rltrain.rewards.grading.equivalence import equal
from rltrain.rewards.grading.grade import Grade, grade
from rltrain.rewards.grading.stated_numbers import list_parts, number_of, stated_list, stated_number
from rltrain.rewards.grading.truths import solutions
from rltrain.rewards.scorers.registry import Summary, scorer

Read = tuple[bool, str | None]
Rule = Callable[[str, list[str], dict[str, Any]], Read]

NUM_VARIANTS = 10
# Absolute tolerance of DynaMath, as published.
_TOLERANCE = 0.001
_ROUNDING = 1e-9


def benchmark(*data_sources: str, rule: Rule, summary: Summary | None = None) -> None:
    """Register the scorer of a benchmark: 1 if its rule accepts the answer, else 0."""

    @scorer(*data_sources, summary=summary)
    def score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Grade:
        is_right, read = rule(solution_str, solutions(ground_truth), extra_info)
        return grade(is_right, read, extra_info)


def one_letter(solution: str, truths: list[str], extra_info: dict[str, Any]) -> Read:
    """Extract the letter chosen from ``extra_info.choices`` (without them: from A to J)."""
    texts = list(extra_info.get("choices") or ())
    letter = chosen_letter(solution, LETTERS[: len(texts)] or LETTERS, texts)
    return letter in truths, letter


def all_letters(solution: str, truths: list[str], extra_info: dict[str, Any]) -> Read:
    """Extract all chosen letters; right if they equal the ground truth's (``A, C``) in any order."""
    (truth,) = truths
    labels = chosen_labels(solution, truth)
    return labels == truth, labels


def visual_math(solution: str, truths: list[str], extra_info: dict[str, Any]) -> Read:
    """Read the choice, or compare the text of box, mark or phrase by `equivalence`."""
    if extra_info.get("answer_type") == "choice":
        return one_letter(solution, truths, extra_info)
    answer = next(boxed_and_marked(solution), None)
    return answer is not None and any(equal(answer, truth) for truth in truths), answer


def mathvista(solution: str, truths: list[str], extra_info: dict[str, Any]) -> Read:
    """Extract a choice, an integer, a number with some decimals, or a list (Lu et al. 2024), normalised as published.
    In the published protocol a model extracts the answer, the most similar choice is taken, and non-integers are
    truncated where an integer is expected. Here rules extract it and a choice must be named; the rest is as published.
    """
    truth, kind = truths[0], extra_info.get("answer_type")
    if kind == "choice":
        return one_letter(solution, [truth], extra_info)
    if kind == "list":
        text = stated_list(solution)
        return text is not None and list_parts(text) == list_parts(truth), text
    stated, value = stated_number(solution)
    right = number_of(truth)
    if kind not in ("integer", "float") or right is None:
        return stated is not None and equal(stated, truth), stated
    if value is None or not math.isfinite(value):
        return False, None
    decimals = int(extra_info.get("precision") or 0)
    normalised = (math.trunc(number) if kind == "integer" else round(number, decimals) for number in (value, right))
    return len(set(normalised)) == 1, stated


def dynamath(solution: str, truths: list[str], extra_info: dict[str, Any]) -> Read:
    """Read the choice, the number (to 0.001) or the text   (Zou et al. 2025)."""
    truth, kind = truths[0], extra_info.get("answer_type")
    if kind == "choice":
        return one_letter(solution, [truth], extra_info)
    if kind == "float":
        stated, value = stated_number(solution)
        right = number_of(truth)
        is_right = None not in (value, right) and abs((value or 0.0) - (right or 0.0)) <= _TOLERANCE + _ROUNDING
        return is_right, None if value is None else stated
    text = next(boxed_and_marked(solution), None)
    return text is not None and (_plain(text) == _plain(truth) or equal(text, truth)), text


def _plain(text: str) -> str:
    return " ".join(text.casefold().replace("\\text", "").strip(" {}.*\"'").split())


def worst_case(extra_infos: Sequence[dict[str, Any]], accs: Sequence[float]) -> dict[str, float]:
    """Return the share of seed questions with all ten variants right   (Zou et al. 2025, section 3.1).

    Questions that lack a variant, for example when only some rows are validated, are skipped.
    """
    variants: dict[str, dict[int, float]] = defaultdict(dict)
    for extra_info, acc in zip(extra_infos, accs, strict=True):
        if acc in (0.0, 1.0) and "variant" in extra_info:
            variants[str(extra_info.get("id"))][int(extra_info["variant"])] = acc
    worst = [min(accs_of_one.values()) for accs_of_one in variants.values() if len(accs_of_one) == NUM_VARIANTS]
    return {"worst_case": sum(worst) / len(worst)} if worst else {}


def strict_and_loose(extra_infos: Sequence[dict[str, Any]], accs: Sequence[float]) -> dict[str, float]:
    """Return the mean points of composite problems, (N - IG/2 - RM - IK) / N   (Qiao et al. 2024, section 2.4).

    A right composite problem scores 1 if all its sub-problems are right too (strict), or at least one (loose);
    otherwise it is rote memorisation (RM) and scores 0. A wrong one scores 1/2 if all its sub-problems are right
    (inadequate generalisation, IG), else 0 (insufficient knowledge, IK). Problems that lack a part are skipped.
    """
    problems: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for extra_info, acc in zip(extra_infos, accs, strict=True):
        steps, _, part = str(extra_info.get("key")).partition("steps_")
        if steps.isdecimal():
            problems[steps, str(extra_info.get("id"))][part] = acc
    strict, loose = [], []
    for (steps, _), accs_of_parts in problems.items():
        parts = [str(number + 1) for number in range(int(steps))]
        if accs_of_parts.keys() != {*parts, "multi"} or any(acc not in (0.0, 1.0) for acc in accs_of_parts.values()):
            continue
        subs = [accs_of_parts[part] for part in parts]
        worth = 1.0 if accs_of_parts["multi"] else 0.5
        strict.append(worth * min(subs))
        loose.append(worth * (max(subs) if accs_of_parts["multi"] else min(subs)))
    return {"strict": sum(strict) / len(strict), "loose": sum(loose) / len(loose)} if strict else {}


benchmark("gpqa*", "mmmu_pro*", rule=one_letter)
benchmark("logicvista*", rule=all_letters)
benchmark("mathvision*", "mathverse*", rule=visual_math)
benchmark("mathvista*", rule=mathvista)
benchmark("dynamath*", rule=dynamath, summary=worst_case)
benchmark("wemath*", rule=one_letter, summary=strict_and_loose)
