"""Packing of samples into one row: attention segments, predictors of response tokens, and shared prompts.

Padding wastes compute, and all responses to a prompt have the same prompt tokens. Therefore a micro-batch is one row
without padding, in which a prompt appears once, followed by its responses, which attend to it and to themselves. The
dictionary-encoded prompt column of the batch determines which samples share a prompt. Images are stored once per prompt
(`models.attention.packed_images`). Prompts that share only a prefix are not merged.
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

from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch
from rltrain.common.columns.ragged import Ragged
from rltrain.common.device import send
from rltrain.data.images import PromptImages, answer_position
from rltrain.models.attention.packed_images import PackedImages


class Segment(NamedTuple):
    """Queries [start, stop). They see the keys of ``prefix`` (the range of an earlier segment) and, causally, their
    own."""

    start: int
    stop: int
    prefix: tuple[int, int] = (0, 0)

    @property
    def prefix_length(self) -> int:
        return self.prefix[1] - self.prefix[0]

    @property
    def length(self) -> int:
        """Number of keys, with the prefix."""
        return self.prefix_length + self.stop - self.start


class AttentionPlan:
    """Segments of one packed row, in host integers. They are consecutive and cover all tokens.

    Not a dataclass, because FSDP recreates dataclasses among a layer's arguments, which would lose cached values.
    """

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        self.segments = segments

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttentionPlan) and self.segments == other.segments

    def __hash__(self) -> int:
        return hash(self.segments)

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> AttentionPlan:
        """Return a plan whose segments see only themselves."""
        ends = list(accumulate(lengths))
        return cls(tuple(Segment(end - length, end) for end, length in zip(ends, lengths, strict=True)))

    @property
    def num_tokens(self) -> int:
        return self.segments[-1].stop

    def padded_to(self, num_tokens: int) -> AttentionPlan:
        """Return this plan with a segment of padding up to ``num_tokens``, if tokens are missing."""
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
        """Return cumulative query and key lengths [segments + 1] (int32), and the row indices of all segments' keys
        [keys], empty without prefixes. The tensors are cached, so that the layers of a device share one copy.
        """
        if device not in self._on_devices:
            queries, where = send(torch.tensor((0, *self.query_ends), dtype=torch.int32), device), torch.zeros(0)
            keys = queries  # The same tensor, because torch then selects its fastest kernel.
            if self.has_prefixes:
                parts = [part for segment in self.segments for part in (segment.prefix, (segment.start, segment.stop))]
                keys = send(torch.tensor((0, *self.key_ends), dtype=torch.int32), device)
                where = send(torch.cat([torch.arange(*part) for part in parts]), device)
            self._on_devices[device] = queries, keys, where
        return self._on_devices[device]

    # Cache the tensors in the plan itself. A separate cache object that refers to the plan would keep device memory
    # until garbage collection.
    @cached_property
    def _on_devices(self) -> dict[torch.device, tuple[Tensor, Tensor, Tensor]]:
        return {}

    def chunked(self, size: int) -> AttentionPlan:
        """Return this plan for layers where tokens see only keys of the same chunk of ``size`` positions of a sample.

        Each chunk becomes a segment. The first chunk of a response continues the last chunk of its prompt.
        """
        if size not in self._chunked:
            self._chunked[size] = AttentionPlan(
                tuple(piece for segment in self.segments for piece in _pieces(segment, size))
            )
        return self._chunked[size]

    @cached_property
    def _chunked(self) -> dict[int, AttentionPlan]:
        return {}

    @cached_property
    def by_slice(self) -> dict[Any, Any]:
        """Cache of `models.attention.ring`."""
        return {}

    def places(self, device: torch.device) -> Tensor:
        """Return the position of every token in its sample [tokens]."""
        if device not in self._places:
            spans = [torch.arange(segment.prefix_length, segment.length) for segment in self.segments]
            self._places[device] = send(torch.cat(spans), device)
        return self._places[device]

    @cached_property
    def _places(self) -> dict[torch.device, Tensor]:
        return {}


def _pieces(segment: Segment, size: int) -> Iterator[Segment]:
    """Split a segment at positions of its sample that are multiples of ``size``."""
    start, place = segment.start, segment.prefix_length
    partial = place % size
    prefix = (segment.prefix[1] - partial, segment.prefix[1]) if partial else (0, 0)
    while start < segment.stop:
        stop = min(segment.stop, start + size - place % size)
        yield Segment(start, stop, prefix)
        start, place, prefix = stop, place + stop - start, (0, 0)


@dataclass(frozen=True)
class PackedInputs:
    """Inputs of the model for one micro-batch."""

    tokens: Tensor
    positions: Tensor
    """[total]."""
    plan: AttentionPlan
    """Attention segments (host integers)."""
    predictors: Tensor
    labels: Tensor
    """[policy tokens]: row index of the hidden state that predicts each policy token, and that token."""
    host_predictors: Tensor
    """Copy of ``predictors`` on the host, for Ulysses."""
    images: PackedImages | None = None
    """Images of prompts and responses, on the host. With images, positions may be [3, total]: time, height and width.
    """
    experts: Tensor | None = None
    """[total, layers, experts per token]: replayed experts of each token. None: the router decides."""
    spans: tuple[tuple[range, range], ...] = ()
    """Row indices of each sample: its prompt's tokens, and its response's tokens except the last."""

    def by_sample(self) -> Tensor:
        """Return the row indices of all samples' tokens, sample after sample [tokens of samples], on the host."""
        parts = [torch.arange(part.start, part.stop) for span in self.spans for part in span]
        return torch.cat([torch.zeros(0).long(), *parts])

    def times_counted(self) -> Tensor:
        """Return the number of samples that contain each token [total]. A shared prompt counts once per response."""
        return send(self.by_sample().bincount(minlength=self.plan.num_tokens), self.tokens.device)


