"""Mergeable moments of numbers that are spread over micro-batches and ranks.

Metrics need means, spreads and extremes over all tokens of a step, while tokens stay on the workers. So workers return
`Moments` per quantity, and the driver joins them over ranks. Every quantity has all five fields, so that no metric name
has to define a reduction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

# verl's value for whitening. It keeps the scale finite if all advantages are equal.
_VARIANCE_EPSILON = 1e-8


@dataclass(frozen=True)
class Moments:
    """Count, sum, sum of squares and extremes of some numbers."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    largest: float = -math.inf
    smallest: float = math.inf

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Compute the moments of values [k], in float64."""
        if not len(values):
            return cls()
        values = values.double()
        total, squares = float(values.sum()), float(values.square().sum())
        return cls(float(len(values)), total, squares, float(values.max()), float(values.min()))

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            max(self.largest, other.largest),
            min(self.smallest, other.smallest),
        )

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)

    @property
    def variance(self) -> float:
        # Rounding may make the difference negative if all numbers are equal.
        return max(self.squares / max(self.count, 1) - self.mean * self.mean, 0.0)

    def whitening(self, rounding: float = 0.0) -> tuple[float, float]:
        """Return (shift, scale) so that (x - shift) * scale has mean 0 and unbiased variance 1 (up to 1e-8 under the
        root).

        If all numbers differ by at most ``rounding``, they become 0.
        """
        # A single number has no unbiased variance, so it is unchanged.
        if self.count < 2:
            return 0.0, 1.0
        if self.largest - self.smallest <= rounding:
            return self.mean, 0.0
        variance = self.variance * self.count / (self.count - 1)
        return self.mean, (variance + _VARIANCE_EPSILON) ** -0.5


def join(parts: Iterable[Mapping[str, Moments]]) -> dict[str, Moments]:
    """Join moments by quantity. A part may lack quantities."""
    joined: dict[str, Moments] = {}
    for part in parts:
        for name, moments in part.items():
            joined[name] = joined[name] + moments if name in joined else moments
    return joined
