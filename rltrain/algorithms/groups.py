"""Statistics over answers that are compared with each other.

Scores that differ by no more than their rounding are equal here, so that no estimator learns a direction from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# verl's value, so that the same command learns from the same numbers. A group that scores alike has exactly 0 above it
# (`Groups.centred`), and so an advantage of 0.
STD_EPSILON = 1e-6
# Scores are sums in float64, and the same terms in another order differ in the last bits: twelve digits are sure.
SCORE_ROUNDING = 2.0**-40


class Groups:
    """Statistics over the answers to one prompt. Results are [n]: each answer has the value of its group.

    An answer alone is compared with a mean of 0 and a deviation of 1, as in verl: its score is its advantage.
    """

    def __init__(self, groups: Tensor, rounding: Tensor | None = None) -> None:
        # Group numbers need not be consecutive, so they are not used as an index themselves.
        self._index = groups.unique(return_inverse=True)[1]
        self._count = int(self._index.max()) + 1
        self.size = self.sum(torch.ones(len(groups), dtype=torch.float64))
        self._rounding = torch.zeros_like(self.size) if rounding is None else self.largest(rounding)
        self.alone = self.size < 2

    def several(self) -> Groups:
        """These groups, each of which has several answers. Raises ValueError where one has not."""
        if bool(self.alone.any()):
            raise ValueError("a prompt has one answer, and this advantage estimator compares answers to one prompt")
        return self

    def sum(self, values: Tensor) -> Tensor:
        return torch.zeros(self._count, dtype=values.dtype).index_add(0, self._index, values)[self._index]

    def largest(self, values: Tensor) -> Tensor:
        start = torch.full((self._count,), -torch.inf, dtype=values.dtype)
        return start.scatter_reduce(0, self._index, values, "amax")[self._index]

    def rounding(self, values: Tensor) -> Tensor:
        """Differences up to this are none."""
        return self._rounding + SCORE_ROUNDING * self.largest(values.abs())

    def flat(self, values: Tensor) -> Tensor:
        """Whether the values of the group differ by no more than their rounding: then there is nothing to learn."""
        spread = torch.where(self.alone, values.abs(), self.largest(values) + self.largest(-values))
        return spread <= self.rounding(values)

    def centred(self, values: Tensor) -> Tensor:
        difference = values - self.sum(values) / self.size * ~self.alone
        # A division by std + 1e-6 would make a gradient of rounding, which Adam, dividing by the gradient's size,
        # makes a whole step; and the update leaves out only samples whose advantage is exactly 0.
        return torch.where(self.flat(values), torch.zeros_like(difference), difference)

    def against_others(self, values: Tensor) -> Tensor:
        """Each value less the mean of the others."""
        return self.centred(values) * self.size / (self.size - 1).clamp(min=1)

    def over_std(self, values: Tensor) -> Tensor:
        """Each value less the mean, over the standard deviation + 1e-6."""
        return self.centred(values) / (self.std(values) + STD_EPSILON)

    def std(self, values: Tensor) -> Tensor:
        deviations = self.sum(self.centred(values).square()) / (self.size - 1).clamp(min=1)
        return torch.where(self.alone, 1.0, deviations.sqrt())
