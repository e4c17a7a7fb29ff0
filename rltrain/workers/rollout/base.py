"""What a rollout engine is: token ids in, sampled token ids and their log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rltrain.config.engines import ENGINES, engines_with
from rltrain.errors import ConfigError
from rltrain.models.weights import Weight
from rltrain.ragged import Ragged


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. ``top_k`` <= 0 and ``top_p`` = 1 are off; ``greedy`` ignores temperature, top_k, top_p."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    greedy: bool = False
    ignore_eos: bool = False


@dataclass(frozen=True)
class Job:
    """Samples of one prompt that are answered together.

    place: of the prompt in the task; samples [k]: their numbers among the answers to the prompt; prompt: token ids;
    seeds [k]: the same seed gives the same answer whatever else is in the batch, and whoever serves it. given: of each sample the
    tokens it already has (None: no sample has any): they follow the prompt, count towards ``max_tokens``, and the random numbers go
    on after theirs. images: PIL images or the bytes of image files, in the order of their places in the prompt; ``prompt`` has ONE
    placeholder token for each of them, and the engine puts as many as the image takes in its place (which count for
    ``max_model_len``).
    """

    place: int
    samples: NDArray[np.int64]
    prompt: NDArray[np.int32]
    seeds: NDArray[np.uint64]
    given: tuple[NDArray[np.int32], ...] | None = None
    images: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Generation:
    """Answers: all samples of the first job that was taken, then of the second, ...

    tokens: new ids (without `Job.given`), the end token included when there is one. log_probs: log softmax(logits / temperature) of
    each sampled id, before top-k and top-p (greedy: temperature 1), placeholder tokens of images included, although they are never
    drawn. truncated [n]: stopped by ``max_tokens``, not by an end token. aborted [n]: given up while it was running. seconds [n]:
    when it ended, since the call.
    """

    tokens: Ragged
    log_probs: Ragged
    truncated: Tensor
    aborted: Tensor
    seconds: Tensor


class Source(Protocol):
    """Where an engine gets its work. The processes of a replica call every method at the same point of their work."""

    def take(self, most: int) -> list[Job]:
        """Jobs of at most ``most`` samples in all; none when nothing is left or wanted, or the next one has more samples than that.

        No job has more samples than the engine's ``max_num_seqs``.
        """

    @property
    def may_stop(self) -> bool:
        """Whether `stopped` can ever be true."""

    def stopped(self) -> bool:
        """What is running now is not wanted any more. An engine asks after every token."""


# A job has ended; the new token ids of its answers.
Finished = Callable[[Job, list[list[int]]], None]


class RolloutEngine(Protocol):
    """The contract of every engine. Calls come in this order: wake_weights, load_weights, wake_cache, then generate and score; sleep."""

    def wake_weights(self) -> None:
        """Take the device memory of the weights."""

    def load_weights(self, weights: Iterator[Weight]) -> None:
        """Take over new weights: all of them, whole, on every rank. The values stay as they are, so an engine may keep them."""

    def wake_cache(self) -> None:
        """Take the device memory of the key-value cache; forget everything that was computed with other weights."""

    def generate(self, source: Source, sampling: Sampling, finished: Finished | None = None) -> Generation:
        """Answer jobs until the source has no more. ``finished`` is told of every job as soon as its last answer has ended."""

    def log_probs(self, tokens: Sequence[int]) -> Tensor:
        """log softmax(logits) of ``tokens[1:]`` given what stands before each: [len(tokens) - 1] in fp32."""

    def sleep(self) -> bool:
        """Give the device memory of weights and caches back. Returns whether the weights are gone."""


def check_images(engine: str, jobs: Sequence[Job]) -> None:
    """Raises ConfigError where jobs have images and the engine (``rollout.name``) takes text alone."""
    if not ENGINES[engine].images and any(job.images for job in jobs):
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={engine} takes text alone, and prompts have images. Use {engines_with('images')}."
        )
