"""What the scorers of benchmarks return: right or wrong, what was read, and an accuracy for each category."""

import re
from typing import Any

# A category becomes part of a metric's name.
_MAX_NAME_CHARS = 40
_MAX_PRED_CHARS = 200
_OTHER = re.compile(r"[^a-z0-9]+")

Verdict = dict[str, float | str]


def verdict(is_right: bool, read: str | None, extra_info: dict[str, Any]) -> Verdict:
    """``score`` and ``acc``, 1 or 0; ``pred``, which votes; ``extracted``, 0 where no answer was found in the text;
    ``acc_<category>``."""
    acc = float(is_right)
    found: Verdict = {"extracted": float(read is not None), "pred": (read or "")[:_MAX_PRED_CHARS]}
    return {"score": acc, "acc": acc, **found, **by_category(acc, extra_info)}


def by_category(acc: float, extra_info: dict[str, Any]) -> dict[str, float]:
    """``acc_<category>`` of ``extra_info.category``; nothing without one."""
    category = _OTHER.sub("_", str(extra_info.get("category") or "").lower()[:_MAX_NAME_CHARS]).strip("_")
    return {f"acc_{category}": acc} if category else {}
