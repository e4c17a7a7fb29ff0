"""Log-prob passes that do not wait for the last answer (`trainer.overlap`).

Problem: the last answers of a step keep a few engines busy, while the devices of the others have nothing to do. Choice:
devices that have run dry compute log-probs of the answers they have generated themselves, one micro-batch after
another, until the last answer has ended; what is left then is laid out over all devices as without this. A pass treats
every sample for itself, so no number changes but for how a kernel rounds another micro-batch. Left out: answers of
engines that still run, whose tokens are with them; weights spread over all devices, because gathering a layer takes
every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.algorithms.moments import Moments
from rltrain.base.columns import names as c
from rltrain.controller.group import Handle
from rltrain.controller.samples import Samples
from rltrain.trainer.balance import Layout, Workload, lay_out
from rltrain.trainer.plan import PassBudget
from rltrain.trainer.roles import Pass


@dataclass(frozen=True)
class OverlappedPass:
    """A pass of `Policy`."""

    begin: Callable[[Samples, Layout, range], Pass]
    covered: NDArray[np.bool_]
    """[n]: the samples that it is for."""
    budget: PassBudget
    num_ranks: int
    """Data-parallel, of all devices."""


@dataclass
class Overlap:
    """The passes of one step that may overlap its generation."""

    passes: Sequence[OverlappedPass]
    block: int
    """So many neighbours of ``world`` workers hold all weights among them."""
    world: int
    workload: Callable[[Samples], Workload]
    measured: list[dict[str, Moments]] = field(default_factory=list)
    """Moments of what was computed, one entry per micro-batch."""
    num_samples: int = 0
    """Added up over passes."""
    _under_way: dict[int, Pass] = field(default_factory=dict)
    _to_do: dict[int, Iterator[Pass]] = field(default_factory=dict)
    _busy: dict[int, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Of the passes' samples, those that did not wait."""
        return self.num_samples / max(sum(int(early.covered.sum()) for early in self.passes), 1)

    def rank_returned(self, samples: Samples, generation: Handle[Any], handle: Handle[Any], rank: int) -> None:
        """Give the block of ``rank`` its next micro-batch, once it has none and while others generate."""
        block = rank // self.block
        self._busy[block] = self._busy.get(block, self.block) - 1
        if self._busy[block]:
            return
        if before := self._under_way.pop(block, None):
            self.measured.append(before.collect())
        if generation.done:
            return
        to_do = self._to_do.setdefault(block, self._micro_batches(samples, block))
        if following := next(to_do, None):
            generation.add(following.handle)
            self._under_way[block], self._busy[block] = following, self.block
            self.num_samples += sum(map(len, following.layout.ids))

    def _micro_batches(self, samples: Samples, block: int) -> Iterator[Pass]:
        """Begin the passes over what the block has generated, a micro-batch of each of its ranks at a time."""
        ranks = range(block * self.block, (block + 1) * self.block)
        of_block = samples[c.SERVED] & (samples[c.ENGINE] // self.block == block)
        for early in self.passes:
            ids = np.flatnonzero(of_block & early.covered)
            if not len(ids):
                continue
            layout = lay_out([ids], self.workload(samples), self.block * early.num_ranks // self.world, early.budget)
            for turn in zip(*map(layout.micro_batches, range(len(layout.ids))), strict=True):
                yield early.begin(samples, Layout(list(turn), [[(len(ids),)] for ids in turn]), ranks)
