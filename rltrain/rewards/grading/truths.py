"""Normalisation of ground truths in data files: JSON lists as text, integers as floats, boxes, white space."""

import ast
import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rltrain.rewards.grading.equivalence import MAX_CHARS
from rltrain.rewards.grading.latex import last_boxed

# A list as text. A text such as "[2,3]" may also be an interval.
_LISTED = re.compile(r"\s*(?:\[\s*[\"']|\[\s*-?[0-9.]+\s*\]|\".*\")", re.DOTALL)


def solutions(truth: Any) -> list[str]:
    """Return the texts of a ground truth; an answer must match one of them."""
    if isinstance(truth, str) and _LISTED.match(truth):
        truth = _read(truth)
    if hasattr(truth, "tolist"):  # a numpy array
        truth = truth.tolist()
    several = truth if isinstance(truth, Sequence) and not isinstance(truth, str) else [truth]
    return [_text(solution) for solution in several]


def why_unmatchable(truth: Any) -> str | None:
    """Return the reason why no answer can ever match a mathematical ground truth; None if one can."""
    texts = solutions(truth)
    if not any(texts):
        return "it is empty"
    if isinstance(truth, dict) or all(text.startswith("{") and isinstance(_read(text), dict) for text in texts):
        return "it is a mapping, not an answer: name the field that holds the answer"
    if all(text.casefold() in ("nan", "none", "null", "n/a", "<na>") for text in texts):
        return "it stands for a missing value"
    if all(len(text) > MAX_CHARS for text in texts):
        return f"it is longer than {MAX_CHARS} characters"
    return None


def _read(text: str) -> Any:
    """Parse a list or a mapping from JSON or a Python literal; return other texts unchanged."""
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(text.strip())
    return text


def _text(truth: Any) -> str:
    if isinstance(truth, float) and math.isfinite(truth) and truth == int(truth):
        truth = int(truth)
    text = str(truth).strip()
    boxed = last_boxed(text)
    return text if boxed is None else boxed.strip()
