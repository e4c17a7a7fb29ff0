"""Sampling from logits: counter-based random numbers, temperature, penalty, top-k, top-p, min-p, log-probs.

A response must depend only on its seed, not on its batch, but torch.multinomial draws from shared state. So each token
is sampled by inverting the distribution function at a number computed from (seed, position). Cumulative sums over the
vocabulary are the most expensive part, so the search has two levels: first over blocks of tokens, then within one
block.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rltrain.common.device import device_of
from rltrain.common.seeds import uniforms
from rltrain.workers.rollout.contract import Sampling

# Tokens per block in the two-level search.
_BLOCK = 256
# Top-p searches for its threshold among this many of the most likely tokens before it sorts the whole vocabulary.
_NUCLEUS = 1024
_BELOW_ONE = 1 - 2.0**-23


def random_numbers(seeds: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return number ``places[i]`` of the stream of ``seeds[i]``, in [0, 1 - 2^-23].

    The gap to 1 ensures that the product with a float32 total is less than the total, so the search never goes past the
    last token with nonzero probability. Float32, because some accelerators lack float64.
    """
    return np.minimum(uniforms(seeds, places, 1)[:, 0], _BELOW_ONE).astype(np.float32)


def choose(
    logits: Tensor, noise: Tensor, sampling: Sampling, never: Tensor | None = None, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the distribution function at ``noise`` (from `random_numbers`).

    logits [n, vocabulary] in fp32 (overwritten) -> token ids [n] and their log-probs [n]. never: ids that are not
    sampled but stay in the log-probs. seen [n, vocabulary]: tokens in the context, for the penalty (None: no penalty).
    """
    rows = max(1, device_of(logits).sampling_elements // logits.shape[-1])
    seen_parts = [None] * -(-len(logits) // rows) if seen is None else seen.split(rows)
    own = zip(logits.split(rows), noise.split(rows), seen_parts, strict=True)
    parts = [_choose(*part[:2], sampling, never, part[2]) for part in own]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([log_probs for _, log_probs in parts])


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of seen tokens by the penalty, multiply negative ones by it (Keskar et al. 2019, CTRL,
    section 4.1, in the form that is common today). A temperature may be applied before or after."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _choose(
    logits: Tensor, noise: Tensor, sampling: Sampling, never: Tensor | None, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    if sampling.greedy:
        best = logits if seen is None else penalised(logits, seen, sampling.repetition_penalty)
        best = best if never is None else best.index_fill(-1, never, -torch.inf)
        tokens = best.argmax(-1, keepdim=True)
        return tokens[:, 0], (logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True))[:, 0]
    if sampling.temperature != 1:
        logits.div_(sampling.temperature)
    # A copy, because the log-probs are computed from the logits without the penalty.
    drawn = None if seen is None else penalised(logits, seen, sampling.repetition_penalty)
    weights = _weights(logits)
    # The total is computed before top_k, top_p and min_p, because the log-probs refer to the full softmax.
    sums = _block_sums(weights)
    total = sums.sum(-1, keepdim=True)
    limited = 0 < sampling.top_k < weights.shape[-1] or sampling.top_p < 1 or sampling.min_p > 0
    if limited or never is not None or drawn is not None:
        allowed = weights if drawn is None else _weights(drawn)
        allowed = allowed if never is None else allowed.index_fill(-1, never, 0)
        if sampling.min_p > 0:
            least = sampling.min_p * allowed.amax(-1, keepdim=True)
            allowed = allowed.masked_fill(allowed < least, 0)
        allowed = restrict(allowed, sampling.top_k, sampling.top_p)
        tokens = _search(allowed, _block_sums(allowed), noise[:, None])
    else:
        tokens = _search(weights, sums, noise[:, None])
    return tokens[:, 0], (weights.gather(-1, tokens).log() - total.log())[:, 0]


def _weights(logits: Tensor) -> Tensor:
    """Return exp(logits), scaled to a row maximum of 1; overwrites the logits."""
    return logits.sub_(logits.amax(-1, keepdim=True)).exp_()


def _block_sums(weights: Tensor) -> Tensor:
    """Sum weights [n, vocabulary] over blocks: [n, blocks]. The last block is the remainder, possibly empty."""
    whole = weights.shape[-1] // _BLOCK * _BLOCK
    sums = weights[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(-1)
    return torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], -1)


def _search(weights: Tensor, sums: Tensor, noise: Tensor) -> Tensor:
    """Return the first token [n, 1] whose running total exceeds ``noise`` times the total: block first, then token."""
    totals = sums.cumsum(-1)
    target = noise * totals[:, -1:]
    block = _first_above(totals, target)
    before = torch.cat([torch.zeros_like(target), totals], -1).gather(-1, block)
    places = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    outside = places >= weights.shape[-1]
    inside = weights.gather(-1, places.masked_fill(outside, 0)).masked_fill_(outside, 0).cumsum(-1)
    # The two sums are rounded differently, and the remainder must stay below the block's total.
    left = torch.minimum(target - before, inside[:, -1:] * _BELOW_ONE)
    # NaN exceeds nothing; without the clamp the gather would fail past the vocabulary and hide the NaN.
    return (block * _BLOCK + _first_above(inside, left)).clamp(max=weights.shape[-1] - 1)


def _first_above(totals: Tensor, target: Tensor) -> Tensor:
    """Return the first index at which increasing totals [n, m] exceed the target [n, 1]; never a token with probability
    0."""
    if device_of(totals).searches:
        return torch.searchsorted(totals, target, right=True)
    # Some devices have a slow searchsorted, so count there. A float32 sum is exact up to 2^24 columns, and faster than
    # a sum of bool.
    return (totals <= target).float().sum(-1, keepdim=True).long()


def restrict(weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """Zero the weights [n, vocabulary] of tokens outside the ``top_k`` most likely, then outside the most likely of
    these that have a total of ``top_p``. Ties with the last token are kept, so the result depends only on the weights.
    """
    vocabulary = weights.shape[-1]
    limited = 0 < top_k < vocabulary
    if not limited and top_p >= 1:
        return weights
    # Without top_k, an accelerator sorts the whole vocabulary: checking if a part suffices would make the host wait at
    # every token.
    most = min(top_k if limited else _NUCLEUS if device_of(weights).is_cpu else vocabulary, vocabulary)
    ordered = weights.topk(most, -1).values if most < vocabulary else weights.sort(-1, descending=True).values
    if top_p >= 1:
        return weights.masked_fill(weights < ordered[:, -1:], 0)
    goal = top_p * (ordered if limited else weights).sum(-1, keepdim=True)
    if not limited and most < vocabulary and bool((ordered.sum(-1, keepdim=True) < goal).any()):
        ordered = weights.sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    last = (before < goal).sum(-1, keepdim=True) - 1
    return weights.masked_fill(weights < ordered.gather(-1, last), 0)
