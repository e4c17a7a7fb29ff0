"""KV cache of the embedded engine: a prompt is stored once for all its responses, which decode in lockstep.

A cache padded per row would copy the prompt per response; a paged cache needs a kernel per device. Here every step
writes one column for all rows, and a row uses the columns written since it was added. So a new token is one plain copy,
and while all rows have equal age only unwritten columns are masked. Columns are held in blocks of fixed width, and a
product reads whole blocks: on a CPU contiguous memory is two to four times faster than slices of a wider buffer. A
block is allocated when its first column is written, and freed when no running row is old enough to use it.

Attention combines two groups of products under one softmax: with the prompts, where all responses to a prompt are
queries of one product, and with the responses' columns. Grouped-query attention and sliding windows fit the same form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rltrain.models.attention.recurrent import State
from rltrain.models.attention.scores import Kind, capped, masked, weights
from rltrain.workers.rollout.embedded.kv_offload import OffloadedRow
from rltrain.workers.rollout.embedded.state import RowStates

Ints = NDArray[np.int64]
# (layer, call): some layers call attention more than once per forward pass.
Call = tuple[int, int]
# Maximum memory of `KeyValues` relative to its rows at full length: it grows in steps, and keeps rows of ended
# responses for some time.
ROOM = 1.3
# Prompt width grows in steps of this many tokens, because each change copies the existing prompts.
_PROMPT_STEP = 32
# Queries of a long prompt's chunk are masked in parts of this size.
_QUERIES = 512


class PromptChunk(NamedTuple):
    """Tokens ``start`` to ``stop`` of the prompt at ``place``."""

    place: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class Pair(NamedTuple):
    """keys [n, kv heads, columns, d] and values [n, kv heads, columns, d']."""

    keys: Tensor
    values: Tensor


@dataclass
class _Layer:
    """Keys and values of one layer."""

    prompts: Pair
    """[places, kv heads, width, d]."""
    blocks: list[Pair] = field(default_factory=list)
    """[rows, kv heads, block, d] each."""


class KeyValues:
    """Cache of one generation, for any number of layers; shapes follow from the first prompt.

    Rows are numbered from 0; `add` appends some, `drop_dead_rows` drops some and renumbers. block: columns per block.
    """

    def __init__(self, device: torch.device, block: int) -> None:
        self._device = device
        self._block = block
        self._layers: dict[Call, _Layer] = {}
        self._calls: Counter[int] = Counter()
        self._states = RowStates()
        self._prompt_lengths: Ints = np.zeros(0, dtype=np.int64)
        self._width = 0
        self._place_of_row: Ints = np.zeros(0, dtype=np.int64)
        self._born: Ints = np.zeros(0, dtype=np.int64)
        self._column = -1
        self._first_column = 0
        self._chunks: Sequence[PromptChunk] = ()
        self._padded_rows: _PaddedRows | None = None
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}

    @property
    def num_rows(self) -> int:
        return len(self._born)

    @property
    def num_layers(self) -> int:
        """Number of layers with stored data."""
        return len({layer for layer, _ in self._layers}) + self._states.num_layers

    @property
    def num_bytes(self) -> int:
        """Memory of all rows in bytes."""
        pairs = (pair for layer in self._layers.values() for pair in (layer.prompts, *layer.blocks))
        return self._states.num_bytes + sum(tensor.nbytes for pair in pairs for tensor in pair)

    def call_of(self, layer: int) -> Call:
        """Count an attention call of ``layer`` and return its cache key: some layers make several calls per forward
        pass, with different keys."""
        self._calls[layer] += 1
        return layer, self._calls[layer]

    def add(
        self, prompt_lengths: Sequence[int], num_rows: Sequence[int], kept: Sequence[OffloadedRow | None] = ()
    ) -> range:
        """Append new prompts and the rows of their responses. Returns the prompts' places.

        kept: cached prefix of each prompt (default: none).
        """
        places = range(len(self._prompt_lengths), len(self._prompt_lengths) + len(prompt_lengths))
        self._prompt_lengths = np.concatenate([self._prompt_lengths, prompt_lengths])
        self._place_of_row = np.concatenate([self._place_of_row, np.repeat(np.asarray(places), num_rows)])
        # The first column of a new row is the next one to be written.
        self._born = np.concatenate([self._born, np.full(sum(num_rows), self._column + 1)])
        self._width = max(self._width, -(-max(prompt_lengths) // _PROMPT_STEP) * _PROMPT_STEP)
        for layer in self._layers.values():
            layer.prompts = _enlarged(layer.prompts, places.stop, self._width)
            layer.blocks = [_enlarged(block, self.num_rows, self._block) for block in layer.blocks]
        self._padded_rows = None
        self._states.add(places, num_rows)
        for place, row in zip(places, kept, strict=bool(kept)):
            if row:
                self._put(place, row)
        return places

    def _put(self, place: int, row: OffloadedRow) -> None:
        for call, pair in row.pairs.items():
            for whole, part in zip(self._layers[call].prompts, pair, strict=True):
                whole[place, :, : row.length] = part
        for layer, state in row.states.items():
            self._states.keep_prompts(layer, [place], state)

    def copy_of(self, row: int) -> OffloadedRow:
        """Return a copy of a row's cache."""
        place, born = int(self._place_of_row[row]), int(self._born[row])
        prompt_length = int(self._prompt_lengths[place])
        pairs = {}
        for call, layer in self._layers.items():
            parts = [[whole[place, :, :prompt_length]] for whole in layer.prompts]
            for number, block in enumerate(layer.blocks):
                first = self._first_column + number * self._block
                for of_row, whole in zip(parts, block, strict=True):
                    of_row.append(whole[row, :, max(0, born - first) : max(0, self._column + 1 - first)])
            keys, values = (torch.cat(of_row, 1) for of_row in parts)
            pairs[call] = keys, values
        return OffloadedRow(prompt_length + self._column + 1 - born, pairs, self._states.of_row(row))

    def drop_dead_rows(self, alive: NDArray[np.bool_]) -> Ints:
        """Drop rows that are not alive, and prompts without rows.

        Returns the old number of each remaining row.
        """
        rows = _without_holes(alive)
        self._states.enter()
        self._states.select_rows(torch.from_numpy(rows))
        answered = np.zeros(len(self._prompt_lengths), dtype=bool)
        answered[self._place_of_row[rows]] = True
        places = _without_holes(answered)
        for layer in self._layers.values():
            _move([layer.prompts], places)
            _move(layer.blocks, rows)
        number = np.zeros(len(answered), dtype=np.int64)
        number[places] = np.arange(len(places))
        self._prompt_lengths = self._prompt_lengths[places]
        self._place_of_row = number[self._place_of_row[rows]]
        self._born = self._born[rows]
        self._padded_rows = None
        return rows

    def begin_prefill(self, chunks: Sequence[PromptChunk]) -> None:
        """Announce that the next forward pass computes these chunks, packed."""
        self._chunks = chunks
        self._calls.clear()

    def begin_step(self) -> None:
        """Announce that the next forward pass computes one token per row."""
        self._chunks = ()
        self._calls.clear()
        self._states.enter()
        self._column += 1
        self._masks = {}
        # A row attends only to columns written since it was added, so older blocks are unused.
        while self._first_column + self._block <= self._born.min():
            self._first_column += self._block
            for layer in self._layers.values():
                del layer.blocks[:1]
        if self._padded_rows is None:
            self._padded_rows = _PaddedRows.of(self._place_of_row, self._prompt_lengths, self._born, self._device)

    @property
    def is_prefill(self) -> bool:
        return bool(self._chunks)

    def store(self, layer: Call, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [1, kv heads, tokens, d] of the announced chunks."""
        if layer not in self._layers:
            places = len(self._prompt_lengths)
            empty = (new.new_zeros(places, new.shape[1], self._width, new.shape[3]) for new in (keys, values))
            self._layers[layer] = _Layer(Pair(*empty))
        prompts = self._layers[layer].prompts
        lengths = [chunk.length for chunk in self._chunks]
        for whole, new in zip(prompts, (keys, values), strict=True):
            for chunk, part in zip(self._chunks, new[0].split(lengths, 1), strict=True):
                whole[chunk.place, :, chunk.start : chunk.stop] = part

    @property
    def continues(self) -> bool:
        """True if any announced chunk continues a cached prefix."""
        return any(chunk.start for chunk in self._chunks)

    def state_before(self, layer: int) -> State | None:
        """Return a recurrent layer's initial states of the rows or announced chunks; None if every chunk starts its
        prompt."""
        if not self.is_prefill:
            return self._states.of_rows(layer)
        if not self.continues:
            return None
        return self._states.of_prompts(layer, [chunk.place if chunk.start else None for chunk in self._chunks])

    def keep_state(self, layer: int, state: State) -> None:
        """Store the final states of a recurrent layer."""
        if self.is_prefill:
            self._states.keep_prompts(layer, [chunk.place for chunk in self._chunks], state)
        else:
            self._states.keep_rows(layer, state)

    def places(self, device: torch.device) -> Tensor:
        """Return the positions of this forward pass's tokens in their samples [tokens] or [rows]."""
        if self.is_prefill:
            return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in self._chunks]).to(device)
        assert self._padded_rows is not None
        return self._padded_rows.prompt_lengths + self._column - self._padded_rows.born

    def prefill_rest(self, layer: Call, query: Tensor, kind: Kind) -> Tensor:
        """Compute attention of prompt chunks. A token attends to its prompt up to and including itself.

        query [1, heads, n, d] -> [1, n, heads, d'].
        """
        queries = query.split([chunk.length for chunk in self._chunks], 2)
        outputs = [self._rest(layer, *part, kind) for part in zip(self._chunks, queries, strict=True)]
        # The result must be contiguous, because some models call view on it.
        return torch.cat(outputs, 2).transpose(1, 2).contiguous()

    def _rest(self, layer: Call, chunk: PromptChunk, query: Tensor, kind: Kind) -> Tensor:
        """Compute attention of one chunk: query [1, heads, n, d] -> [1, heads, n, d']."""
        keys, values = (part[chunk.place : chunk.place + 1, :, : chunk.stop] for part in self._layers[layer].prompts)
        everywhere = torch.arange(chunk.stop, device=query.device)
        grouped = query.unflatten(1, (keys.shape[1], -1)).transpose(2, 3)
        parts = []
        for first in range(0, chunk.length, _QUERIES):
            queries = grouped[:, :, first : first + _QUERIES]
            places = chunk.start + first + torch.arange(queries.shape[2], device=query.device)[:, None]
            hidden, reach = everywhere > places, kind.reach(places)
            if reach is not None:
                hidden |= everywhere <= places - reach
            mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, -torch.inf)
            mask = mask.repeat_interleave(queries.shape[3], 0)
            parts.append(masked(queries.flatten(2, 3), keys, values, mask, kind).unflatten(2, queries.shape[2:4]))
        return torch.cat(parts, 2).transpose(2, 3).flatten(1, 2)

    def decode(self, layer: Call, query: Tensor, key: Tensor, value: Tensor, kind: Kind) -> Tensor:
        """Decode a step: query [rows, heads, 1, d]; key, value [rows, kv heads, 1, d] -> [rows, 1, heads, d']."""
        assert self._padded_rows is not None
        rows, kv_heads = key.shape[:2]
        cache = self._layers[layer]
        number, column = divmod(self._column - self._first_column, self._block)
        if number == len(cache.blocks):
            cache.blocks.append(
                # Initialise with zeros: a masked column has weight 0 in the product, but 0 times a NaN in unwritten
                # memory is NaN.
                Pair(*(new.new_zeros(rows, kv_heads, self._block, new.shape[3]) for new in (key, value)))
            )
        for whole, new in zip(cache.blocks[-1], (key, value), strict=True):
            whole[:rows, :, column] = new[:, :, 0]
        queries = (query * kind.scale(query.shape[3])).reshape(rows, kv_heads, -1, query.shape[3])
        prompts = Pair(*(part[: len(self._prompt_lengths)] for part in cache.prompts))
        blocks = [Pair(*(part[:rows] for part in block)) for block in cache.blocks]
        # Products with the prompt's and the row's columns are concatenated, because they share one softmax.
        products = [self._padded_rows.to_rows(self._padded_rows.to_prompts(queries) @ prompts.keys.mT)]
        products += [queries @ block.keys.mT for block in blocks]
        scores = capped(torch.cat(products, -1), kind.softcap).add_(self._mask(kind, key.dtype))
        of_prompt, *of_blocks = weights(scores, kind.sinks).split([self._width] + [self._block] * len(blocks), -1)
        output = self._padded_rows.to_rows(self._padded_rows.to_prompts(of_prompt) @ prompts.values)
        for share, block in zip(of_blocks, blocks, strict=True):
            output += share @ block.values
        return output.reshape(rows, 1, -1, value.shape[3])

    def _mask(self, kind: Kind, dtype: torch.dtype) -> Tensor:
        """Return the mask [rows, 1, 1, columns]: 0 where a row attends to a column, else -inf. The prompt's columns are
        first."""
        # The mask is built once per step and used by all layers with the same window.
        name = kind.window, kind.chunk
        if name not in self._masks:
            assert self._padded_rows is not None
            lengths, born = self._padded_rows.prompt_lengths[:, None], self._padded_rows.born[:, None]
            prompt = torch.arange(self._width, device=self._device)
            num_blocks = (self._column - self._first_column) // self._block + 1
            own = torch.arange(self._first_column, self._first_column + num_blocks * self._block, device=self._device)
            in_prompt, in_own = prompt >= lengths, (own < born) | (own > self._column)
            places = lengths + self._column - born
            if (reach := kind.reach(places)) is not None:
                in_prompt |= prompt <= places - reach
                in_own |= own <= self._column - reach
            hidden = torch.cat([in_prompt, in_own], 1)[:, None, None]
            self._masks[name] = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
        return self._masks[name]