# If a response is longer than this many times its prompt, gathering its keys costs more than sharing saves.
_LONGEST_ANSWER_PER_PROMPT_TOKEN = 16


def pays_to_share(prompt_length: Any, answer_length: Any) -> Any:
    """Return whether a response of this length should share its prompt. Lengths: numbers or arrays."""
    return _LONGEST_ANSWER_PER_PROMPT_TOKEN * prompt_length >= answer_length


def pack(batch: Batch, device: torch.device, *, share: bool = True) -> PackedInputs:
    """Pack ``prompt``, ``response``, ``response_mask`` into inputs. An empty batch packs to one dummy token.

    With ``share``, samples of one prompt share its tokens: the prompt is placed once, then the responses that attend to
    it, with positions that continue from its end. The prompt's last state predicts the first token of each response.
    The last token of a response predicts nothing, so it is omitted. Only tokens of the policy (``response_mask``) have
    predictors and labels.

    The ``images`` of a prompt are packed once, and images of a response (``own_images``) with the response.
    ``routed_experts``, if present, follow the same layout. A shared prompt uses the rows of its first sample.
    """
    if not len(batch):
        # A rank without samples computes one token, because FSDP gathers weights in the forward pass, which needs every
        # rank.
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
    images = _images_by_prompt(batch)
    own_images = batch[c.RESPONSE_IMAGES] if c.RESPONSE_IMAGES in batch else [None] * len(batch)
    assert isinstance(own_images, list)
    laid = _Laid(images, own_images)
    shared: dict[int, tuple[int, int]] = {}
    predictors, spans = [], []
    for (prompt, answer_start, length), own in zip(samples, own_images, strict=True):
        question, answer = (prompt_starts[prompt], prompt_lengths[prompt]), (answer_start, max(length - 1, 0))
        # An unshared prompt and its response are one segment, so no keys have to be gathered for a prefix.
        if sharing[prompt] < 2 or not pays_to_share(question[1], length):
            # Index of the prompt's last token: the segment ends before the response's last token.
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
    # Prompts and responses are concatenated, so that a single gather builds the whole row.
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
    """Return `PackedInputs.experts`."""
    if c.ROUTED_EXPERTS not in batch or not len(given := batch.ragged(c.ROUTED_EXPERTS).values):
        return None
    # Either all samples of a mini-batch have recorded experts or none has. Otherwise rows would be assigned to the
    # wrong samples.
    assert torch.equal(batch.ragged(c.ROUTED_EXPERTS).lengths, computed_tokens(batch))
    packed = given.new_zeros(total, *given.shape[1:])
    # Iterate in reverse order, so that the first sample of a shared prompt writes its rows last.
    ends = batch.ragged(c.ROUTED_EXPERTS).offsets.tolist()[1:]
    for (prompt, answer), end in zip(reversed(spans), reversed(ends), strict=True):
        of_answer = end - len(answer)
        packed[answer.start : answer.stop] = given[of_answer:end]
        packed[prompt.start : prompt.stop] = given[of_answer - len(prompt) : of_answer]
    return send(packed, device)


