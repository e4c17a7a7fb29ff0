"""We-Math (Qiao et al. 2024): the letter of each question, and over a composite problem and its sub-problems the strict
and the loose score."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rltrain.rewards.grading.truths import solutions
from rltrain.rewards.grading.verdict import Verdict, verdict
from rltrain.rewards.scorers.multiple_choice import read_choice
from rltrain.rewards.scorers.registry import scorer


def strict_and_loose(extra_infos: Sequence[dict[str, Any]], accs: Sequence[float]) -> dict[str, float]:
    """Mean points of composite problems, (N - IG/2 - RM - IK) / N   (Qiao et al. 2024, section 2.4).

    A composite problem that is right has 1 point if all its sub-problems are right too (strict), or one of them
    (loose); else it was learnt by rote (RM), and has none. One that is wrong has 1/2 if all its sub-problems are right
    (inadequate generalisation, IG), else none (insufficient knowledge, IK). Problems that lack a part are left out.
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


@scorer("wemath*", summary=strict_and_loose)
def wemath(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Verdict:
    """1 if the letter that is chosen is the ground truth, else 0."""
    letter = read_choice(solution_str, extra_info)
    return verdict(letter in solutions(ground_truth), letter, extra_info)
