"""Response text for scorers."""

from __future__ import annotations

from typing import Any


class AnswerText(str):
    """Response text with additional data: ``told`` is added to the ``extra_info`` of a scorer."""

    told: dict[str, Any]

    @classmethod
    def of(cls, text: str, **told: Any) -> AnswerText:
        """Return ``text`` with additional data for the scorer."""
        answer = cls(text)
        answer.told = told
        return answer
