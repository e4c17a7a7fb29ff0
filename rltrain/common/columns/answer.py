"""Response text for scorers."""

from __future__ import annotations

from typing import Any


class AnswerText(str):
    """Response text with additional data: ``trajectory_info`` is added to the ``extra_info`` of a scorer."""

    trajectory_info: dict[str, Any]

    @classmethod
    def of(cls, text: str, **trajectory_info: Any) -> AnswerText:
        """Return ``text`` with additional data for the scorer."""
        answer = cls(text)
        answer.trajectory_info = trajectory_info
        return answer
