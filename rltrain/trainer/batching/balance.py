"""Assignment of a mini-batch to ranks and micro-batches.

The driver decides for all ranks, from lengths only. Every rank gets the same number of micro-batches, because their
collectives would otherwise deadlock. This module does not change which samples share an optimizer step.

Responses to one prompt in the same micro-batch share the prompt's tokens (`models.attention.packing.pack`) and its
images. The images are encoded once, even if a response is too long to share the tokens. Keeping responses together
saves work but leaves coarser chunks to balance; the cost model weighs both.

With several nodes a chunk goes to a rank of the node that generated it, unless that makes the ranks less balanced. The
generating node depends on timing, so two such runs are equal only up to rounding.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrain.models.attention.packing import pays_to_share
from rltrain.trainer.plan import PassBudget

Ids = NDArray[np.int64]
# Fixed cost of a micro-batch in tokens, for kernel launches and all-gathers.
_MICRO_BATCH = 64.0
# The search for finer chunks ends when the busiest rank has at most this multiple of its even share.
_GOOD_ENOUGH = 1.02
# A chunk is tried in this many of the emptiest micro-batches before it counts as not fitting.
_TRIES = 8


@dataclass(frozen=True)
class Workload:
    """Tokens and cost of n samples.

    A token costs 1. A (query, key) pair costs ``pair_cost``: its FLOPs relative to a token's matrix products.

    Samples of one group (groups [n]) share the images of their prompt within a micro-batch. image_rows [n]: vision
    tower inputs (patches or tiles) of each sample's prompt. image_cost [n]: their cost in tokens. own_rows and own_cost
    [n]: the same for the images within each response, which are not shared.
    """

    prompts: Ids
    answers: Ids
    owners: Ids
    """[n]: samples with the same owner share their prompt within a micro-batch."""
    pair_cost: float = 0.0
    groups: Ids | None = None
    image_rows: Ids | None = None
    image_cost: NDArray[np.float64] | None = None
    own_rows: Ids | None = None
    own_cost: NDArray[np.float64] | None = None
    nodes: Ids | None = None
    """[n]: the node that stores each sample (None: single node)."""

    @classmethod
    def of_groups(cls, prompts: Ids, answers: Ids, groups: Ids, pair_cost: float = 0.0) -> Workload:
        """Build a workload. groups [n]: the prompt of each sample, shared by its responses if `pays_to_share`."""
        # Samples that do not share their prompt get a negative owner, which differs from every group number.
        alone = -1 - np.arange(len(groups))
        return cls(prompts, answers, np.where(pays_to_share(prompts, answers), groups, alone), pair_cost)

    def with_images(self, groups: Ids, rows: Ids, cost: NDArray[np.float64]) -> Workload:
        """Return this workload with image sizes of the prompts ``groups`` [n]."""
        return replace(self, groups=groups, image_rows=rows, image_cost=cost)

    @cached_property
    def answer_cost(self) -> NDArray[np.float64]:
        text = self.answers + self.pair_cost * self.answers * (self.prompts + self.answers / 2)
        return text if self.own_cost is None else text + self.own_cost

    @cached_property
    def prompt_cost(self) -> NDArray[np.float64]:
        return self.prompts + self.pair_cost * np.square(self.prompts, dtype=np.float64) / 2

    @cached_property
    def keys(self) -> Ids:
        """Keys [n]: samples with the same key save work in a common micro-batch (same owner, or same images)."""
        if self.image_rows is None or self.groups is None:
            return self.owners
        return np.where(self.image_rows > 0, self.groups, self.owners)

    def _once(self, ids: Ids) -> Ids:
        """Return one sample per owner, which accounts for the prompt's cost."""
        return ids[np.unique(self.owners[ids], return_index=True)[1]]

    def _of_images(self, values: NDArray[Any] | None, ids: Ids) -> float:
        """Return the sum of ``values`` over the prompts of ``ids``."""
        return 0.0 if values is None else float(values[ids[np.unique(self.keys[ids], return_index=True)[1]]].sum())

    def tokens(self, ids: Ids) -> int:
        """Return the tokens of a micro-batch; a shared prompt counts once."""
        return int(self.answers[ids].sum() + self.prompts[self._once(ids)].sum())

    def rows(self, ids: Ids) -> int:
        """Return the vision tower inputs of a micro-batch, in patches or tiles."""
        own = 0 if self.own_rows is None else int(self.own_rows[ids].sum())
        return int(self._of_images(self.image_rows, ids)) + own

    def cost(self, ids: Ids) -> float:
        """Return the cost of a micro-batch."""
        text = float(self.answer_cost[ids].sum() + self.prompt_cost[self._once(ids)].sum())
        return text + self._of_images(self.image_cost, ids)


