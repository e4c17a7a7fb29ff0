"""Interface of every rollout engine: token ids in, sampled token ids and their log-probs out.

Engines differ in process model, batching and memory, and the trainer must not depend on this. So an engine pulls jobs
from a `Source` when it has room, gets full weights, and reports when its memory is free; worker and trainer need
nothing more. The interface has no text, so tokens are not decoded and encoded again between engine and trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rltrain.data.images import EncodedPrompt, PromptImages
from rltrain.models.weights.names import Weight
from rltrain.models.weights.partial import Record

# Identifies a response: prompt index in the task, and sample number.
Key = tuple[int, int]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Off: ``top_k`` <= 0, ``top_p`` = 1, ``min_p`` = 0, ``repetition_penalty`` = 1. ``greedy``
    ignores temperature, top_k, top_p and min_p."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    greedy: bool = False
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    """Texts that end a turn; the token that completes one is kept."""


@dataclass(frozen=True)
class Job:
    """Samples of one prompt that are generated together."""

    prompt_index: int
    """Prompt index in the task."""
    samples: NDArray[np.int64]
    """[k]: sample numbers of the prompt."""
    prompt: NDArray[np.int32]
    """Token ids, including all image placeholders."""
    seeds: NDArray[np.uint64]
    """[k]: equal seeds give equal responses, independent of the batch and the replica."""
    given: tuple[NDArray[np.int32], ...] | None = None
    """Tokens that each sample already has (None: no sample has any). They follow the prompt, count towards
    ``max_tokens``, and have consumed their random numbers.
    """
    images: PromptImages | None = None
    """Images of the prompt as the trainer processed them, so that no engine scales or crops them differently."""
    given_images: PromptImages | None = None
    """Images of the given tokens, as the trainer processed them. Only jobs of one sample have any."""
    begins_turn: bool = False
    """True if the given tokens end with a reply to the policy. Otherwise they are the beginning of the same turn."""

    @property
    def asked(self) -> EncodedPrompt:
        """Prompt with its images."""
        return EncodedPrompt(self.prompt, self.images)

    @cached_property
    def begun(self) -> list[EncodedPrompt]:
        """Prompt and given tokens of each sample, with the images of both; empty if there are no given tokens."""
        return [self.asked.followed_by(EncodedPrompt(tokens, self.given_images)) for tokens in self.given or ()]


@dataclass
class Turn:
    """Continuous generation of one response: from the prompt or the given tokens to its end."""

    prompt_index: int
    """Prompt index in the task."""
    sample: int
    """Sample number of the prompt."""
    tokens: list[int] = field(default_factory=list)
    """New ids (without `Job.given`), including an end token."""
    log_probs: list[float] = field(default_factory=list)
    """Log softmax(logits / temperature) of each sampled id, before penalty, top-k, top-p and min-p (greedy:
    temperature 1). The softmax includes image placeholders, which are never sampled."""
    reason: str = "abort"
    """"stop" (an end token or text), "length" (``max_tokens``), or the engine's name for an aborted turn."""
    seconds: float = 0.0
    """Time of its end, in seconds since the call."""
    num_reused: int = 0
    """Tokens of prompt and `Job.given` that the engine reused from its cache."""
    experts: list[NDArray[np.integer[Any]]] = field(default_factory=list)
    """Routing of the tokens after the reused ones, in parts [tokens, layers, experts per token] (`models.routing`). The
    last token has no routing, because it is never computed. Empty unless the settings request the routing.
    """
    earlier: NDArray[np.int32] | tuple[()] = ()
    """Tokens of the same turn from an earlier step, in which a stop text may begin."""

    @property
    def aborted(self) -> bool:
        """True if the turn was aborted while it was running."""
        return self.reason not in ("stop", "length")


def turns_of(job: Job) -> list[Turn]:
    """Return the empty turns of a job."""
    given: Sequence[Any] = job.given if job.given and not job.begins_turn else [()] * len(job.samples)
    return [
        Turn(job.prompt_index, sample, earlier=part) for sample, part in zip(job.samples.tolist(), given, strict=True)
    ]


class Source(Protocol):
    """Work queue of an engine. The processes of a replica call every method in the same order."""

    def next_jobs(self, most: int) -> list[Job]:
        """Return jobs of at most ``most`` samples in total; none if no work is available, or if the next job is larger.

        No job has more samples than the engine's ``max_num_seqs``.
        """

    def on_turn_end(self, turn: Turn) -> None:
        """Receive a turn that ended or was aborted. Engines call it immediately, because the next turn may depend on
        it."""

    def is_pending(self, prompt_index: int, sample: int) -> bool:
        """Return True if another turn may follow, whose `Job.given` starts with all tokens so far."""

    def wait(self) -> bool:
        """Return True if more work may come. Called by an idle engine after an empty `next_jobs`; may block briefly."""

    @property
    def may_stop(self) -> bool:
        """Return False if `stopped` always returns False."""

    def stopped(self) -> bool:
        """Return True if the running turns are no longer needed. Engines poll it every few tokens."""


class RolloutEngine(Protocol):
    """Rollout engine. Call order: wake_weights, load_weights, wake_cache, then generate and log_probs; then sleep.

    names_in_memory: weights have the names of the trainer's model, not of its checkpoint. holds_base: the engine
    applies adapters itself (`EngineSettings.adapted`) and still has the base weights. record: after the first load, the
    parts of the weights that this rank of a tensor-parallel engine copies; None: it always needs complete weights.
    """

    names_in_memory: bool
    holds_base: bool
    record: Record | None

    def wake_weights(self) -> None:
        """Allocate the device memory of the weights."""

    def load_weights(self, weights: Iterator[Weight]) -> None:
        """Load new weights on every rank: all weights, or the adapters only if the engine `holds_base`.

        The caller does not change these tensors later, so an engine may keep them without a copy.
        """

    def wake_cache(self) -> None:
        """Allocate the device memory of the KV cache, and invalidate everything computed with earlier weights."""

    def generate(self, source: Source, sampling: Sampling) -> None:
        """Run jobs until the source has no more, and report every turn that ends."""

    def log_probs(self, text: EncodedPrompt) -> Tensor:
        """Return log softmax(logits) of each of ``text.tokens[1:]`` given its context: [tokens - 1] in fp32."""

    def sleep(self) -> bool:
        """Free the device memory of weights and caches. Returns True if a sync must precede the next generation."""
