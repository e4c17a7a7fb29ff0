"""Ring attention (Liu et al. 2023, arXiv 2310.01889): ranks that share a packed row pass its keys and values around.

Ulysses (`models.attention.ulysses`) trades tokens for heads, so its size must divide the number of heads. Here every
rank keeps the queries of its slice and gets the keys and values of the other slices one after another. The results of
the slices are merged by the logarithm of their softmax sums, in float32 or float64, and the backward pass sends the
slices round once more, with their gradients. Both can be combined: Ulysses within neighbouring ranks, the ring over
their groups.

Slices are contiguous, so in a row of one long sequence the last rank has up to twice the mean number of (query, key)
pairs. In rows of many samples the ranks have similar numbers. CUDA's flash kernels compute the products of a slice (not
run on hardware); on other devices, and for soft caps and windows that reach into another slice, scores are computed
explicitly in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rltrain.common.device import COLLECTIVE_TIMEOUT, send
from rltrain.models.attention.packing import AttentionPlan
from rltrain.models.attention.scores import Kind, capped, tempered
from rltrain.models.attention.varlen import flash_operators

RING = "rltrain_ring"
# Maximum number of scores that are computed at once if no kernel is used.
_SCORES = 1 << 25


class Ring(NamedTuple):
    """Groups of the ranks that share a sequence."""

    heads: ProcessGroup | None
    """Neighbours that exchange tokens for heads (Ulysses), or None."""
    around: ProcessGroup
    """Ranks with the same heads, in the order of their slices."""


@cache
def ring_of(world: ProcessGroup, heads: int, size: int) -> Ring:
    """Return the groups of this rank for Ulysses over ``heads`` ranks and rings of ``size``. A collective."""
    neighbours = dist.new_subgroups(heads, world, COLLECTIVE_TIMEOUT)[0] if heads > 1 else None
    rings = torch.arange(world.size()).view(-1, size, heads).transpose(1, 2).flatten(0, 1).tolist()
    return Ring(neighbours, dist.new_subgroups_by_enumeration(rings, COLLECTIVE_TIMEOUT)[0])


class Part(NamedTuple):
    """Queries of one segment in a slice of the row, and the keys in another slice that they may see."""

    queries: slice
    keys: tuple[slice, ...]
    """Keys of the segment's prefix, and of the segment, in consecutive positions of a sample."""
    before: int
    """Position of the first query minus that of the first key."""

    @property
    def num_keys(self) -> int:
        return sum(keys.stop - keys.start for keys in self.keys)


def parts_of(plan: AttentionPlan, length: int, queries: int, keys: int) -> tuple[Part, ...]:
    """Return the queries of each segment in slice number ``queries``, with the keys that they see in slice number
    ``keys``.

    Slices have ``length`` tokens. A segment without such queries or keys has no part.
    """

    def within(start: int, stop: int, number: int) -> slice:
        first = min(max(start - number * length, 0), length)
        return slice(first, max(first, min(stop - number * length, length)))

    parts = []
    for segment in plan.segments:
        here = within(segment.start, segment.stop, queries)
        prefix, own = within(*segment.prefix, keys), within(segment.start, queries * length + here.stop, keys)
        seen = tuple(each for each in (prefix, own) if each.start < each.stop)
        if here.start < here.stop and seen:
            # Positions count as if the prefix were directly before the segment (no gap between both).
            shift = segment.start - segment.prefix[1] if seen[0] is prefix else 0
            parts.append(Part(here, seen, here.start + (queries - keys) * length - seen[0].start - shift))
    return tuple(parts)


def ring_attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, kind: Kind, group: ProcessGroup
) -> Tensor:
    """Compute attention of this rank's slice of the row that ``plan`` covers, with the keys of all slices of ``group``.

    query [1, heads, tokens / ranks, d]; key, value [1, kv heads, tokens / ranks, d]. Returns [1, tokens / ranks, heads,
    d].
    """
    length = query.shape[2]
    query = tempered(module, query, lambda device: plan.places(device)[group.rank() * length :][:length])
    plan = plan if kind.chunk is None else plan.chunked(kind.chunk)
    if kind.window is not None and kind.window >= max(plan.key_lengths):
        kind = kind._replace(window=None)
    rows, width = [tensor[0].transpose(0, 1) for tensor in (query, key, value)], value.shape[-1]
    if flash_operators(query, kind):
        # The kernel has one head size, but the values of multi-head latent attention are narrower.
        rows[2] = nn.functional.pad(rows[2], (0, query.shape[-1] - width))
    output: Tensor = _Ring.apply(*rows, kind.sinks, plan, kind, group)
    return output[None, ..., :width]


