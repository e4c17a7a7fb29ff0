"""What a rollout engine is: token ids in, sampled token ids and their log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rltrain.ragged import Ragged

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. ``top_k`` <= 0 and ``top_p`` = 1 are off; ``greedy`` ignores temperature, top_k, top_p."""

    num_samples: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    greedy: bool = False
    ignore_eos: bool = False


@dataclass(frozen=True)
class Generation:
    """Answers in order: all samples of the first prompt, then of the second, ...

    tokens: ids, the end token included when there is one. log_probs: log softmax(logits / temperature) of each sampled id,
    before top-k and top-p (greedy: temperature 1). truncated [n]: stopped by ``max_tokens``, not by an end token.
    """

    tokens: Ragged
    log_probs: Ragged
    truncated: Tensor


# (place of the prompt in the call, token ids of its answers in order)
Finished = Callable[[int, list[list[int]]], None]


class RolloutEngine(Protocol):
    """The contract of every engine."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take over new weights (Hugging Face names, full tensors) and forget everything computed with the old ones."""

    def generate(
        self,
        prompts: Sequence[NDArray[np.int32]],
        seeds: NDArray[np.uint64],
        sampling: Sampling,
        finished: Finished | None = None,
    ) -> Generation:
        """``seeds``: one a sample, prompt-major; the same seed gives the same answer whatever else is in the batch.

        ``finished`` is told of every prompt as soon as its last answer has ended.
        """

    def release(self) -> None:
        """Give the device memory of weights and caches back until the next ``load_weights``."""


def sample_seeds(seed: int, step: int, rows: Sequence[int], num_samples: int) -> NDArray[np.uint64]:
    """One seed a sample, prompt-major: a pure function of (seed, step, prompt, sample)."""
    parts = np.empty((len(rows), num_samples), dtype=np.uint64)
    parts[:] = _mix(np.uint64(seed % 2**64))
    for number in (
        np.uint64(step),
        np.asarray(rows, dtype=np.uint64)[:, None],
        np.arange(num_samples, dtype=np.uint64),
    ):
        parts = _mix(parts ^ _mix(number))
    return parts.ravel()


def uniforms(seeds: NDArray[np.uint64], start: int, count: int) -> NDArray[np.float64]:
    """Random numbers ``start`` to ``start + count`` of each seed's stream, in [0, 1): shape [len(seeds), count].

    Counted, not drawn from shared state: SplitMix64 (Steele et al. 2014) at position ``start + i``.
    """
    with np.errstate(over="ignore"):
        states = seeds[:, None] + np.arange(start + 1, start + count + 1, dtype=np.uint64) * _GOLDEN
    return (_mix(states) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9) + _GOLDEN
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)), dtype=np.uint64)
