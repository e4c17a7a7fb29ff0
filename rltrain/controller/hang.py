"""How long a call to the workers may take before it counts as hung, and what is written down then.

A worker that hangs neither answers nor dies, and collectives make all others wait for it: without a deadline, a run
would stand still until somebody looks. No fixed limit fits, as one call takes a second and another an hour. So each
kind of call has a limit of its own, a multiple of the longest so far. Left out: progress within a call is not watched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Deadlines:
    """A call may take ``factor`` times as long as the longest of its kind so far, and never less than ``floor_s``.

    The first call of a kind may take ``factor`` times ``floor_s``. floor_s None: there is no limit. incidents: folder
    of the stacks.
    """

    floor_s: float | None = None
    factor: float = 5.0
    incidents: Path | None = None
    _longest: dict[str, float] = field(default_factory=dict)

    def limit_s(self, phase: str) -> float:
        """Seconds after which ``phase`` counts as hung."""
        if self.floor_s is None:
            return math.inf
        # A factor of 0 therefore makes the floor the limit of every call.
        return max(self.floor_s, self.factor * self._longest.get(phase, self.floor_s))

    def took(self, phase: str, seconds: float) -> None:
        """Remember how long a call of ``phase`` took."""
        self._longest[phase] = max(seconds, self._longest.get(phase, 0.0))

    def write_stacks(self, phase: str, stacks: Mapping[str, str]) -> str:
        """Write stacks, by name of the process, into a file of ``incidents``. Returns a sentence for the message."""
        if self.incidents is None:
            return ""
        file = self.incidents / f"hang_{phase}_{time.strftime('%Y%m%d_%H%M%S')}.txt"
        try:
            self.incidents.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(f"{name}\n{stack}" for name, stack in stacks.items()))
        except OSError as error:
            return f" Their stacks could not be written: {error}."
        return f" Stacks of those that answer: {file}."
