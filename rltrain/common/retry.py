"""Pauses between retries: of reads from storage, of requests to a scorer or judge, and of uploads to a tracker."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Exponential backoff: the pause doubles with every failure in a row, up to ``longest_s``."""

    first_s: float
    longest_s: float
    jitter: float = 0.0
    """Share by which a pause varies at random, so that requests that failed together are not retried together."""

    def pause_s(self, failures: int) -> float:
        """Return the seconds to wait after this number of failures in a row."""
        pause_s = min(self.first_s * 2.0 ** min(max(failures - 1, 0), 60), self.longest_s)
        return pause_s * random.uniform(1 - self.jitter, 1 + self.jitter)
