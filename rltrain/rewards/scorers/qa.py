"""Question answering: the last ``<answer>`` tags, by exact match or by F1 over words (Rajpurkar et al. 2016)."""

import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rltrain.rewards.scorers.registry import scorer

_MAX_ANSWER_CHARS = 4096
_PUNCTUATION = str.maketrans("", "", string.punctuation + "，。、！？：；“”‘’（）《》")
_ARTICLES = frozenset(("a", "an", "the"))


def extract_answer(solution: str) -> str:
    """Return the text in the last pair of answer tags, at most its last 4,096 characters; "" without such a pair."""
    end = solution.rfind("</answer>")
    # A closing tag that occurs twice still closes one pair.
    inner = solution[:end].removesuffix("</answer>") if end >= 0 else ""
    start = inner.rfind("<answer>")
    return inner[start + len("<answer>") :][-_MAX_ANSWER_CHARS:] if start >= 0 else ""


def words(text: str) -> list[str]:
    """Return the lower-case words without punctuation and articles."""
    return [word for word in text.lower().translate(_PUNCTUATION).split() if word not in _ARTICLES]


@scorer("searchR1_*", "qa_em/*")
def exact_match(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, float]:
    """Return 1 if the answer is one of the targets, word by word, else 0; with ``f1``."""
    em, f1 = _compare(solution_str, ground_truth)
    return {"score": em, "acc": em, "f1": f1}


@scorer("qa_f1/*")
def f1_score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, float]:
    """Return the best F1 over all targets; ``acc`` is the exact match."""
    em, f1 = _compare(solution_str, ground_truth)
    return {"score": f1, "acc": em}


def _compare(solution: str, truth: Any) -> tuple[float, float]:
    targets = truth.get("target", []) if isinstance(truth, Mapping) else truth
    targets = [targets] if isinstance(targets, str) else list(targets)
    answer = words(extract_answer(solution))
    expected = [words(str(target)) for target in targets]
    if not answer:
        return 0.0, 0.0
    return float(answer in expected), max((_f1(answer, target) for target in expected), default=0.0)


def _f1(answer: list[str], target: list[str]) -> float:
    common = sum((Counter(answer) & Counter(target)).values())
    return 2 * common / (len(answer) + len(target)) if common else 0.0