def _images_by_prompt(batch: Batch) -> dict[int, PromptImages]:
    """Return the images of the batch's prompts by prompt index."""
    if c.IMAGES not in batch:
        return {}
    column, prompts = batch.dictionary(c.IMAGES), batch.dictionary(c.PROMPT)
    pairs = zip(prompts.index.tolist(), column.index.tolist(), strict=True)
    return {prompt: prompt_images for prompt, place in pairs if (prompt_images := column.values[place]) is not None}  # type: ignore[misc]


class _Laid:
    """Builder of a row of segments. images: images by prompt index. own_images: images of responses."""

    def __init__(self, images: Mapping[int, PromptImages], own_images: Sequence[PromptImages | None]) -> None:
        self.rows: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.segments: list[Segment] = []
        # (images, row index of the text's first token) for each text with images.
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
        """Append a segment with tokens of a prompt, of a response, or of both, given as (start, length) in the batch.

        Returns the row index after the segment. prompt_length: length of the prompt in ``prefix``, if only a response
        is added.
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
        """Add the images of a text that begins at ``start`` in the row, and the positions of its first tokens."""
        of_images = None if images is None else images.positions
        positions = torch.arange(length) if of_images is None else torch.tensor(of_images[:, :length])
        self._place(positions + first_position)
        self.with_images += [(images, start)] if images is not None else []

    def _place(self, positions: Tensor) -> None:
        """Append positions [n] or [3, n] of the next tokens."""
        self.positions.append(positions.expand(3, -1) if self._three_rows else positions)


def per_policy_token(values: Tensor, batch: Batch) -> Ragged:
    """Group model outputs at ``pack(batch).predictors`` by sample."""
    return Ragged(values, batch.ragged(c.RESPONSE_MASK).sum() if len(batch) else torch.zeros(0, dtype=torch.long))


def per_computed_token(values: Tensor, batch: Batch) -> Ragged:
    """Group model outputs by sample. They are for all tokens of ``pack(batch)``, in the order of
    `PackedInputs.by_sample`."""
    return Ragged(values, computed_tokens(batch))


def computed_tokens(batch: Batch) -> Tensor:
    """Return the number of computed tokens per sample [n]: prompt and response without the response's last token."""
    if not len(batch):
        return torch.zeros(0, dtype=torch.long)
    prompts = batch.dictionary(c.PROMPT)
    assert isinstance(prompts.values, Ragged)
    return prompts.values.lengths[prompts.index] + (batch.ragged(c.RESPONSE).lengths - 1).clamp(min=0)


def pack_rows(rows: Sequence[Sequence[int]], device: torch.device) -> PackedInputs:
    """Pack rows of token ids. The predictor of a row is its last token. If there are no rows, one dummy token is
    packed."""
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
