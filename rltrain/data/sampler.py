"""Prompts of a generation round: in plain order (`BatchOrder`), or by the accuracy of earlier responses.

Prompts whose responses are all right or all wrong have no gradient with group-relative estimators, but cost as much
generation as others. `SolveRateSampler` skips most of these prompts. A sampler's state is part of the checkpoint, so
that a resumed run draws the same prompts. Sampling weights between 0 and 1 are not supported, because only skipping
saves time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rltrain.common.errors import ConfigError
from rltrain.common.plugin import load_plugin, user_traceback
from rltrain.common.seeds import stream
from rltrain.config.schema import DataConfig
from rltrain.data.batch_sampler import BatchOrder
from rltrain.data.custom import EpochSampler, is_verl_sampler
from rltrain.data.rows import PromptRow, Rows

State = dict[str, NDArray[Any]]


class Sampler(Protocol):
    """Interface of the object that ``data.sampler.name=FILE.py:NAME`` returns when called with (BatchOrder, Rows).

    A class written for verl, with arguments data_source and data_config, is wrapped in an `EpochSampler`.
    """

    def rows(self, draw: int) -> Sequence[int]:
        """Return ``batch_size`` distinct rows for draw ``draw`` (from 0). Called once per draw, in order."""

    def epoch(self, draw: int) -> int:
        """Return the epoch (from 0) of draw ``draw``."""

    def observe(self, rows: Sequence[int], solved: Sequence[float]) -> None:
        """Observe the mean accuracy, from 0 to 1, of the responses per drawn row."""

    def state(self) -> State:
        """Return arrays to be saved in a checkpoint."""

    def restore(self, state: State) -> None:
        """Continue from ``state``."""


class SolveRateSampler:
    """Sampler that follows `BatchOrder`'s shuffled epochs and mostly skips prompts that are always or never solved.

    A prompt's solve rate is the mean accuracy of its last responses, initially the ``pass_rate`` (or ``PassRate_…``,
    ``solve_rate``) of its extra_info. A prompt with rate 0 or 1 is drawn again with probability ``revisit`` per epoch,
    which depends only on seed, epoch and row. Skipped prompts fill a batch only if no others are left.
    """

    def __init__(self, order: BatchOrder, rows: Iterable[PromptRow], revisit: float = 0.1) -> None:
        self._order = order
        self._revisit = revisit
        self._rates = np.array([_pass_rate(row.extra_info) for row in rows])
        self._cursor = 0

    def rows(self, draw: int) -> list[int]:
        """Return the next rows that are likely to be informative."""
        chosen: dict[int, None] = {}
        skipped: dict[int, None] = {}
        # From any cursor, this range contains one whole epoch, so every row was considered before skipped rows are
        # used.
        for _ in range(2 * self._order.num_rows):
            # The cursor counts rows instead of draws, because the number of skipped rows is not known in advance. The
            # last rows of an epoch are therefore used too.
            epoch, place = divmod(self._cursor, self._order.num_rows)
            self._cursor += 1
            # A row may occur twice if a draw spans two epochs; dictionaries keep it once, in order.
            row = int(self._order.permutation(epoch)[place])
            (chosen if self._is_informative(row, epoch) else skipped)[row] = None
            if len(chosen) == self._order.batch_size:
                break
        rows = [*chosen, *(row for row in skipped if row not in chosen)]
        return rows[: self._order.batch_size]

    def _is_informative(self, row: int, epoch: int) -> bool:
        if self._rates[row] not in (0.0, 1.0):  # an unknown rate counts as informative
            return True
        return bool(stream(self._order.seed, "revisit", epoch, row).random_raw() < self._revisit * 2.0**64)

    def epoch(self, draw: int) -> int:
        """Return the epoch of the latest row."""
        return max(self._cursor - 1, 0) // self._order.num_rows

    def observe(self, rows: Sequence[int], solved: Sequence[float]) -> None:
        """Store the latest solve rates."""
        # Earlier rates are overwritten, because they belong to an older policy.
        self._rates[np.asarray(rows, dtype=np.int64)] = solved

    def state(self) -> State:
        """Return position and solve rates."""
        return {"cursor": np.array(self._cursor), "rates": self._rates.copy()}

    def restore(self, state: State) -> None:
        """Continue from ``state``."""
        self._cursor, self._rates = int(state["cursor"]), state["rates"].copy()


def make_sampler(data: DataConfig, order: BatchOrder, rows: Rows) -> Sampler:
    """Return the sampler of ``data.sampler.name``. Raises ConfigError if it cannot be created or lacks a method."""
    name = data.sampler.name
    if name == "shuffle":
        return order
    if name == "solve_rate":
        return SolveRateSampler(order, rows, data.sampler.revisit)
    key, sampler_class = f"data.sampler.name={name}", load_plugin("data.sampler.name", name)
    if is_verl_sampler(sampler_class):
        return EpochSampler(key, sampler_class, data, order, rows)
    try:
        sampler = sampler_class(order, rows)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything; it is reported
        raise ConfigError(f"{key} cannot be created:\n{user_traceback(error)}") from None
    methods = ("rows", "epoch", "observe", "state", "restore")
    missing = [method for method in methods if not callable(getattr(sampler, method, None))]
    if missing:
        raise ConfigError(f"{key}: {type(sampler).__name__} has no method {', '.join(missing)}.")
    return sampler


def _pass_rate(extra_info: dict[str, Any]) -> float:
    names = [name for name in extra_info if name.lower().replace("_", "").startswith(("passrate", "solverate"))]
    rate = next((extra_info[name] for name in names if extra_info[name] is not None), None)
    return float(rate) if isinstance(rate, int | float) else float("nan")
