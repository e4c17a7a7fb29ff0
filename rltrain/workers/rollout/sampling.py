"""From logits to tokens: counted random numbers, temperature, penalty, top-k, top-p, min-p, and the log-probs of the
drawn tokens.

An answer must depend on its seed alone, not on the batch it is in; torch.multinomial draws from shared state. So each
token inverts the distribution function at a number counted from (seed, position). Running totals over the vocabulary
cost more than everything else here, therefore the search has two levels: blocks of tokens, then one block.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rltrain.base.device import device_of
from rltrain.base.seeds import uniforms
from rltrain.workers.rollout.contract import Sampling

# Tokens of one block of the two-level search.
_BLOCK = 256
# Top-p looks for its threshold among this many of the likeliest tokens before it sorts all of them.
_NUCLEUS = 1024
_BELOW_ONE = 1 - 2.0**-23


def random_numbers(seeds: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.float32]:
    """Number ``places[i]`` of the stream of ``seeds[i]``, in [0, 1 - 2^-23].

    So far below 1 that the product with a float32 total is smaller than the total: the search for it never runs past
    the last token that has any mass. In float32, because not every accelerator computes in float64.
    """
    return np.minimum(uniforms(seeds, places, 1)[:, 0], _BELOW_ONE).astype(np.float32)


def choose(
    logits: Tensor, noise: Tensor, sampling: Sampling, never: Tensor | None = None, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the distribution function at ``noise`` (as from `random_numbers`).

    logits [n, vocabulary] in fp32, which are overwritten -> token ids [n] and their log-probs [n]. never: ids that are
    not drawn; they keep their place in the log-probs. seen [n, vocabulary]: tokens that stand before, for the penalty
    (None: there is none).
    """
    rows = max(1, device_of(logits).sampling_elements // logits.shape[-1])
    seen_parts = [None] * -(-len(logits) // rows) if seen is None else seen.split(rows)
    own = zip(logits.split(rows), noise.split(rows), seen_parts, strict=True)
    parts = [_choose(*part[:2], sampling, never, part[2]) for part in own]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([log_probs for _, log_probs in parts])


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Positive logits of tokens that stand before over the penalty, negative ones times it (Keskar et al. 2019, CTRL,
    section 4.1, as it is done since): a temperature may come before or after."""
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
    # Its own copy: the log-probs are those without the penalty.
    drawn = None if seen is None else penalised(logits, seen, sampling.repetition_penalty)
    weights = _weights(logits)
    # Taken before top_k, top_p and min_p, because the log-probs are those of the softmax over all tokens.
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
    """exp(logits), the largest of a row 1; overwrites them."""
    return logits.sub_(logits.amax(-1, keepdim=True)).exp_()


def _block_sums(weights: Tensor) -> Tensor:
    """[n, vocabulary] -> [n, blocks]; the last block is the remainder, possibly empty."""
    whole = weights.shape[-1] // _BLOCK * _BLOCK
    sums = weights[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(-1)
    return torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], -1)


def _search(weights: Tensor, sums: Tensor, noise: Tensor) -> Tensor:
    """The first token [n, 1] at which the running total exceeds ``noise`` times the total: block first, then token."""
    totals = sums.cumsum(-1)
    target = noise * totals[:, -1:]
    block = _first_above(totals, target)
    before = torch.cat([torch.zeros_like(target), totals], -1).gather(-1, block)
    places = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    outside = places >= weights.shape[-1]
    inside = weights.gather(-1, places.masked_fill(outside, 0)).masked_fill_(outside, 0).cumsum(-1)
    # The two sums round differently, and the remainder must stay below the block's own total.
    left = torch.minimum(target - before, inside[:, -1:] * _BELOW_ONE)
    # NaN exceeds nothing, and a search past the end of the vocabulary would hide it behind an error of the gather.
    return (block * _BLOCK + _first_above(inside, left)).clamp(max=weights.shape[-1] - 1)


def _first_above(totals: Tensor, target: Tensor) -> Tensor:
    """Where growing totals [n, m] first exceed the target [n, 1]: a block or token without mass is never chosen."""
    if device_of(totals).searches:
        return torch.searchsorted(totals, target, right=True)
    # Exact up to 2^24 columns. Sums of bool are no quicker there than a search.
    return (totals <= target).float().sum(-1, keepdim=True).long()


def restrict(weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """Zero the tokens [n, vocabulary] outside the ``top_k`` likeliest, then outside the likeliest that hold ``top_p``
    of these.

    Tokens as likely as the last one inside are inside as well, so the choice depends on the weights alone.
    """
    vocabulary = weights.shape[-1]
    limited = 0 < top_k < vocabulary
    if not limited and top_p >= 1:
        return weights
    # Whether fewer than all suffice is only known once computed, for which the host would wait at every token.
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
