"""Samples one behind the other in one row: who sees whom, where answers are predicted, which answers share a prompt.

Problem: padding wastes compute, and a prompt's tokens are the same for all its answers. Choice: a micro-batch is one
row without padding. A prompt stands in it once, followed by its answers, which attend to it and to themselves. The
batch's dictionary-encoded prompt column says who shares. Images stand beside the prompts they belong to, once each
(`models.attention.packed_images`). Left out: trees of prompts that share only their beginning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rltrain.base.columns import names as c
from rltrain.base.columns.batch import Batch
from rltrain.base.columns.ragged import Ragged
from rltrain.base.device import send
from rltrain.data.images import PromptImages, answer_position
from rltrain.models.attention.packed_images import PackedImages


class Segment(NamedTuple):
    """Queries [start, stop) see the keys of ``prefix`` (the range of an earlier segment) and, causally, their own."""

    start: int
    stop: int
    prefix: tuple[int, int] = (0, 0)

    @property
    def prefix_length(self) -> int:
        return self.prefix[1] - self.prefix[0]

    @property
    def length(self) -> int:
        """With the prefix."""
        return self.prefix_length + self.stop - self.start


class AttentionPlan:
    """Who sees whom in one packed row, in host integers. The segments follow one another and cover all tokens.

    No dataclass: FSDP makes those among a layer's arguments anew, and with them what is computed once.
    """

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        self.segments = segments

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttentionPlan) and self.segments == other.segments

    def __hash__(self) -> int:
        return hash(self.segments)

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> AttentionPlan:
        """Segments that see only themselves."""
        ends = list(accumulate(lengths))
        return cls(tuple(Segment(end - length, end) for end, length in zip(ends, lengths, strict=True)))

    @property
    def num_tokens(self) -> int:
        return self.segments[-1].stop

    def padded_to(self, num_tokens: int) -> AttentionPlan:
        """This plan with a segment of padding up to that number of tokens, where some are missing."""
        end = self.num_tokens
        return self if end == num_tokens else AttentionPlan((*self.segments, Segment(end, num_tokens)))

    @cached_property
    def query_lengths(self) -> tuple[int, ...]:
        return tuple(segment.stop - segment.start for segment in self.segments)

    @cached_property
    def key_lengths(self) -> tuple[int, ...]:
        return tuple(segment.length for segment in self.segments)

    @cached_property
    def query_ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.query_lengths))

    @cached_property
    def key_ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.key_lengths))

    @cached_property
    def has_prefixes(self) -> bool:
        return any(segment.prefix_length for segment in self.segments)

    def on_device(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Cumulative query and key lengths [segments + 1] (int32); the rows of all segments' keys [keys], none where no
        segment has a prefix. Made once per device rather than once per layer.
        """
        if device not in self._on_devices:
            queries, where = send(torch.tensor((0, *self.query_ends), dtype=torch.int32), device), torch.zeros(0)
            keys = queries  # The very same tensor, by which torch knows that its fastest kernel will do.
            if self.has_prefixes:
                parts = [part for segment in self.segments for part in (segment.prefix, (segment.start, segment.stop))]
                keys = send(torch.tensor((0, *self.key_ends), dtype=torch.int32), device)
                where = send(torch.cat([torch.arange(*part) for part in parts]), device)
            self._on_devices[device] = queries, keys, where
        return self._on_devices[device]

    # In the plan itself: an object that held it would hold the device's memory until Python looks for cycles.
    @cached_property
    def _on_devices(self) -> dict[torch.device, tuple[Tensor, Tensor, Tensor]]:
        return {}

    def chunked(self, size: int) -> AttentionPlan:
        """This plan for layers where a token sees only keys of the same ``size`` places of its sample.

        Each such stretch becomes a segment. An answer's first one goes on from the last of its prompt.
        """
        if size not in self._chunked:
            self._chunked[size] = AttentionPlan(
                tuple(piece for segment in self.segments for piece in _pieces(segment, size))
            )
        return self._chunked[size]

    @cached_property
    def _chunked(self) -> dict[int, AttentionPlan]:
        return {}

    def places(self, device: torch.device) -> Tensor:
        """Of every token in its sample [tokens]."""
        if device not in self._places:
            spans = [torch.arange(segment.prefix_length, segment.length) for segment in self.segments]
            self._places[device] = send(torch.cat(spans), device)
        return self._places[device]

    @cached_property
    def _places(self) -> dict[torch.device, Tensor]:
        return {}