@dataclass(frozen=True)
class Layout:
    """Assignment of samples to ranks. ids[rank]: samples in order. micro_sizes[rank][mini]: sizes of the micro-batches.
    Size 0: the rank is idle."""

    # A sample is listed once per epoch over the batch, so ids may repeat.
    ids: list[Ids]
    micro_sizes: list[list[tuple[int, ...]]]

    def flat_sizes(self, rank: int) -> list[int]:
        """Return the micro-batch sizes of ``rank`` over all mini-batches."""
        return [size for mini in self.micro_sizes[rank] for size in mini]

    def all_sizes(self) -> list[list[int]]:
        """Return `flat_sizes` of every rank."""
        return [self.flat_sizes(rank) for rank in range(len(self.ids))]

    def micro_batches(self, rank: int) -> list[Ids]:
        """Return the samples of each micro-batch of ``rank``."""
        return np.split(self.ids[rank], np.cumsum(self.flat_sizes(rank))[:-1])


def lay_out(
    mini_batches: Sequence[Ids], work: Workload, num_ranks: int, budget: PassBudget, nodes: Sequence[int] | None = None
) -> Layout:
    """Spread each mini-batch (sample ids) over the ranks by cost. nodes: the node of every rank (None: single node)."""
    spreads = [spread(ids, work, num_ranks, budget, nodes) for ids in mini_batches]
    ids = [[micro for mini in spreads for micro in mini[rank]] for rank in range(num_ranks)]
    return Layout(
        ids=[np.concatenate(micros) for micros in ids],
        micro_sizes=[[tuple(len(micro) for micro in mini[rank]) for mini in spreads] for rank in range(num_ranks)],
    )


def spread(
    ids: Ids, work: Workload, num_ranks: int, budget: PassBudget, nodes: Sequence[int] | None = None
) -> list[list[Ids]]:
    """Return micro-batches[rank][i] of one mini-batch: as few as the budget allows, the same number per rank.

    Tries whole prompt groups first, then ever smaller chunks, and returns the cheapest result.
    """
    if nodes is None or len(set(nodes)) == 1:
        nodes, work = [0] * num_ranks, replace(work, nodes=None)
    size = int(np.unique(work.keys[ids], return_counts=True)[1].max(initial=1))
    # Lower bound: every prompt is computed once and all ranks are equally busy. Smaller chunks compute prompts more
    # often, so the search stops once they cannot save much.
    ideal = work.cost(ids) / num_ranks
    best: list[list[Ids]] = []
    least = math.inf
    while True:
        ranks = _spread(_chunks(ids, work, size, budget), work, nodes, budget)
        cost = _time(ranks, work)
        if cost < least:
            best, least = ranks, cost
        # The fixed cost of micro-batches is not compared, because no split avoids it.
        if size == 1 or least - _MICRO_BATCH * len(best[0]) <= _GOOD_ENOUGH * ideal:
            return best
        size = (size + 1) // 2


def _time(ranks: list[list[Ids]], work: Workload) -> float:
    """Return the total time. Ranks synchronise at every micro-batch, so each micro-batch takes as long as on its
    slowest rank."""
    return sum(max(map(work.cost, turn)) + _MICRO_BATCH for turn in zip(*ranks, strict=True))


