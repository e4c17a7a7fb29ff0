"""Statistics over groups of responses.

Scores that differ by at most their rounding error count as equal, so that no estimator trains on rounding errors.
"""

from __future__ import annotations

import torch

from rltrain.algorithms.shapes import PerResponse, ResponseInts, ResponseMask

# verl's value, so that the same command gives equal results. A group of equal scores has a numerator of exactly 0
# (`Groups.centred`), so its advantage is 0.
STD_EPSILON = 1e-6
# Scores are float64 sums whose last bits depend on the order of the terms, so only twelve digits are reliable.
SCORE_ROUNDING = 2.0**-40


class Groups:
    """Statistics over the responses to one prompt. Results are [n]: each response gets the value of its group.

    A response that is alone in its group gets mean 0 and standard deviation 1, as in verl. Its advantage is then its
    score.
    """

    def __init__(self, groups: ResponseInts, rounding: PerResponse | None = None) -> None:
        # Group numbers need not be consecutive, so they cannot be used as an index.
        self._index = groups.unique(return_inverse=True)[1]
        self._count = int(self._index.max()) + 1
        self.size = self.sum(torch.ones(len(groups), dtype=torch.float64))
        self._rounding = torch.zeros_like(self.size) if rounding is None else self.largest(rounding)
        self.alone = self.size < 2

    def several(self) -> Groups:
        """Check that every group has several responses, and return self. Raises ValueError otherwise."""
        if bool(self.alone.any()):
            raise ValueError("a prompt has only one response, but this estimator compares responses to one prompt")
        return self

    def sum(self, values: PerResponse) -> PerResponse:
        return torch.zeros(self._count, dtype=values.dtype).index_add(0, self._index, values)[self._index]

    def largest(self, values: PerResponse) -> PerResponse:
        start = torch.full((self._count,), -torch.inf, dtype=values.dtype)
        return start.scatter_reduce(0, self._index, values, "amax")[self._index]

    def rounding(self, values: PerResponse) -> PerResponse:
        """Return the tolerance within which values count as equal."""
        return self._rounding + SCORE_ROUNDING * self.largest(values.abs())

    def flat(self, values: PerResponse) -> ResponseMask:
        """Return True where the values of a group are equal up to rounding, so there is no signal."""
        spread = torch.where(self.alone, values.abs(), self.largest(values) + self.largest(-values))
        return spread <= self.rounding(values)

    def centred(self, values: PerResponse) -> PerResponse:
        difference = values - self.sum(values) / self.size * ~self.alone
        # Groups of equal values get exactly 0. Otherwise a division by std + 1e-6 would turn rounding errors into a
        # gradient, which Adam's normalisation would scale to a full step. Also, the update skips only samples with an
        # advantage of exactly 0.
        return torch.where(self.flat(values), torch.zeros_like(difference), difference)

    def against_others(self, values: PerResponse) -> PerResponse:
        """Return each value minus the mean of the others."""
        return self.centred(values) * self.size / (self.size - 1).clamp(min=1)

    def over_std(self, values: PerResponse) -> PerResponse:
        """Return each value minus the mean, divided by the standard deviation + 1e-6."""
        return self.centred(values) / (self.std(values) + STD_EPSILON)

    def std(self, values: PerResponse) -> PerResponse:
        deviations = self.sum(self.centred(values).square()) / (self.size - 1).clamp(min=1)
        return torch.where(self.alone, 1.0, deviations.sqrt())
