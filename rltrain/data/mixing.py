"""Batches with given shares of the parts of the data (`data.mixing`), computed only from (seed, step).

If parts were drawn randomly, shares would be right only on average, and the position in each part would be state.
Instead, prompts of a batch are assigned to parts by multiples of the golden ratio, which fill [0, 1) evenly: a batch
and each of its mini-batches match the shares up to one or two prompts. Each part has separate shuffled epochs. If too
few rows are left at the end of an epoch, they are dropped, as in `BatchOrder`. Step k is computed by counting the
batches before it, so checkpoints need no state. Shares cannot change during a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.common.errors import ConfigError
from rltrain.common.seeds import GOLDEN, stream
from rltrain.data.batch_sampler import BatchOrder
from rltrain.data.rows import Rows

_KEY = "data.mixing"


class MixedOrder(BatchOrder):
    """Batch order with shares (see `BatchOrder`). parts: rows of each part; shares: each part's share of the prompts
    (sum 1). An epoch has as many prompts as there are rows in total.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        seed: int,
        parts: Sequence[NDArray[np.int64]],
        shares: Sequence[float],
        shuffle: bool = True,
    ) -> None:
        super().__init__(num_rows, batch_size, seed, shuffle)
        self._parts = parts
        self._edges = np.cumsum(shares)[:-1]
        self._shift = np.uint64(stream(seed, "mixing").random_raw())
        self._orders: dict[int, tuple[int, NDArray[np.int64]]] = {}
        self._start()

    def _start(self) -> None:
        # State before step 0: the epoch of each part, and the position of its next batch in that epoch.
        self._step, self._epochs = 0, [0] * len(self._parts)
        self._offsets = [0] * len(self._parts)

    def rows(self, step: int) -> list[int]:
        """Return the row indices of step ``step`` (from 0), with the parts evenly interleaved."""
        if step < 0:
            raise ValueError(f"step {step} is negative; steps are counted from 0")
        if step < self._step:
            self._start()
        while self._step < step:
            self._start_epochs(self._parts_of_batch(self._step))
            self._advance(self._parts_of_batch(self._step))
        batch_parts = self._parts_of_batch(step)
        self._start_epochs(batch_parts)
        rows = np.zeros(self.batch_size, dtype=np.int64)
        for part, members in enumerate(self._parts):
            places = np.flatnonzero(batch_parts == part)
            start = self._offsets[part]
            rows[places] = members[self._order(part, self._epochs[part])[start : start + len(places)]]
        self._advance(batch_parts)
        return rows.tolist()

    def _parts_of_batch(self, step: int) -> NDArray[np.int64]:
        """Return the part of every prompt of a batch."""
        places = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.uint64)
        # Multiples of the golden ratio (Knuth, The Art of Computer Programming 3, section 6.4). Unsigned products are
        # modulo 2^64 on every machine.
        points = (places * GOLDEN + self._shift) >> np.uint64(11)
        return np.searchsorted(self._edges, points.astype(np.float64) * 2.0**-53, side="right")

    def _start_epochs(self, batch_parts: NDArray[np.int64]) -> None:
        """Start the next epoch of parts with too few rows left for the batch."""
        for part, count in enumerate(np.bincount(batch_parts, minlength=len(self._parts)).tolist()):
            if self._offsets[part] + count > len(self._parts[part]):
                self._epochs[part], self._offsets[part] = self._epochs[part] + 1, 0

    def _advance(self, batch_parts: NDArray[np.int64]) -> None:
        counts = np.bincount(batch_parts, minlength=len(self._parts)).tolist()
        self._offsets = [offset + count for offset, count in zip(self._offsets, counts, strict=True)]
        self._step += 1

    def _order(self, part: int, epoch: int) -> NDArray[np.int64]:
        size = len(self._parts[part])
        if not self.shuffle:
            return np.arange(size)
        if part not in self._orders or self._orders[part][0] != epoch:
            keys = stream(self.seed, "mixing", part, epoch)
            self._orders[part] = epoch, np.argsort(keys.random_raw(size), kind="stable")
        return self._orders[part][1]


def mixed_order(rows: Rows, weights: Mapping[str, Any], batch_size: int, seed: int, shuffle: bool) -> MixedOrder:
    """Return the order of ``data.mixing``. weights: mapping from data source or file (path or name).

    Raises ConfigError for unused names, rows without a weight, and parts that are too small for their share.
    """
    sources, files = rows.sources(), rows.files()
    names = [_weight_name(weights, source, file) for source, file in zip(sources, files, strict=True)]
    if None in names:
        place = names.index(None)
        raise ConfigError(
            f"{_KEY} has no weight for data_source {sources[place]!r} ({rows.origin(place)}). Give it one; 0 excludes "
            "its rows."
        )
    for name in weights:
        if name not in names:
            known = ", ".join(dict.fromkeys([*sources, *files]))
            raise ConfigError(f"{_KEY}: no row belongs to '{name}'. Data sources and files are: {known}.")
    total = sum(map(float, weights.values()))
    shares = {name: float(weight) / total for name, weight in weights.items() if weight}
    of_row = np.array(names)
    parts = [np.flatnonzero(of_row == name) for name in shares]
    for (name, share), part in zip(shares.items(), parts, strict=True):
        # Among n consecutive multiples of the golden ratio, an interval gets at most 1.1 + 0.4 ln n more than its
        # length's share (counted for n up to 2^15; the excess grows with ln n).
        most = min(batch_size, int(share * batch_size + 1.1 + 0.4 * math.log(batch_size)))
        if len(part) < most:
            raise ConfigError(
                f"{_KEY}: '{name}' has {len(part)} prompts, and a batch of {batch_size} takes up to {most} of them. "
                f"Lower its weight ({share:.0%} of the prompts) or data.train_batch_size, or provide more prompts."
            )
    return MixedOrder(len(rows), batch_size, seed, parts, list(shares.values()), shuffle)


def _weight_name(weights: Mapping[str, Any], source: str, file: str) -> str | None:
    """Return the name (data source or file) that gives a row its weight, or None."""
    return next((name for name in (source, file, Path(file).name) if name in weights), None)
