"""Token selections of a loss, and weights of responses that depend on the rest of their group.

They are computed over the whole global mini-batch: per micro-batch or rank they would depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.aggregation import Denominators
from rltrain.algorithms.entropy import ENTROPY_ROUNDING, certainty
from rltrain.algorithms.policy_losses import BatchMeans, PolicyLossEntry, PolicyLossInputs, Selection
from rltrain.algorithms.surrogate import GroupWeights
from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch
from rltrain.common.columns.ragged import Ragged
from rltrain.common.seeds import sample_seeds, uniforms
from rltrain.config.schema import ActorConfig


def add_batch_level_selection(
    micros: Sequence[Batch],
    inputs: PolicyLossInputs,
    seeds: tuple[int, int],
    denominators: Denominators,
    entry: PolicyLossEntry,
    cfg: ActorConfig,
) -> None:
    """Add the columns ``selected``, ``group_weight`` and ``uncertain`` to micro-batches, if the loss uses them.

    A collective. micros: non-empty micro-batches of this rank in one mini-batch. inputs: all of their tokens, on the
    CPU, because some accelerators lack float64 and there are only a few numbers per token. seeds: seeds of the step's
    noise and of the mini-batch.
    """
    mask, empty, num_tokens = inputs.mask, torch.zeros(0), denominators.tokens
    if entry.selection:
        numbers = torch.cat([empty.double(), *(noise(micro, *seeds) for micro in micros)])
        _add_tokens(micros, c.SELECTED, mask.like(select(inputs, numbers, entry.selection, num_tokens, cfg)))
    if cfg.top_entropy_quantile < 1:
        entropies = torch.cat([empty, *(micro.ragged(c.ENTROPY).values for micro in micros)])
        keys, copies = certainty(entropies, mask.values), cfg.ranks_per_sample
        chosen = smallest_share(keys, cfg.top_entropy_quantile, num_tokens, copies, rounding=ENTROPY_ROUNDING)
        _add_tokens(micros, c.HIGH_ENTROPY, mask.like(chosen))
    if entry.group_weights:
        groups = torch.cat([empty.long(), *(micro.dense(c.GROUP) for micro in micros)])
        weights = weigh(inputs, groups, entry.group_weights, denominators, cfg)
        for micro, part in zip(micros, weights.split([len(micro) for micro in micros]), strict=True):
            micro.update({c.GROUP_WEIGHT: part})


def _add_tokens(micros: Sequence[Batch], name: str, tokens: Ragged) -> None:
    for micro, part in zip(micros, tokens.split([len(micro) for micro in micros]), strict=True):
        micro.update({name: part})


def select(inputs: PolicyLossInputs, noise: Tensor, selection: Selection, num_tokens: int, cfg: ActorConfig) -> Tensor:
    """Return a mask of this rank's tokens, selected among the tokens of all ranks (a collective).

    With a share, all ties at the threshold are selected. With a largest mean, all are excluded. inputs: all tokens of
    this rank's part of the mini-batch; ranks that share sequences or matrices have the same part. num_tokens: tokens of
    the global mini-batch.
    """
    copies = cfg.ranks_per_sample
    mask = inputs.mask.values
    sums = torch.stack([(inputs.advantages * mask).double().sum(), (inputs.log_probs * mask).double().sum()])
    dist.all_reduce(sums)
    advantage, log_prob = (sums / max(num_tokens * copies, 1)).tolist()
    keys = selection.keys(inputs, noise, BatchMeans(advantage, log_prob), cfg).double()
    if selection.share is None:
        assert selection.largest_mean is not None
        return keys < _border_of_mean(_smallest(keys, len(keys), copies), selection.largest_mean(cfg))
    return smallest_share(keys, selection.share(cfg), num_tokens, copies)


def smallest_share(keys: Tensor, share: float, num_tokens: int, copies: int, rounding: float = 0.0) -> Tensor:
    """Return a mask of this rank's tokens in the ``share`` of ``num_tokens`` with the smallest keys (a collective).

    At least one token is selected, and all ties at the threshold, to within ``rounding``. copies: see `_everyones`.
    """
    count = max(1, int(share * num_tokens))
    # The threshold is among the ``count`` smallest keys of some rank, so no more need to be gathered.
    smallest = _smallest(keys, count, copies)
    # With fewer candidates than ``count`` all of them are selected.
    return (keys <= smallest[count - 1] + rounding) if count <= len(smallest) else keys.isfinite()


def _smallest(keys: Tensor, count: int, copies: int) -> Tensor:
    """Return the finite keys among the ``count`` smallest of every rank, sorted (a collective)."""
    keys = keys[keys.isfinite()]
    rank_keys = keys.topk(min(count, len(keys)), largest=False).values
    return _everyones(rank_keys[:, None], copies)[0][:, 0].sort().values


def _everyones(rows: Tensor, copies: int) -> tuple[Tensor, slice]:
    """Return the float64 rows [n, k] of all ranks, and the slice of this rank's rows (a collective).

    The ``copies`` ranks that share sequences or matrices have the same rows, which are returned once.
    """
    ranks, rank = range(dist.get_world_size()), dist.get_rank()
    size = torch.tensor([len(rows)])
    sizes = [torch.empty_like(size) for _ in ranks]
    dist.all_gather(sizes, size)
    # Rows are padded, because an all-gather needs equal sizes.
    padded = rows.new_zeros((int(torch.cat(sizes).max()), rows.shape[1]))
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in ranks]
    dist.all_gather(gathered, padded)
    parts = [gathered[one][: int(sizes[one])] for one in ranks[::copies]]
    first = sum(map(len, parts[: rank // copies]))
    return torch.cat(parts), slice(first, first + len(rows))


def weigh(
    inputs: PolicyLossInputs, groups: Tensor, function: GroupWeights, counts_of_all: Denominators, cfg: ActorConfig
) -> Tensor:
    """Return the weights of this rank's responses [n] (a collective); 0 for responses without a loss token.

    The loss is a mean over responses; the weights turn it into a mean over groups. Responses without a gradient may be
    missing in ``inputs``. inputs: as for `select`. groups: prompt group of every response [n].
    """
    mask = inputs.mask
    counts = mask.sum()
    scores = mask.like(inputs.log_ratio * mask.values).sum() / counts.clamp(min=1)
    labels = mask.like(inputs.advantages * mask.values).sum().sign()
    rows = torch.stack([scores.double(), labels.double(), groups.double()], 1)
    there, weights = counts > 0, torch.zeros(len(counts))
    everyone, own = _everyones(rows[there], cfg.ranks_per_sample)
    weights[there] = function(everyone[:, 0], everyone[:, 1], everyone[:, 2].long(), cfg)[own].float()
    return weights * (counts_of_all.sequences / max(counts_of_all.groups, 1))


def _border_of_mean(keys: Tensor, largest: float) -> float:
    """Return the threshold for a largest mean: the smallest excluded key, with which the mean of the smallest keys
    would exceed ``largest``. keys: sorted keys."""
    means = keys.cumsum(0) / torch.arange(1, len(keys) + 1)
    over = keys[means > largest]
    return float(over[0]) if len(over) else math.inf


def noise(micro: Batch, seed: int, mini_batch: int) -> Tensor:
    """Return a uniform number per token, a function of seed, mini-batch, sample and token position only."""
    lengths = micro.ragged(c.RESPONSE_MASK).sum().tolist()
    drawn = uniforms(sample_seeds(seed, mini_batch, micro.dense(c.SAMPLE_ID).tolist(), 1, "selection"), 0, max(lengths))
    return torch.from_numpy(np.concatenate([row[:length] for row, length in zip(drawn, lengths, strict=True)]))
