"""Workers that neither answer nor die: how long is too long, and what is written down of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Deadlines:
    """How long a call to the workers may take: ``factor`` times the longest of its kind so far, and never less than ``floor_s``.

    A kind that was not called before counts as ``floor_s`` long. floor_s None: as long as it likes. incidents: where stacks go.
    """

    floor_s: float | None = None
    factor: float = 5.0
    incidents: Path | None = None
    _longest: dict[str, float] = field(default_factory=dict)

    def limit_s(self, phase: str) -> float:
        """Seconds after which ``phase`` counts as hung."""
        if self.floor_s is None:
            return math.inf
        return max(self.floor_s, self.factor * self._longest.get(phase, self.floor_s))

    def took(self, phase: str, seconds: float) -> None:
        """One call of ``phase`` has ended."""
        self._longest[phase] = max(seconds, self._longest.get(phase, 0.0))

    def write_stacks(self, phase: str, stacks: Mapping[str, str]) -> str:
        """Stacks by name of the process, into a file of ``incidents``. Returns what to say of it."""
        if self.incidents is None:
            return ""
        file = self.incidents / f"hang_{phase}_{time.strftime('%Y%m%d_%H%M%S')}.txt"
        try:
            self.incidents.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(f"{name}\n{stack}" for name, stack in stacks.items()))
        except OSError as error:
            return f" Their stacks could not be written: {error}."
        return f" Stacks of those that answer: {file}."