@dataclass(frozen=True)
class _PaddedRows:
    """Rows padded per prompt: every prompt has as many slots as the prompt with the most rows."""

    num_prompts: int
    rows: Tensor
    """[prompts * slots]: row of each slot (an arbitrary row for an empty slot). slots, prompt_lengths, born: [rows]."""
    slots: Tensor
    prompt_lengths: Tensor
    born: Tensor

    @classmethod
    def of(cls, place_of_row: Ints, prompt_lengths: Ints, born: Ints, device: torch.device) -> _PaddedRows:
        order = np.argsort(place_of_row, kind="stable")
        counts = np.bincount(place_of_row, minlength=len(prompt_lengths))
        first = np.cumsum(counts) - counts
        slots = np.empty_like(order)
        slots[order] = np.arange(len(order)) - first[place_of_row[order]] + place_of_row[order] * counts.max()
        rows = np.zeros(len(prompt_lengths) * counts.max(), dtype=np.int64)
        rows[slots] = np.arange(len(order))
        tensors = (torch.from_numpy(array).to(device) for array in (rows, slots, prompt_lengths[place_of_row], born))
        return cls(len(prompt_lengths), *tensors)

    def to_prompts(self, rows: Tensor) -> Tensor:
        """Rearrange [rows, kv heads, g, d] -> [prompts, kv heads, slots * g, d]."""
        padded = rows[self.rows].unflatten(0, (self.num_prompts, -1)).transpose(1, 2)
        return padded.reshape(*padded.shape[:2], -1, rows.shape[-1])

    def to_rows(self, padded: Tensor) -> Tensor:
        """Invert `to_prompts`: [prompts, kv heads, slots * g, d] -> [rows, kv heads, g, d]."""
        num_slots = len(self.rows) // self.num_prompts
        return padded.unflatten(2, (num_slots, -1)).transpose(1, 2).flatten(0, 1)[self.slots]


