"""Guess a number: an environment whose optimal strategy (halving) is known, and which a small model can learn.

Rows come from ``python -m rltrain.data_preprocess.guess_number``: their prompts name the bounds, their ``extra_info``
has ``low``, ``high`` and ``number``.
"""

import re
from collections.abc import Mapping
from typing import Any

# A longer number is not a guess; Python refuses to read very long ones.
_NUMBER = re.compile(r"-?\d+", re.ASCII)
_MAX_DIGITS = 18


class Guess:
    """Replies "higher" or "lower" to the last number of a turn until it is right.

    Args:
        cost: Amount that each guess after the first subtracts from the score of 1.
    """

    def __init__(self, cost: float = 0.0) -> None:
        self._cost = cost
        self._low = self._high = self._number = self._guesses = 0
        self._found = False

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Start a game with the bounds and the number of the row."""
        extra = row["extra_info"]
        self._low, self._high, self._number = (int(extra[name]) for name in ("low", "high", "number"))
        self._guesses, self._found = 0, False

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return the reply to a turn, the reward of the turn, and whether the game is over."""
        self._guesses += 1
        numbers = _NUMBER.findall(text)
        guess = int(numbers[-1]) if numbers and len(numbers[-1]) <= _MAX_DIGITS else None
        if guess is None or not self._low <= guess <= self._high:
            return f"Say a number from {self._low} to {self._high}.", 0.0, False
        self._found = guess == self._number
        if self._found:
            return "correct", self._score(), True
        return "higher" if guess < self._number else "lower", 0.0, False

    def score(self) -> dict[str, float]:
        """Return ``score``: 1 minus the cost of the guesses after the first, or 0 if the number was not found."""
        return {"score": self._score(), "found": float(self._found), "guesses": float(self._guesses)}

    def _score(self) -> float:
        return max(0.0, 1.0 - self._cost * (self._guesses - 1)) if self._found else 0.0