class _Chunk(NamedTuple):
    """Samples with one key that stay together. tokens, cost and rows include the prompt and images that another
    chunk with this key can share; the prompt_* and image_* fields hold these parts separately."""

    ids: list[int]
    key: int
    tokens: int
    cost: float
    prompt_tokens: int
    prompt_cost: float
    rows: int
    image_rows: int
    image_cost: float
    node: int


def _chunks(ids: Ids, work: Workload, size: int, budget: PassBudget) -> list[_Chunk]:
    """Return chunks of up to ``size`` samples within the budget, costliest first."""
    size = min(size, budget.max_samples or size)
    none = np.zeros(len(work.prompts), dtype=np.int64)
    nodes = none if work.nodes is None else work.nodes
    # Neighbours with the same key, sorted by node, become a chunk. The stable sort makes the layout deterministic.
    ids = ids[np.lexsort((nodes[ids], work.keys[ids]))]
    columns: list[NDArray[Any]] = [
        work.keys, work.owners, work.answers, work.prompts, work.answer_cost, work.prompt_cost,
        *(none if of_images is None else of_images for of_images in (work.image_rows, work.image_cost, work.own_rows)),
        nodes,
    ]  # fmt: skip
    chunks: list[_Chunk] = []
    for sample, *numbers in zip(ids.tolist(), *(column[ids].tolist() for column in columns), strict=True):
        key, owner, answer, prompt, answer_cost, prompt_cost, image_rows, image_cost, own_rows, node = numbers
        last = chunks[-1] if chunks else None
        # A response that is too long to share its prompt's tokens adds these tokens, even if it shares the images.
        shares = key == owner
        if last is not None and key == last.key and len(last.ids) < size:
            pays = not (shares and last.prompt_tokens)
            tokens, rows = last.tokens + answer + pays * prompt, last.rows + own_rows
            # If the images of one prompt exceed the budget, smaller chunks do not help.
            fits = rows <= (budget.max_rows or math.inf) or rows == image_rows
            if fits and tokens <= (budget.max_tokens or math.inf):
                last.ids.append(sample)
                cost = last.cost + answer_cost + pays * prompt_cost
                chunks[-1] = last._replace(tokens=tokens, cost=cost, rows=rows)
                if shares:
                    chunks[-1] = chunks[-1]._replace(prompt_tokens=prompt, prompt_cost=prompt_cost)
                continue
        whole = prompt_cost + answer_cost + image_cost
        shared = shares * prompt, shares * prompt_cost
        rows = image_rows + own_rows
        numbers = [prompt + answer, whole, *shared, rows, image_rows, image_cost, node]
        chunks.append(_Chunk([sample], key, *numbers))
    if work.nodes is not None:
        # A chunk prefers the node that stores most of its tokens.
        most = [int(np.bincount(nodes[chunk.ids], work.answers[chunk.ids]).argmax()) for chunk in chunks]
        chunks = [chunk._replace(node=node) for chunk, node in zip(chunks, most, strict=True)]
    # The greedy rule of `_fill` needs the costliest chunks first; the small ones then even out the differences.
    return sorted(chunks, key=lambda chunk: -chunk.cost)


