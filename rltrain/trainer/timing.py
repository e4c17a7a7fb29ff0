"""Wall-clock timers of a step's phases, as the driver sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Phases that add up to the step. reshard and generate_sequences are parts of gen and measured inside the workers.
STEP_PHASES = ("gen", "reward", "gen_max", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


class StepTimer:
    """``with timer("gen"): ...`` adds the block's seconds to ``timing_s/gen``. begins(name) is called at its start."""

    def __init__(self, begins: Callable[[str], None] = lambda name: None) -> None:
        self.seconds: dict[str, float] = {}
        self._begins = begins

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._begins(name)
        started = time.perf_counter()
        try:
            yield
        # Also after an error, and added up: dynamic sampling has several rounds of one phase.
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """``timing_s/<name>``, with ``timing_s/other`` = the part of the step that no phase claims."""
        timing = {f"timing_s/{name}": value for name, value in self.seconds.items()}
        if "step" in self.seconds:
            claimed = sum(self.seconds.get(name, 0.0) for name in STEP_PHASES)
            timing["timing_s/other"] = self.seconds["step"] - claimed
        return timing
