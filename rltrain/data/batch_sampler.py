"""Rows of training step k as a pure function of seed and k, so that a run's data position is a single integer.

A stateful loader would have to save its position and random state, and a resumed run could differ from an uninterrupted
one. Here step k is recomputed on demand.
"""

from collections.abc import Sequence

import numpy as np

from rltrain.common.errors import DataError
from rltrain.common.seeds import order_stream


class BatchOrder:
    """Shuffled batches of ``batch_size`` out of ``num_rows``. The incomplete last batch of an epoch is dropped.

    Epoch ``e`` sorts the rows by 64-bit keys from ``Philox(SeedSequence([seed mod 2**64, e]))``. NumPy guarantees the
    raw stream of a bit generator across versions (unlike ``permutation``), so an old run resumes in the same order.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int, shuffle: bool = True):
        if num_rows < batch_size:
            raise DataError(
                f"data.train_batch_size={batch_size} is more than the {num_rows} prompts in data.train_files "
                f"(after filtering). Try data.train_batch_size={max(num_rows, 1)}, or provide more prompts."
            )
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._cached: tuple[int, np.ndarray] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return self.num_rows // self.batch_size

    def epoch(self, step: int) -> int:
        """Return the epoch (from 0) of step ``step`` (from 0)."""
        return step // self.steps_per_epoch

    def rows(self, step: int) -> list[int]:
        """Return the row indices of step ``step`` (from 0): ``batch_size`` distinct numbers below ``num_rows``."""
        if step < 0:
            raise ValueError(f"step {step} is negative; steps are counted from 0")
        epoch, offset = divmod(step, self.steps_per_epoch)
        start = offset * self.batch_size
        return self.permutation(epoch)[start : start + self.batch_size].tolist()

    def observe(self, rows: Sequence[int], solved: Sequence[float]) -> None:
        """Do nothing: the order does not depend on responses."""

    def state(self) -> dict[str, np.ndarray]:
        """Return no state: a batch depends only on its step."""
        return {}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Do nothing: there is no state."""

    def permutation(self, epoch: int) -> np.ndarray:
        """Return all rows in the order of epoch ``epoch``."""
        if not self.shuffle:
            return np.arange(self.num_rows)
        if self._cached is None or self._cached[0] != epoch:
            stream = order_stream(self.seed, epoch)
            # The sort is stable, so that the order of equal keys does not depend on NumPy's default sort.
            self._cached = (epoch, np.argsort(stream.random_raw(self.num_rows), kind="stable"))
        return self._cached[1]
