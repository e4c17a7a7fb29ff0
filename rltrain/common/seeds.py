"""Random streams: pure functions of the run's seed, a purpose and ordered numbers such as step and epoch.

A resumed run, a different number of ranks or a different engine must draw the same numbers. Therefore nothing is drawn
from shared state. Bulk draws of the driver use Philox. Numbers per sample and token are counter-based, from SplitMix64
at a position. No two purposes share a stream. Streams inside libraries are not covered, such as torch's initialization
of a new head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# The number of a purpose is its index in this tuple, so append to it and never reorder it.
PURPOSES = ("train", "val", "mini_batches", "revisit", "selection", "subset", "environment", "mixing")
# 2^64 divided by the golden ratio: SplitMix64's increment.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def stream(seed: int, purpose: str, *numbers: int) -> np.random.Philox:
    """Return a generator of 64-bit numbers (``random_raw``), which NumPy guarantees across versions.

    numbers: integers in [0, 2^32).
    """
    return np.random.Philox(_sequence(seed, purpose, *numbers))


def order_stream(seed: int, epoch: int) -> np.random.Philox:
    """Return the stream that orders the prompts of an epoch. It has no purpose number, because it existed before
    purposes were introduced.
    """
    return np.random.Philox(np.random.SeedSequence([seed % 2**64, epoch]))


def name_seed(seed: int, *names: str) -> int:
    """Return a seed below 2^64 per name, for generators of other libraries (new adapters)."""
    # Python's hash() of a string differs between processes.
    digest = hashlib.sha256(" ".join((str(seed), *names)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def sample_seeds(
    seed: int, step: int | NDArray[np.int64], rows: Sequence[int], num_samples: int, purpose: str = "train"
) -> NDArray[np.uint64]:
    """Return one seed per sample, prompt-major: a function of (seed, purpose, step, prompt, sample), in this order.

    step: one for all rows, or one per row.
    """
    parts = np.full((len(rows), num_samples), _sequence(seed, purpose).generate_state(1, np.uint64)[0])
    # The order of these numbers is part of every run's results: a different order gives different responses.
    for number in (
        np.asarray(step, dtype=np.uint64).reshape(-1, 1),
        np.asarray(rows, dtype=np.uint64)[:, None],
        np.arange(num_samples, dtype=np.uint64),
    ):
        # Each number is mixed in before the next, so (row 1, sample 2) and (row 2, sample 1) get different seeds.
        parts = _mix(parts ^ _mix(number))
    return parts.ravel()


def uniforms(seeds: NDArray[np.uint64], start: int | NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Return numbers ``start`` (or one per seed) to ``start + count`` of each stream, in [0, 1): [len(seeds), count].

    They are counter-based: SplitMix64 (Steele et al. 2014) at position ``start + i``, except for the addition in
    `_mix`.
    """
    with np.errstate(over="ignore"):
        # SplitMix64 adds its increment before mixing, so the number at position 0 uses increment 1.
        places = np.asarray(start, dtype=np.uint64).reshape(-1, 1) + np.arange(1, count + 1, dtype=np.uint64)
        states = seeds[:, None] + places * GOLDEN
    # A float64 represents 53 bits exactly. With more bits, the largest numbers would be rounded up to 1.
    return (_mix(states) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _sequence(seed: int, purpose: str, *numbers: int) -> np.random.SeedSequence:
    # Numbers are in the spawn key, because SeedSequence([1, 2]) equals SeedSequence([1, 2, 0]). The modulus makes
    # negative seeds positive, because SeedSequence rejects them.
    return np.random.SeedSequence(seed % 2**64, spawn_key=(PURPOSES.index(purpose), *numbers))


def _mix(state: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        # Without the addition, SplitMix64's mix would map 0 to 0, and rows and samples are counted from 0.
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9) + GOLDEN
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)), dtype=np.uint64)
