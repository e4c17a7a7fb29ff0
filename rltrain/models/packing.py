"""Samples one behind the other in one row: who sees whom, where each answer is predicted, and which answers share a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rltrain import columns as c
from rltrain.batch import Batch


class Segment(NamedTuple):
    """Queries [start, stop): they see the keys of ``prefix`` (the range of an earlier segment) and, causally, those of their own."""

    start: int
    stop: int
    prefix: tuple[int, int] = (0, 0)

    @property
    def prefix_length(self) -> int:
        return self.prefix[1] - self.prefix[0]


@dataclass(frozen=True)
class AttentionPlan:
    """Who sees whom in one packed row, in host integers. The segments follow one another and cover all tokens."""

    segments: tuple[Segment, ...]

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> AttentionPlan:
        """Segments that see themselves alone."""
        ends = list(accumulate(lengths))
        return cls(tuple(Segment(end - length, end) for end, length in zip(ends, lengths, strict=True)))

    @property
    def num_tokens(self) -> int:
        return self.segments[-1].stop

    def padded_to(self, num_tokens: int) -> AttentionPlan:
        """With one more segment, where tokens are missing to that number."""
        end = self.num_tokens
        return self if end == num_tokens else AttentionPlan((*self.segments, Segment(end, num_tokens)))

    @cached_property
    def query_lengths(self) -> tuple[int, ...]:
        return tuple(segment.stop - segment.start for segment in self.segments)

    @cached_property
    def key_lengths(self) -> tuple[int, ...]:
        return tuple(segment.prefix_length + segment.stop - segment.start for segment in self.segments)

    @cached_property
    def query_ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.query_lengths))

    @cached_property
    def key_ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.key_lengths))

    @cached_property
    def has_prefixes(self) -> bool:
        return any(segment.prefix_length for segment in self.segments)

    @cached_property
    def on_device(self) -> _OnDevice:
        return _OnDevice(self)


class _OnDevice:
    """The plan's tensors, made once a device rather than once a layer."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan
        self._made: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Cumulative query lengths and key lengths [segments + 1] (int32); where the key rows of all segments lie [keys]."""
        if device not in self._made:
            plan = self._plan
            rows = [torch.arange(*part) for each in plan.segments for part in (each.prefix, (each.start, each.stop))]
            ends = (torch.tensor((0, *ends), dtype=torch.int32) for ends in (plan.query_ends, plan.key_ends))
            queries, keys, where = (each.to(device) for each in (*ends, torch.cat(rows)))
            self._made[device] = queries, keys, where
        return self._made[device]


@dataclass(frozen=True)
class PackedInputs:
    """One micro-batch as the model sees it.

    tokens, positions: [total]; plan: who sees whom (host integers). predictors, labels: [answer tokens], the place of the
    hidden state that predicts each answer token, and that token.
    """

    tokens: Tensor
    positions: Tensor
    plan: AttentionPlan
    predictors: Tensor
    labels: Tensor


def joins(prompt_length: Any, answer_length: Any) -> Any:
    """Whether an answer shares its prompt with the others: where the prompt is too short, the saving is not worth the gathering."""
    return 16 * prompt_length >= answer_length


def pack(batch: Batch, device: torch.device, *, share: bool = True) -> PackedInputs:
    """``tokens`` (prompt and answer, ragged), ``prompt_length`` -> packed inputs. An empty batch packs to one dummy token.

    With ``share``, consecutive samples with the same prompt share its tokens: the prompt once, then the answers that see it,
    positions going on from its end; the prompt's last state predicts the first token of each. The last token of an answer
    predicts nothing and is left out.
    """
    if not len(batch):
        one = torch.zeros(1, dtype=torch.long, device=device)
        return PackedInputs(one, one, AttentionPlan.of_lengths([1]), one[:0], one[:0])
    values, starts = batch.ragged(c.TOKENS).values, batch.ragged(c.TOKENS).offsets.tolist()
    prompts, answers = _lengths(batch)
    owners = _owners(batch) if share else list(range(len(batch)))
    num_sharing = Counter(owners)
    laid = _Laid()
    places: dict[int, tuple[int, int]] = {}
    predictors, labels = [], []
    for sample, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        start, own = starts[sample], max(answer - 1, 0)
        owner = owners[sample]
        if num_sharing[owner] == 1:
            end = laid.add(start, prompt + own) - own
            predictors.append(torch.arange(end - 1, end - 1 + answer))
        else:
            if owner not in places:
                end = laid.add(start, prompt)
                places[owner] = (end - prompt, end)
            prefix = places[owner]
            end = laid.add(start + prompt, own, prefix) if own else 0
            predictors.append(torch.cat([torch.tensor([prefix[1] - 1] * (answer > 0)), torch.arange(end - own, end)]))
        labels.append(values[start + prompt : start + prompt + answer])
    return PackedInputs(
        tokens=values[torch.cat(laid.rows)].long().to(device),
        positions=torch.cat(laid.positions).to(device),
        plan=AttentionPlan(tuple(laid.segments)),
        predictors=torch.cat(predictors).long().to(device),
        labels=torch.cat(labels).long().to(device),
    )


class _Laid:
    """Segments as they are laid one behind the other."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.segments: list[Segment] = []

    def add(self, row: int, length: int, prefix: tuple[int, int] = (0, 0)) -> int:
        """``length`` tokens from place ``row`` of the batch on. Returns where they end."""
        start = self.segments[-1].stop if self.segments else 0
        self.segments.append(Segment(start, start + length, prefix))
        self.rows.append(torch.arange(row, row + length))
        self.positions.append(torch.arange(length) + self.segments[-1].prefix_length)
        return start + length


def _lengths(batch: Batch) -> tuple[list[int], list[int]]:
    """Tokens of prompt and answer of each sample."""
    prompts = batch.dense(c.PROMPT_LENGTH)
    return prompts.tolist(), (batch.ragged(c.TOKENS).lengths - prompts).tolist()


def _owners(batch: Batch) -> list[int]:
    """A number for each sample: the same for consecutive ones with one prompt, but for those that do not `join` them."""
    rows = batch.ragged(c.TOKENS).rows()
    prompts, answers = _lengths(batch)
    owners: list[int] = []
    first = 0
    for sample, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if prompt != prompts[first] or not torch.equal(rows[first][:prompt], rows[sample][:prompt]):
            first = sample
        owners.append(first if joins(prompt, answer) else -1 - sample)
    return owners


def pack_whole(rows: Sequence[Sequence[int]], device: torch.device) -> PackedInputs:
    """Rows of token ids, with the last token of each as the place that is asked for. No rows pack to one dummy token."""
    if not rows:
        return pack(Batch(), device)
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.tensor([token for row in rows for token in row])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    ends = lengths.cumsum(0) - 1
    return PackedInputs(
        tokens.to(device),
        positions.to(device),
        AttentionPlan.of_lengths(lengths.tolist()),
        ends.to(device),
        tokens[ends].to(device),
    )