def _pieces(segment: Segment, size: int) -> Iterator[Segment]:
    """What of a segment lies between two multiples of ``size``, in places of its sample."""
    start, place = segment.start, segment.prefix_length
    partial = place % size
    prefix = (segment.prefix[1] - partial, segment.prefix[1]) if partial else (0, 0)
    while start < segment.stop:
        stop = min(segment.stop, start + size - place % size)
        yield Segment(start, stop, prefix)
        start, place, prefix = stop, place + stop - start, (0, 0)


@dataclass(frozen=True)
class PackedInputs:
    """One micro-batch as the model sees it."""

    tokens: Tensor
    positions: Tensor
    """[total]."""
    plan: AttentionPlan
    """Who sees whom (host integers)."""
    predictors: Tensor
    labels: Tensor
    """[policy tokens], the place of the hidden state that predicts each token of the policy, and that token."""
    host_predictors: Tensor
    """The same places on the host, where Ulysses decides by them."""
    images: PackedImages | None = None
    """Those of prompts and answers, on the host; the positions may then be [3, total], in time, height and width."""
    experts: Tensor | None = None
    """[total, layers, experts per token]: where the tokens go, or None: where the router sends them."""
    spans: tuple[tuple[range, range], ...] = ()
    """Where the tokens of each sample's prompt stand, and those of its answer that predict anything."""

    def by_sample(self) -> Tensor:
        """The places of all samples' tokens, one sample behind the other [tokens of samples], on the host."""
        parts = [torch.arange(part.start, part.stop) for span in self.spans for part in span]
        return torch.cat([torch.zeros(0).long(), *parts])

    def times_counted(self) -> Tensor:
        """In how many samples each token of the row stands [total]: a shared prompt's in all of its answers'."""
        return send(self.by_sample().bincount(minlength=self.plan.num_tokens), self.tokens.device)


# An answer this many times as long as its prompt saves less by sharing the prompt than the gathering of its keys costs.
_LONGEST_ANSWER_PER_PROMPT_TOKEN = 16


def pays_to_share(prompt_length: Any, answer_length: Any) -> Any:
    """Whether an answer shares its prompt with the other answers to it. Lengths: numbers or arrays of them."""
    return _LONGEST_ANSWER_PER_PROMPT_TOKEN * prompt_length >= answer_length


