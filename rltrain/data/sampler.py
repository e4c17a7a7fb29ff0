"""Which prompts a round of generation gets: in the plain order (`BatchOrder`), or by the accuracy of earlier answers.

A prompt whose answers are all right or all wrong gives group-relative estimators no gradient, but costs as much
generation as any other. `SolveRateSampler` skips most of those. A sampler's knowledge is part of the checkpoint, so
that a resumed run draws the same prompts. Left out: weights between 0 and 1, since skipping is what saves time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rltrain.base.errors import ConfigError
from rltrain.base.plugin import load_plugin, user_traceback
from rltrain.base.seeds import stream
from rltrain.config.schema import DataConfig
from rltrain.data.custom import EpochSampler, is_verls
from rltrain.data.order import BatchOrder
from rltrain.data.rows import PromptRow, Rows

State = dict[str, NDArray[Any]]


class Sampler(Protocol):
    """The interface of what ``data.sampler.name=FILE.py:NAME`` returns when called with (BatchOrder, Rows).

    A class that was written for verl, with the arguments data_source and data_config, is an `EpochSampler`.
    """

    def rows(self, draw: int) -> Sequence[int]:
        """``batch_size`` distinct rows for draw ``draw``, counted from 0. Called once per draw, in order."""

    def epoch(self, draw: int) -> int:
        """The epoch (from 0) that draw ``draw`` belongs to."""

    def observe(self, rows: Sequence[int], solved: Sequence[float]) -> None:
        """The mean accuracy, from 0 to 1, of the answers per drawn row."""

    def state(self) -> State:
        """Arrays that a checkpoint keeps."""

    def restore(self, state: State) -> None:
        """Go on from ``state``."""


class SolveRateSampler:
    """Goes through `BatchOrder`'s shuffled epochs and mostly skips prompts that are always or never solved.

    A prompt's solve rate is the mean accuracy of its last answers, at first the ``pass_rate`` (or ``PassRate_…``,
    ``solve_rate``) of its extra_info. A prompt at 0 or 1 is drawn again with probability ``revisit`` per epoch, decided
    by seed, epoch and row alone. Skipped prompts fill up a batch only where no others are left.
    """

    def __init__(self, order: BatchOrder, rows: Iterable[PromptRow], revisit: float = 0.1) -> None:
        self._order = order
        self._revisit = revisit
        self._rates = np.array([_pass_rate(row.extra_info) for row in rows])
        self._cursor = 0

    def rows(self, draw: int) -> list[int]:
        """The next rows that are worth an attempt."""
        chosen: dict[int, None] = {}
        skipped: dict[int, None] = {}
        # From any cursor so many places hold one whole epoch, so every row has been looked at before skipped ones fill
        # up.
        for _ in range(2 * self._order.num_rows):
            # A cursor over single rows, not draws: how many rows a draw passes over is not known beforehand. So the
            # tail of an epoch is used too.
            epoch, place = divmod(self._cursor, self._order.num_rows)
            self._cursor += 1
            # A row may come twice where a draw crosses into the next epoch; dictionaries keep it once, in order.
            row = int(self._order.permutation(epoch)[place])
            (chosen if self._worth(row, epoch) else skipped)[row] = None
            if len(chosen) == self._order.batch_size:
                break
        rows = [*chosen, *(row for row in skipped if row not in chosen)]
        return rows[: self._order.batch_size]

    def _worth(self, row: int, epoch: int) -> bool:
        if self._rates[row] not in (0.0, 1.0):  # unknown counts as worth it
            return True
        return bool(stream(self._order.seed, "revisit", epoch, row).random_raw() < self._revisit * 2.0**64)

    def epoch(self, draw: int) -> int:
        """The epoch of the newest row."""
        return max(self._cursor - 1, 0) // self._order.num_rows

    def observe(self, rows: Sequence[int], solved: Sequence[float]) -> None:
        """Remember the newest solve rates."""
        # Only the newest answers count, because the policy that gave older ones is gone.
        self._rates[np.asarray(rows, dtype=np.int64)] = solved

    def state(self) -> State:
        """Position and solve rates."""
        return {"cursor": np.array(self._cursor), "rates": self._rates.copy()}

    def restore(self, state: State) -> None:
        """Go on from ``state``."""
        self._cursor, self._rates = int(state["cursor"]), state["rates"].copy()


def make_sampler(data: DataConfig, order: BatchOrder, rows: Rows) -> Sampler:
    """The sampler of ``data.sampler.name``. Raises ConfigError for one that cannot be made or lacks a method."""
    name = data.sampler.name
    if name == "shuffle":
        return order
    if name == "solve_rate":
        return SolveRateSampler(order, rows, data.sampler.revisit)
    key, sampler_class = f"data.sampler.name={name}", load_plugin("data.sampler.name", name)
    if is_verls(sampler_class):
        return EpochSampler(key, sampler_class, data, order, rows)
    try:
        sampler = sampler_class(order, rows)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything; it is reported
        raise ConfigError(f"{key} cannot be made:\n{user_traceback(error)}") from None
    methods = ("rows", "epoch", "observe", "state", "restore")
    missing = [method for method in methods if not callable(getattr(sampler, method, None))]
    if missing:
        raise ConfigError(f"{key}: {type(sampler).__name__} has no method {', '.join(missing)}.")
    return sampler


def _pass_rate(extra_info: dict[str, Any]) -> float:
    names = [name for name in extra_info if name.lower().replace("_", "").startswith(("passrate", "solverate"))]
    rate = next((extra_info[name] for name in names if extra_info[name] is not None), None)
    return float(rate) if isinstance(rate, int | float) else float("nan")