def _without_holes(alive: NDArray[np.bool_]) -> Ints:
    """Return the numbers of alive rows; the last ones fill the gaps of the dropped ones."""
    count = int(alive.sum())
    order = np.arange(count)
    order[~alive[:count]] = count + np.flatnonzero(alive[count:])
    return order


def _move(pairs: Sequence[Pair], order: Ints) -> None:
    targets = np.flatnonzero(order != np.arange(len(order)))
    if not len(targets):
        return
    for tensor in (tensor for pair in pairs for tensor in pair):
        to, of = (torch.from_numpy(rows).to(tensor.device) for rows in (targets, order[targets]))
        tensor[to] = tensor[of]


def _enlarged(pair: Pair, count: int, width: int) -> Pair:
    """Return a pair with the same content and room for at least ``count`` times ``width``."""
    have, _, columns, _ = pair.keys.shape
    if have >= count and columns >= width:
        return pair
    # Allocate a quarter more, so that not every added prompt requires a copy.
    count = have if have >= count else max(count, have + have // 4)
    larger = Pair(*(tensor.new_zeros(count, tensor.shape[1], max(columns, width), tensor.shape[3]) for tensor in pair))
    for new, old in zip(larger, pair, strict=True):
        new[:have, :, :columns] = old
    return larger
