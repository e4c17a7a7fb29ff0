"""Moments of numbers of which every micro-batch and rank has a part: they are joined without the numbers themselves.

Metrics need means, spreads and extremes over all tokens of a step, while tokens stay where they were computed. So
workers return a `Moments` per quantity, and the driver joins those of all ranks. Every quantity has all five fields,
whether a metric reads them or not, so that no name must say how a number is reduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

# verl's, for whitening. It keeps the scale finite where all advantages are equal.
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
        """values: [k], summed in float64."""
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
        # Rounding may bring the difference below 0 where all numbers are equal.
        return max(self.squares / max(self.count, 1) - self.mean * self.mean, 0.0)

    def whitening(self, rounding: float = 0.0) -> tuple[float, float]:
        """(shift, scale) so that (x - shift) * scale has mean 0 and unbiased variance 1 (up to 1e-8 under the root).

        Numbers that differ by no more than their rounding all become 0.
        """
        # One number has no unbiased variance, so it stays as it is.
        if self.count < 2:
            return 0.0, 1.0
        if self.largest - self.smallest <= rounding:
            return self.mean, 0.0
        variance = self.variance * self.count / (self.count - 1)
        return self.mean, (variance + _VARIANCE_EPSILON) ** -0.5


def join(parts: Iterable[Mapping[str, Moments]]) -> dict[str, Moments]:
    """The moments of all parts together, by quantity. A part may lack quantities."""
    joined: dict[str, Moments] = {}
    for part in parts:
        for name, moments in part.items():
            joined[name] = joined[name] + moments if name in joined else moments
    return joined
