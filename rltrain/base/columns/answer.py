"""An answer as text, on its way to those who score it."""

from __future__ import annotations

from typing import Any


class AnswerText(str):
    """A text that says more of its answer: ``told`` is added to the ``extra_info`` of a scorer."""

    told: dict[str, Any]

    @classmethod
    def of(cls, text: str, **told: Any) -> AnswerText:
        """``text`` with what a scorer is told."""
        answer = cls(text)
        answer.told = told
        return answer