class _Ring(torch.autograd.Function):
    """Attention of rows [tokens, heads, d] with the keys of all ranks; each token sees at least itself.

    With the logarithm L of a token's softmax sum over all slices, P = exp(scores - L) are its weights, and the
    gradients of one slice are dV = P^T dO, dS = P (dO V^T - <dO, O>), as in flash attention (Dao et al. 2022). A sink s
    adds exp(s) to the sum (`varlen._Flash`).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, plan: AttentionPlan, kind: Kind,
        group: ProcessGroup,
    ) -> Tensor:  # fmt: skip
        ring = Rounds(query, plan, kind, group)
        output = total = torch.zeros(0)
        for number, keys, values in ring.rounds(torch.cat([key, value], -1), key.shape[-1]):
            if (found := ring.forward(query, keys, values, number)) is None:
                continue
            part, sums = found
            if number == 0:
                output, total = part, sums
                continue
            together = torch.logaddexp(total, sums)
            output = output * (total - together).exp()[..., None] + part * (sums - together).exp()[..., None]
            total = together
        if sinks is not None:
            together = torch.logaddexp(total, sinks.to(total.dtype))
            output, total = output * (total - together).exp()[..., None], together
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, total)
        ctx.ring = ring
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, total = ctx.saved_tensors
        ring, width = ctx.ring, key.shape[-1]
        gradient = gradients[0].contiguous()
        products = (gradient.to(total.dtype) * output.to(total.dtype)).sum(-1)
        of_query = torch.zeros(query.shape, dtype=total.dtype, device=query.device)
        # The gradients of a slice travel with it, and are back on its rank after the last round.
        of_keys = of_query.new_zeros(*key.shape[:2], width + value.shape[-1])
        for number, keys, values in ring.rounds(torch.cat([key, value], -1), width):
            saved = (gradient, output, total, products)
            ring.backward(query, keys, values, number, saved, of_query, of_keys[..., :width], of_keys[..., width:])
            of_keys, work = _passed_on(of_keys, ring.group)
            work.wait()
        of_sinks = None
        if sinks is not None:
            of_sinks = -((sinks.to(total.dtype) - total).exp() * products).sum(0).to(sinks.dtype)
        of_key, of_value = of_keys.split([width, value.shape[-1]], -1)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_sinks, None, None, None


class Rounds:
    """Rounds of the ring of one layer: transfers of slices, and products of this rank's queries with a slice."""

    def __init__(self, query: Tensor, plan: AttentionPlan, kind: Kind, group: ProcessGroup) -> None:
        self.group, self.kind, self._plan, self._length = group, kind, plan, len(query)
        self._scale = kind.scale(query.shape[-1])
        self._dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.operators: Any = flash_operators(query, kind)
        self._state: list[Tensor] = []

    def rounds(self, rows: Tensor, width: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (round n, keys, values), where keys and values are the slice of the rank n places before this one.

        rows: this rank's keys (the first ``width`` columns) and values. The next slice is transferred while the caller
        computes.
        """
        size = self.group.size()
        for number in range(size):
            arriving, work = _passed_on(rows, self.group) if number + 1 < size else (rows, None)
            yield number, rows[..., :width], rows[..., width:]
            if work is not None:
                work.wait()
            rows = arriving

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, number: int) -> tuple[Tensor, Tensor] | None:
        """Return outputs [tokens, heads, d] and logarithms of softmax sums [tokens, heads], or None if no key is
        visible."""
        if not (parts := self._parts(number)):
            return None
        output = query.new_zeros(*query.shape[:2], values.shape[-1], dtype=self._dtype)
        sums = output.new_full(query.shape[:2], -math.inf)
        if self._flashes(number):
            rows, where, lengths, options = self._call(number, query.device)
            part, total, *self._state, _ = self.operators[0](
                query[rows], keys[where], values[where], *lengths, 0.0, number == 0, return_debug_mask=False, **options
            )
            output[rows], sums[rows] = part.to(self._dtype), total.mT
            return output, sums
        for part in parts:
            value = self._gathered(values, part)
            for block, within, scores in self._scores(query, keys, part):
                total = scores.logsumexp(-1, keepdim=True)
                # A window may hide the whole slice. The softmax sum is then 0 and its logarithm -inf.
                weights = (scores - total.clamp(min=torch.finfo(self._dtype).min)).exp()
                output[block] = _by_token(weights @ value[:, None, within])
                sums[block] = _by_token(total)[..., 0]
        return output, sums

    def backward(
        self, query: Tensor, keys: Tensor, values: Tensor, number: int, saved: tuple[Tensor, ...],
        of_query: Tensor, of_keys: Tensor, of_values: Tensor,
    ) -> None:  # fmt: skip
        """Add the gradients of the slice to ``of_query``, ``of_keys`` and ``of_values``.

        saved: gradient of the output, the output, logarithms of softmax sums over all slices, and <dO, O>.
        """
        gradient, output, total, products = saved
        if (parts := self._parts(number)) and self._flashes(number):
            rows, where, lengths, options = self._call(number, query.device)
            found = self.operators[1](
                gradient[rows], query[rows], keys[where], values[where], output[rows], total[rows].mT.contiguous(),
                *lengths, 0.0, number == 0, *self._state, **options,
            )  # fmt: skip
            for sum_, index, part in zip((of_query, of_keys, of_values), (rows, where, where), found, strict=True):
                sum_.index_add_(0, index, part.to(self._dtype))
            return
        for part in parts:
            key, value = self._gathered(keys, part), self._gathered(values, part)
            of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
            for block, within, scores in self._scores(query, keys, part):
                asked, wanted, logs, sums = (
                    _by_head(each[block].to(self._dtype), len(key))
                    for each in (query, gradient, total[..., None], products[..., None])
                )
                weights = (scores - logs).exp()
                of_scores = weights * (wanted @ value[:, None, within].mT - sums) * self._scale
                if (cap := self.kind.softcap) is not None:
                    of_scores *= 1 - (scores.clamp(min=-cap) / cap).square()
                of_query[block] += _by_token(of_scores @ key[:, None, within])
                of_key[:, within] += of_scores.flatten(1, 2).mT @ asked.flatten(1, 2)
                of_value[:, within] += weights.flatten(1, 2).mT @ wanted.flatten(1, 2)
            sizes = [each.stop - each.start for each in part.keys]
            for here, of_k, of_v in zip(part.keys, of_key.split(sizes, 1), of_value.split(sizes, 1), strict=True):
                of_keys[here] += of_k.transpose(0, 1)
                of_values[here] += of_v.transpose(0, 1)

    def _parts(self, number: int) -> tuple[Part, ...]:
        rank = self.group.rank()
        known = "parts", self._length, rank, number
        if known not in self._plan.by_slice:
            parts = parts_of(self._plan, self._length, rank, rank - number) if number <= rank else ()
            self._plan.by_slice[known] = parts
        found: tuple[Part, ...] = self._plan.by_slice[known]
        return found

    def _gathered(self, rows: Tensor, part: Part) -> Tensor:
        """Return the keys or values of a part [kv heads, keys, d]."""
        return torch.cat([rows[each] for each in part.keys]).transpose(0, 1).to(self._dtype)

    def _scores(self, query: Tensor, keys: Tensor, part: Part) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield blocks of queries, the keys of the part that they see, and scores [kv heads, group, queries, keys]."""
        key, window = self._gathered(keys, part), self.kind.window
        num_queries, num_keys = part.queries.stop - part.queries.start, key.shape[1]
        size = max(1, _SCORES // (query.shape[1] * num_keys))
        for first in range(0, num_queries, size):
            last = min(first + size, num_queries)
            low = 0 if window is None else max(0, part.before + first + 1 - window)
            high = min(num_keys, part.before + last)
            if low >= high:
                continue
            rows = slice(part.queries.start + first, part.queries.start + last)
            scores = _by_head(query[rows].to(self._dtype), len(key)) @ key[:, None, low:high].mT
            scores = capped(scores * self._scale, self.kind.softcap)
            apart = torch.arange(first, last, device=query.device)[:, None] + part.before
            apart = apart - torch.arange(low, high, device=query.device)
            hidden = apart < 0 if window is None else (apart < 0) | (apart >= window)
            yield rows, slice(low, high), scores.masked_fill(hidden, -math.inf)

    def _flashes(self, number: int) -> bool:
        # A kernel aligns its window with the last key. This is the position of the last query only if the keys are this
        # rank's slice.
        return self.operators is not None and (number == 0 or self.kind.window is None)

    def _call(self, number: int, device: torch.device) -> tuple[Tensor, Tensor, tuple[Any, ...], dict[str, Any]]:
        """Return rows of queries and keys of all parts, their lengths as a flash kernel takes them, and its options."""
        known = "call", self._length, self.group.rank(), number, device
        if known not in self._plan.by_slice:
            parts = self._parts(number)
            rows = torch.cat([torch.arange(part.queries.start, part.queries.stop) for part in parts])
            where = torch.cat([torch.arange(each.start, each.stop) for part in parts for each in part.keys])
            sizes = ([part.queries.stop - part.queries.start for part in parts], [part.num_keys for part in parts])
            starts = [torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in sizes]
            found = [send(each, device) for each in (rows, where, *starts)]
            self._plan.by_slice[known] = *found[:2], (*found[2:], max(sizes[0]), max(sizes[1]))
        left = -1 if self.kind.window is None else self.kind.window - 1
        options = {"scale": self._scale, "window_size_left": left, "window_size_right": 0 if number == 0 else -1}
        return *self._plan.by_slice[known], options


def _by_head(rows: Tensor, kv_heads: int) -> Tensor:
    """Map [tokens, heads, d] to [kv heads, group, tokens, d]."""
    return rows.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _by_token(rows: Tensor) -> Tensor:
    """Invert `_by_head`."""
    return rows.permute(2, 0, 1, 3).flatten(1, 2)


def _passed_on(rows: Tensor, group: ProcessGroup) -> tuple[Tensor, Any]:
    """Send ``rows`` to the next rank of the ring. Returns the rows of the previous one, and the work to wait for."""
    size, rank = group.size(), group.rank()
    # The transfer is an all-to-all, because every backend supports it for any group.
    sent, received = ([len(rows) * (other == (rank + step) % size) for other in range(size)] for step in (1, -1))
    arriving, rows = torch.empty_like(rows), rows.contiguous()
    return arriving, dist.all_to_all_single(arriving, rows, received, sent, group=group, async_op=True)
