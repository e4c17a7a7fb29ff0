"""GPQA, MMMU-Pro (vision), LogicVista: the letter that an answer chooses; for LogicVista all of several letters."""

from typing import Any

from rltrain.rewards.grading.choices import LETTERS, chosen_labels, chosen_letter
from rltrain.rewards.grading.truths import solutions
from rltrain.rewards.grading.verdict import Verdict, verdict
from rltrain.rewards.scorers.registry import scorer


def read_choice(solution: str, extra_info: dict[str, Any]) -> str | None:
    """The letter that a solution chooses among ``extra_info.choices`` (without them: among A to J)."""
    texts = list(extra_info.get("choices") or ())
    return chosen_letter(solution, LETTERS[: len(texts)] or LETTERS, texts)


@scorer("gpqa*", "mmmu_pro*")
def one_letter(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Verdict:
    """1 if the one letter that is chosen is the ground truth, else 0."""
    letter = read_choice(solution_str, extra_info)
    return verdict(letter in solutions(ground_truth), letter, extra_info)


@scorer("logicvista*")
def all_letters(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Verdict:
    """1 if the letters that are chosen are those of the ground truth (``A, C``) in any order, else 0."""
    (truth,) = solutions(ground_truth)
    labels = chosen_labels(solution_str, truth)
    return verdict(labels == truth, labels, extra_info)