def pack(batch: Batch, device: torch.device, *, share: bool = True) -> PackedInputs:
    """``prompt``, ``response``, ``response_mask`` -> packed inputs. An empty batch packs to one dummy token.

    With ``share``, samples of one prompt share its tokens: the prompt once, then the answers that see it, positions
    going on from its end; the prompt's last state predicts the first token of each. The last token of an answer
    predicts nothing and is left out. Only tokens of the policy (``response_mask``) have predictors and labels. Where
    the batch has ``images``, those of a prompt are packed once, however often its tokens stand in the row. An answer's
    own (``own_images``) lie at their places behind it. ``routed_experts``, where there are some, are laid out likewise;
    a shared prompt has those of its first sample.
    """
    if not len(batch):
        # A rank without samples computes one token, because FSDP's gathers in the forward need every rank.
        dummy_token = torch.zeros(1, dtype=torch.long, device=device)
        return PackedInputs(
            dummy_token,
            dummy_token,
            AttentionPlan.of_lengths([1]),
            dummy_token[:0],
            dummy_token[:0],
            torch.zeros(0).long(),
        )
    prompts, answers = batch.dictionary(c.PROMPT), batch.ragged(c.RESPONSE)
    assert isinstance(prompts.values, Ragged)
    prompt_starts, prompt_lengths = prompts.values.offsets.tolist(), prompts.values.lengths.tolist()
    answer_starts = (answers.offsets + len(prompts.values.values)).tolist()
    samples = list(zip(prompts.index.tolist(), answer_starts, answers.lengths.tolist(), strict=False))
    sharing = Counter(
        prompt for prompt, _, length in samples if share and pays_to_share(prompt_lengths[prompt], length)
    )
    images, own_images = _images_by_prompt(batch), batch[c.OWN_IMAGES] if c.OWN_IMAGES in batch else [None] * len(batch)
    assert isinstance(own_images, list)
    laid = _Laid(images, own_images)
    shared: dict[int, tuple[int, int]] = {}
    predictors, spans = [], []
    for (prompt, answer_start, length), own in zip(samples, own_images, strict=True):
        question, answer = (prompt_starts[prompt], prompt_lengths[prompt]), (answer_start, max(length - 1, 0))
        # Where nobody shares it, prompt and answer are one segment, and no keys have to be gathered for a prefix.
        if sharing[prompt] < 2 or not pays_to_share(question[1], length):
            # The prompt's last place, as the segment ends behind the answer's last token but one.
            first = laid.add(prompt, question, answer, own) - answer[1] - 1
            predictors.append(torch.arange(first, first + length))
            spans.append((range(first + 1 - question[1], first + 1), range(first + 1, first + 1 + answer[1])))
        else:
            if prompt not in shared:
                end = laid.add(prompt, question)
                shared[prompt] = (end - question[1], end)
            prefix = shared[prompt]
            behind = {"prompt_length": question[1], "prefix": prefix}
            end = laid.add(prompt, answer=answer, own_images=own, **behind) if answer[1] else 0
            predictors += [torch.tensor([prefix[1] - 1] * (length > 0)), torch.arange(end - answer[1], end)]
            spans.append((range(*prefix), range(end - answer[1], end)))
    # As one tensor, so that a single gather lays out the whole row.
    source, is_policy = torch.cat([prompts.values.values, answers.values]), batch.ragged(c.RESPONSE_MASK).values
    places = torch.cat(predictors).long()[is_policy]
    return PackedInputs(
        tokens=send(source[torch.cat(laid.rows)], device).long(),
        positions=send(torch.cat(laid.positions, -1), device),
        plan=AttentionPlan(tuple(laid.segments)),
        predictors=send(places, device),
        labels=send(answers.values[is_policy], device).long(),
        host_predictors=places,
        images=PackedImages.of(laid.with_images),
        experts=_experts(batch, spans, laid.segments[-1].stop, device),
        spans=tuple(spans),
    )


def _experts(batch: Batch, spans: Sequence[tuple[range, range]], total: int, device: torch.device) -> Tensor | None:
    """See `PackedInputs.experts`."""
    if c.ROUTED_EXPERTS not in batch or not len(given := batch.ragged(c.ROUTED_EXPERTS).values):
        return None
    # Samples of one mini-batch all have theirs, or none; else the rows below would be those of others.
    assert torch.equal(batch.ragged(c.ROUTED_EXPERTS).lengths, computed_tokens(batch))
    packed = given.new_zeros(total, *given.shape[1:])
    # Backwards, so that a shared prompt has those of the first.
    ends = batch.ragged(c.ROUTED_EXPERTS).offsets.tolist()[1:]
    for (prompt, answer), end in zip(reversed(spans), reversed(ends), strict=True):
        of_answer = end - len(answer)
        packed[answer.start : answer.stop] = given[of_answer:end]
        packed[prompt.start : prompt.stop] = given[of_answer - len(prompt) : of_answer]
    return send(packed, device)


