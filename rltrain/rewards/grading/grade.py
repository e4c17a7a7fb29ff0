"""Additional results of scorers: the text to vote with, and an accuracy per category."""

import re
from typing import Any

from rltrain.rewards.grading.equivalence import MAX_CHARS, number, ungrouped
from rltrain.rewards.grading.latex import normalise, tidy

# The length is limited, because a category becomes part of a metric's name.
_MAX_NAME_CHARS = 40
_MAX_PRED_CHARS = 200
_OTHER = re.compile(r"[^a-z0-9]+")

Grade = dict[str, float | str]


def vote(read: str | None) -> str:
    """Return the extracted answer in one spelling, so that equal answers are counted together in a vote.

    ``0.50``, ``1/2`` and ``\\frac12`` are ``1/2``. Empty if no answer was found. Formulas keep their form: ``x+1`` and
    ``1+x`` differ.
    """
    text = tidy((read or "")[:MAX_CHARS])
    exact = number(normalise(ungrouped(text)))
    return (normalise(text) if exact is None else str(exact))[:_MAX_PRED_CHARS]


def grade(is_right: bool, read: str | None, extra_info: dict[str, Any]) -> Grade:
    """Return ``score`` and ``acc`` (1 or 0), ``pred`` for votes, ``extracted`` (0 if the text has no answer), and
    ``acc_<category>``."""
    acc = float(is_right)
    details: Grade = {"extracted": float(read is not None), "pred": vote(read)}
    return {"score": acc, "acc": acc, **details, **by_category(acc, extra_info)}


def by_category(acc: float, extra_info: dict[str, Any]) -> dict[str, float]:
    """Return ``acc_<category>`` from ``extra_info.category``; {} without one."""
    category = _OTHER.sub("_", str(extra_info.get("category") or "").lower()[:_MAX_NAME_CHARS]).strip("_")
    return {f"acc_{category}": acc} if category else {}