def _spread(chunks: list[_Chunk], work: Workload, nodes: Sequence[int], budget: PassBudget) -> list[list[Ids]]:
    together = np.array([sample for chunk in chunks for sample in chunk.ids], dtype=np.int64)
    num_ranks = len(nodes)
    # Fewer bins cannot hold the tokens (shared prompts counted once), so the search starts here.
    least = math.ceil(work.tokens(together) / (num_ranks * budget.max_tokens)) if budget.max_tokens else 1
    least = max(least, math.ceil(len(together) / (num_ranks * budget.max_samples))) if budget.max_samples else least
    bins = _fewest(chunks, max(1, least), nodes, budget)
    # Sort by cost, so that bins of similar cost run at the same time, because ranks synchronise at every micro-batch.
    # Ties are broken by the first id, so that the order is deterministic.
    bins.sort(key=lambda placed: (-work.cost(placed[1]), placed[1][0] if len(placed[1]) else -1))
    ranks: list[list[Ids]] = [[] for _ in nodes]
    for turn in range(len(bins) // num_ranks):
        # Alternate the direction, so that the costliest bins do not all go to the same rank.
        free_ranks = list(range(num_ranks)) if turn % 2 == 0 else list(range(num_ranks))[::-1]
        row, unplaced = bins[turn * num_ranks : (turn + 1) * num_ranks], []
        for node, ids in row:
            # Prefer a rank on the bin's node. A bin takes the same time on any rank.
            near = next((rank for rank in free_ranks if nodes[rank] == node), None)
            if near is None:
                unplaced.append(ids)
            else:
                ranks[near].append(ids)
                free_ranks.remove(near)
        for rank, ids in zip(free_ranks, unplaced, strict=True):
            ranks[rank].append(ids)
    return ranks


def _fewest(chunks: list[_Chunk], count: int, nodes: Sequence[int], budget: PassBudget) -> list[tuple[int, Ids]]:
    """Fill as few bins per rank as possible (at least ``count``), by doubling strides and then bisection."""
    too_few, stride = count - 1, 1
    # This terminates, because with as many bins as chunks every chunk finds an empty bin, which accepts any chunk.
    while (filled := _fill(chunks, count, nodes, budget)) is None:
        too_few, count, stride = count, count + stride, 2 * stride
    while count - too_few > 1:
        middle = (too_few + count) // 2
        if (fewer := _fill(chunks, middle, nodes, budget)) is None:
            too_few = middle
        else:
            count, filled = middle, fewer
    return filled


class _Bin:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.cost = 0.0
        self._tokens = self._rows = 0
        # First set: keys whose prompt is already in the bin. Second set: keys whose images are already in the bin.
        self._prompts: set[int] = set()
        self._images: set[int] = set()

    def add_if_room(self, chunk: _Chunk, budget: PassBudget) -> bool:
        """Add the chunk if it fits and return True. A sample that exceeds the budget by itself gets a separate bin."""
        has_prompt, has_images = chunk.key in self._prompts, chunk.key in self._images
        tokens = chunk.tokens - has_prompt * chunk.prompt_tokens
        rows = chunk.rows - has_images * chunk.image_rows
        crowded = budget.max_samples is not None and len(self.ids) + len(chunk.ids) > budget.max_samples
        heavy = budget.max_tokens is not None and self._tokens + tokens > budget.max_tokens
        heavy = heavy or (budget.max_rows is not None and self._rows + rows > budget.max_rows)
        # An empty bin accepts any chunk: a sample over the budget must be computed somewhere.
        if self.ids and (crowded or heavy):
            return False
        self.ids += chunk.ids
        self._tokens += tokens
        self._rows += rows
        self.cost += chunk.cost - has_prompt * chunk.prompt_cost - has_images * chunk.image_cost
        if chunk.prompt_tokens:
            self._prompts.add(chunk.key)
        if chunk.image_rows:
            self._images.add(chunk.key)
        return True


def _fill(chunks: list[_Chunk], count: int, nodes: Sequence[int], budget: PassBudget) -> list[tuple[int, Ids]] | None:
    """Fill ``count`` bins per rank, each with its node: costliest first, into the emptiest bin that fits (Graham 1969).

    A chunk is put into a bin of its node if this does not exceed an even share. Returns None if a chunk fits nowhere.
    """
    bins = {node: [_Bin() for _ in range(count * list(nodes).count(node))] for node in dict.fromkeys(nodes)}
    heaps = {node: [(0.0, number) for number in range(len(of_node))] for node, of_node in bins.items()}
    even = sum(chunk.cost for chunk in chunks) / (count * len(nodes))
    for chunk in chunks:
        heap = heaps.get(chunk.node)
        if heap and heap[0][0] + chunk.cost <= even and _place(chunk, bins[chunk.node], heap, budget):
            continue
        # Among equally empty bins, bins on the chunk's node are tried first. A bin with the maximum number of samples
        # is not tried again, so a node may have no bins left.
        order = sorted((heaps[node][0][0], node != chunk.node, node) for node in heaps if heaps[node])
        if not any(_place(chunk, bins[node], heaps[node], budget) for *_, node in order):
            return None
    return [(node, np.array(sorted(bin_.ids), dtype=np.int64)) for node, of_node in bins.items() for bin_ in of_node]


def _place(chunk: _Chunk, bins: list[_Bin], heap: list[tuple[float, int]], budget: PassBudget) -> bool:
    """Add the chunk to the emptiest of the first few bins that fits; return success. heap: costs and bin numbers."""
    refused: list[tuple[float, int]] = []
    placed = False
    while heap and not placed and len(refused) < _TRIES:
        entry = heapq.heappop(heap)
        chosen = bins[entry[1]]
        placed = chosen.add_if_room(chunk, budget)
        if not placed:
            refused.append(entry)
        elif budget.max_samples is None or len(chosen.ids) < budget.max_samples:
            heapq.heappush(heap, (chosen.cost, entry[1]))
    for entry in refused:
        heapq.heappush(heap, entry)
    return placed


def rank_tokens(layout: Layout, lengths: NDArray[np.int64]) -> list[int]:
    """Return the tokens of each rank."""
    return [int(lengths[ids].sum()) for ids in layout.ids]


@dataclass(frozen=True)
class LayoutCost:
    """Cost of a layout and balance of its ranks."""

    cost: float
    tokens: float
    """cost and tokens: sums over all micro-batches. A shared prompt counts once."""
    tokens_share: float
    """Computed tokens per token of the samples."""
    ranks: float
    """Work of the busiest rank relative to the mean (1: even)."""
    micro_batches: float
    """Like ``ranks``, if ranks synchronise at every micro-batch."""
    images_share: float | None = None
    """Encoded patches divided by the patches of all samples (1/n: once per prompt with n responses). None without
    images."""
    repeated_cost: float = 0.0
    repeated_tokens: float = 0.0
    """repeated_cost and repeated_tokens: cost and tokens if no prompts and images were shared."""

    def metrics(self) -> dict[str, float]:
        """Return ``perf/balance/*``."""
        fields = {name: value for name, value in asdict(self).items() if not name.startswith("repeated")}
        return {f"perf/balance/{name}": value for name, value in fields.items() if value is not None}


def cost_of(layout: Layout, work: Workload) -> LayoutCost:
    """Sum up the micro-batches of all ranks."""
    ranks = [layout.micro_batches(rank) for rank in range(len(layout.ids))]
    costs = np.array([[work.cost(micro) for micro in micros] for micros in ranks])
    computed = sum(work.tokens(micro) for micros in ranks for micro in micros)
    total = sum(int((work.prompts + work.answers)[ids].sum()) for ids in layout.ids)
    rows = [values for values in (work.image_rows, work.own_rows) if values is not None]
    of_samples = sum(int(values[ids].sum()) for values in rows for ids in layout.ids)
    encoded = sum(work.rows(micro) for micros in ranks for micro in micros) if of_samples else 0
    alone = work.prompt_cost + work.answer_cost + (0 if work.image_cost is None else work.image_cost)
    # If all samples have zero advantage, nothing is computed and the mean cost is 0.
    mean = max(float(costs.sum(1).mean()), 1e-9)
    return LayoutCost(
        cost=float(costs.sum()),
        tokens=float(computed),
        tokens_share=computed / max(total, 1),
        ranks=float(costs.sum(1).max()) / mean,
        micro_batches=float(costs.max(0).sum()) / mean,
        images_share=encoded / of_samples if of_samples else None,
        repeated_cost=sum(float(alone[ids].sum()) for ids in layout.ids),
        repeated_tokens=float(total),
    )
