"""A tool and an environment with random output, as controls for learning."""

import random
from typing import Any

from rltrain import tool
from rltrain.agents.ready.guess import Guess


@tool
def calculator(expression: str) -> str:
    """Say any sum of two numbers up to 49, the same whenever an expression is given again.

    Args:
        expression: Such as "12+7".
    """
    chance = random.Random(expression)
    return str(chance.randint(0, 49) + chance.randint(0, 49))


class DeafGuess(Guess):
    """Says "higher" or "lower" at random until the number is found."""

    def reset(self, row: Any, seed: int) -> None:
        """Start a game, with a random generator seeded per response."""
        super().reset(row, seed)
        self._chance = random.Random(seed)

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return `Guess.step` with a random word."""
        said, reward, done = super().step(text)
        return (self._chance.choice(("higher", "lower")) if said in ("higher", "lower") else said), reward, done