def _images_by_prompt(batch: Batch) -> dict[int, PromptImages]:
    """The images of each prompt of the batch that has any, by its number."""
    if c.IMAGES not in batch:
        return {}
    column, prompts = batch.dictionary(c.IMAGES), batch.dictionary(c.PROMPT)
    pairs = zip(prompts.index.tolist(), column.index.tolist(), strict=True)
    return {prompt: prompt_images for prompt, place in pairs if (prompt_images := column.values[place]) is not None}  # type: ignore[misc]


class _Laid:
    """Collects segments one behind the other. images: by the number of their prompt; own_images: of answers."""

    def __init__(self, images: Mapping[int, PromptImages], own_images: Sequence[PromptImages | None]) -> None:
        self.rows: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.segments: list[Segment] = []
        # (images, where the tokens of their text begin) for each time that a text with some is laid.
        self.with_images: list[tuple[PromptImages, int]] = []
        self._images = images
        every = (*images.values(), *filter(None, own_images))
        self._three_rows = any(of_text.positions is not None for of_text in every)

    def add(
        self,
        prompt: int,
        question: tuple[int, int] | None = None,
        answer: tuple[int, int] = (0, 0),
        own_images: PromptImages | None = None,
        *,
        prompt_length: int = 0,
        prefix: tuple[int, int] = (0, 0),
    ) -> int:
        """A segment of the prompt's tokens, the answer's or both, each (start, length) in the batch. Returns where it
        ends. prompt_length: of the prompt in ``prefix``, where this is an answer alone.
        """
        start, images = self.segments[-1].stop if self.segments else 0, self._images.get(prompt)
        ranges = [span for span in (question, answer) if span and span[1]]
        stop = start + sum(length for _, length in ranges)
        self.segments.append(Segment(start, stop, prefix))
        self.rows += [torch.arange(first, first + length) for first, length in ranges]
        if question:
            prompt_length = question[1]
            self._lay(images, start, prompt_length)
        if answer[1]:
            self._lay(own_images, stop - answer[1], answer[1], answer_position(images, prompt_length))
        return stop

    def _lay(self, images: PromptImages | None, start: int, length: int, first_position: int = 0) -> None:
        """The images of a text that begins at ``start`` in the row, and the positions of its first tokens."""
        of_images = None if images is None else images.positions
        positions = torch.arange(length) if of_images is None else torch.tensor(of_images[:, :length])
        self._place(positions + first_position)
        self.with_images += [(images, start)] if images is not None else []

    def _place(self, positions: Tensor) -> None:
        """Positions [n] or [3, n] of the next tokens."""
        self.positions.append(positions.expand(3, -1) if self._three_rows else positions)


def per_policy_token(values: Tensor, batch: Batch) -> Ragged:
    """The outputs of a model at ``pack(batch).predictors``, sample by sample."""
    return Ragged(values, batch.ragged(c.RESPONSE_MASK).sum() if len(batch) else torch.zeros(0, dtype=torch.long))


def per_computed_token(values: Tensor, batch: Batch) -> Ragged:
    """What a model says of every token of ``pack(batch)`` (in the order of `PackedInputs.by_sample`) by sample."""
    return Ragged(values, computed_tokens(batch))


def computed_tokens(batch: Batch) -> Tensor:
    """Tokens of prompt and answer that are computed, which are all but the last of an answer: [n]."""
    if not len(batch):
        return torch.zeros(0, dtype=torch.long)
    prompts = batch.dictionary(c.PROMPT)
    assert isinstance(prompts.values, Ragged)
    return prompts.values.lengths[prompts.index] + (batch.ragged(c.RESPONSE).lengths - 1).clamp(min=0)


def pack_whole(rows: Sequence[Sequence[int]], device: torch.device) -> PackedInputs:
    """Rows of token ids; the predictor of a row is its last token. No rows pack to one dummy token."""
    if not rows:
        return pack(Batch(), device)
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.tensor([token for row in rows for token in row])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    ends = lengths.cumsum(0) - 1
    return PackedInputs(
        send(tokens, device),
        send(positions, device),
        AttentionPlan.of_lengths(lengths.tolist()),
        send(ends, device),
        send(tokens[ends], device),
        ends,
    )
