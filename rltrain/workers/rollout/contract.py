"""The contract of every rollout engine: token ids in, sampled token ids and their log-probs out.

Engines differ in process model, batching and memory, and a trainer that knew them would be written once per engine. So
an engine pulls work from a `Source` whenever it has room, gets whole weights, and says when its memory is free; the
worker and the trainer know nothing more. Text is left out: nothing is decoded and encoded again between the two.
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

# An answer to a prompt: place of the prompt in the task, and its number among the answers.
Key = tuple[int, int]


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. ``top_k`` <= 0, ``top_p`` = 1, ``min_p`` = 0 and ``repetition_penalty`` = 1 are off;
    ``greedy`` ignores temperature, top_k, top_p and min_p."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    greedy: bool = False
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    """Texts that end a turn with the token that completes one."""


@dataclass(frozen=True)
class Job:
    """Samples of one prompt that are answered together."""

    place: int
    """Of the prompt in the task."""
    samples: NDArray[np.int64]
    """[k]: their numbers among the answers to the prompt."""
    prompt: NDArray[np.int32]
    """Token ids, all placeholders of images among them."""
    seeds: NDArray[np.uint64]
    """[k]: the same seed gives the same answer, whatever else is in the batch and whichever replica serves it."""
    given: tuple[NDArray[np.int32], ...] | None = None
    """Per sample the tokens that it already has (None: no sample has any). They follow the prompt and count towards
    ``max_tokens``, and the random numbers go on after theirs."""
    images: PromptImages | None = None
    """Of the prompt, as the trainer sees them, so that no engine scales or cuts an image in its own way."""
    given_images: PromptImages | None = None
    """Of the given tokens, likewise; only a job of one sample has some."""
    begins_turn: bool = False
    """The given tokens end with words to the policy. Otherwise they are the beginning of the same turn."""

    @property
    def asked(self) -> EncodedPrompt:
        """The prompt with its images."""
        return EncodedPrompt(self.prompt, self.images)

    @cached_property
    def begun(self) -> list[EncodedPrompt]:
        """Of each sample the prompt and the given tokens, with the images of both; nothing where none has any."""
        return [self.asked.followed_by(EncodedPrompt(tokens, self.given_images)) for tokens in self.given or ()]


@dataclass
class Turn:
    """What an engine samples of one answer without a break: from the prompt, or the given tokens, to its end."""

    place: int
    """Of the prompt in the task."""
    sample: int
    """Its number among the answers to the prompt."""
    tokens: list[int] = field(default_factory=list)
    """New ids (without `Job.given`), with the end token if there is one."""
    log_probs: list[float] = field(default_factory=list)
    """Log softmax(logits / temperature) of each sampled id, before penalty, top-k, top-p and min-p (greedy: temperature
    1); the softmax has the placeholder tokens of images too, although they are never drawn."""
    reason: str = "abort"
    """Stop (an end token or text), length (``max_tokens``), or the engine's word for a turn that was given up."""
    seconds: float = 0.0
    """When it ended, since the call."""
    num_reused: int = 0
    """Tokens of prompt and `Job.given` that the engine had computed before, and did not compute again."""
    experts: list[NDArray[np.integer[Any]]] = field(default_factory=list)
    """Where the tokens behind those went, part by part: [tokens, layers, experts per token] (`models.routing`). The
    last token is not computed. Only where the settings ask for it."""
    earlier: NDArray[np.int32] | tuple[()] = ()
    """Tokens of the same turn from an earlier step, in which a stop text may begin."""

    @property
    def aborted(self) -> bool:
        """Whether it was given up while it was running."""
        return self.reason not in ("stop", "length")


def turns_of(job: Job) -> list[Turn]:
    """The turns that a job asks for, before their first token."""
    given: Sequence[Any] = job.given if job.given and not job.begins_turn else [()] * len(job.samples)
    return [Turn(job.place, sample, earlier=part) for sample, part in zip(job.samples.tolist(), given, strict=True)]


class Source(Protocol):
    """The work of an engine. The processes of a replica call every method at the same point of their work."""

    def take(self, most: int) -> list[Job]:
        """Jobs of at most ``most`` samples together. No job when no work is there or wanted, or the next is larger.

        No job has more samples than the engine's ``max_num_seqs``.
        """

    def ended(self, turn: Turn) -> None:
        """A turn has ended, or was given up. The engine says so at once, because the next turn may follow from it."""

    def goes_on(self, place: int, sample: int) -> bool:
        """Whether an answer waits for a next turn, whose `Job.given` then begins with all its tokens so far."""

    def wait(self) -> bool:
        """Whether more work may come. Asked when nothing is running and nothing was to be taken; may wait a little for
        it first.
        """

    @property
    def may_stop(self) -> bool:
        """Whether `stopped` can ever be true."""

    def stopped(self) -> bool:
        """Whether the turns that are running are no longer wanted. An engine asks every few tokens."""


class RolloutEngine(Protocol):
    """Calls come in this order: wake_weights, load_weights, wake_cache, then generate and log_probs; then sleep.

    names_in_memory: weights come under the names that the trainer's model gives them, not those of its checkpoint.
    holds_base: it was made for adapters beside their weights (`EngineSettings.adapted`), and has the weights still.
    """

    names_in_memory: bool
    holds_base: bool

    def wake_weights(self) -> None:
        """Take the device memory of the weights."""

    def load_weights(self, weights: Iterator[Weight]) -> None:
        """Take over new weights, whole, on every rank: all of them, or where it `holds_base` adapters alone.

        The values stay as they are, so an engine may keep them.
        """

    def wake_cache(self) -> None:
        """Take the device memory of the key-value cache, and forget everything computed with earlier weights."""

    def generate(self, source: Source, sampling: Sampling) -> None:
        """Answer jobs until the source has no more, and tell it of every turn that has ended."""

    def log_probs(self, text: EncodedPrompt) -> Tensor:
        """log softmax(logits) of each of ``text.tokens[1:]`` given what stands before it: [tokens - 1] in fp32."""

    def sleep(self) -> bool:
        """Give the device memory of weights and caches back. Returns whether it needs a sync before it generates."""
