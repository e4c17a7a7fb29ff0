"""How a mini-batch is spread over ranks and cut into micro-batches.

The driver decides for all ranks at once, from lengths alone: every rank gets the same number of micro-batches, so that no
collective waits for one that never comes. Which samples share an optimizer step is settled before and does not change here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rltrain.trainer.plan import PassBudget

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Who computes what. ids[rank]: samples in order; micro_sizes[rank][mini]: how they are cut (0 = keep step with an idle pass)."""

    ids: list[Ids]
    micro_sizes: list[list[tuple[int, ...]]]

    def flat_sizes(self, rank: int) -> list[int]:
        """Micro-batch sizes of ``rank`` over all mini-batches."""
        return [size for mini in self.micro_sizes[rank] for size in mini]


def lay_out(mini_batches: Sequence[Ids], lengths: NDArray[np.int64], num_ranks: int, budget: PassBudget) -> Layout:
    """Spread each mini-batch (ids of its samples) over the ranks by token count. lengths: tokens of every sample [n]."""
    spreads = [spread(ids, lengths, num_ranks, budget) for ids in mini_batches]
    ids = [[micro for mini in spreads for micro in mini[rank]] for rank in range(num_ranks)]
    return Layout(
        ids=[np.concatenate(micros) for micros in ids],
        micro_sizes=[[tuple(len(micro) for micro in mini[rank]) for mini in spreads] for rank in range(num_ranks)],
    )


def spread(ids: Ids, lengths: NDArray[np.int64], num_ranks: int, budget: PassBudget) -> list[list[Ids]]:
    """micro-batches[rank][i] of one mini-batch: as few as the budget allows, equally many on every rank, none over budget."""
    tokens = int(lengths[ids].sum())
    count = max(1, math.ceil(tokens / (num_ranks * budget.max_tokens))) if budget.max_tokens else 1
    count = max(count, math.ceil(len(ids) / (num_ranks * budget.max_samples))) if budget.max_samples else count
    while (bins := _fill(ids, lengths, num_ranks * count, budget)) is None:
        count += 1
    bins.sort(key=lambda one: (-int(lengths[one].sum()), one[0] if len(one) else -1))
    ranks: list[list[Ids]] = [[] for _ in range(num_ranks)]
    for turn in range(count):
        row = bins[turn * num_ranks : (turn + 1) * num_ranks]
        for rank, one in enumerate(row if turn % 2 == 0 else reversed(row)):
            ranks[rank].append(one)
    return ranks


def _fill(ids: Ids, lengths: NDArray[np.int64], num_bins: int, budget: PassBudget) -> list[Ids] | None:
    """Longest first into the emptiest bin that has room (Graham 1969); None when a sample fits nowhere."""
    order = sorted(ids.tolist(), key=lambda sample: (-int(lengths[sample]), sample))
    heap = [(0, number) for number in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for sample in order:
        full = []
        while heap and budget.max_samples is not None and len(bins[heap[0][1]]) >= budget.max_samples:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, number = heapq.heappop(heap)
        alone = not bins[number]
        if budget.max_tokens is not None and load + lengths[sample] > budget.max_tokens and not alone:
            return None
        bins[number].append(sample)
        heapq.heappush(heap, (load + int(lengths[sample]), number))
        for item in full:
            heapq.heappush(heap, item)
    return [np.array(sorted(one), dtype=np.int64) for one in bins]


def rank_tokens(layout: Layout, lengths: NDArray[np.int64]) -> list[int]:
    """Tokens of each rank."""
    return [int(lengths[ids].sum()) for ids in layout.ids]
