"""The tokens that a loss treats differently.

They are chosen over the whole global mini-batch: a choice per micro-batch or rank would depend on how the batch was
cut.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.policy_losses import BatchMeans, PolicyLossInputs, Selection
from rltrain.base.columns import names as c
from rltrain.base.columns.batch import Batch
from rltrain.base.seeds import sample_seeds, uniforms
from rltrain.config.schema import ActorConfig


def select(inputs: PolicyLossInputs, noise: Tensor, selection: Selection, num_tokens: int, cfg: ActorConfig) -> Tensor:
    """Which of this rank's tokens are among the selected of all ranks (a collective). Ties at the border are all taken
    by a share, and all left out by a largest mean.

    inputs: all tokens of this rank's part of the mini-batch; the ranks of a sequence-parallel group have the same part.
    num_tokens: tokens of the global mini-batch.
    """
    copies = cfg.ulysses_sequence_parallel_size
    mask = inputs.mask.values
    sums = torch.stack([(inputs.advantages * mask).double().sum(), (inputs.log_probs * mask).double().sum()])
    dist.all_reduce(sums)
    advantage, log_prob = (sums / max(num_tokens * copies, 1)).tolist()
    keys = selection.keys(inputs, noise, BatchMeans(advantage, log_prob), cfg).double()
    if selection.share is None:
        assert selection.largest_mean is not None
        return keys < _border_of_mean(_smallest(keys, len(keys), copies), selection.largest_mean(cfg))
    count = max(1, int(selection.share(cfg) * num_tokens))
    # The border is among the ``count`` smallest keys of some rank, so no more of them are gathered.
    smallest = _smallest(keys, count, copies)
    # With fewer candidates than ``count`` all of them are selected.
    return (keys <= smallest[count - 1]) if count <= len(smallest) else keys.isfinite()


def _smallest(keys: Tensor, count: int, copies: int) -> Tensor:
    """The finite ones among the ``count`` smallest keys of every rank, in order (a collective).

    Every key comes once from each of the ``copies`` ranks of its sequence-parallel group, and is returned once.
    """
    keys = keys[keys.isfinite()]
    rank_keys = keys.topk(min(count, len(keys)), largest=False).values
    size = torch.tensor(len(rank_keys))
    dist.all_reduce(size, dist.ReduceOp.MAX)
    # Ranks with fewer fill up with inf, because all gather tensors of one size.
    best = torch.full((int(size),), torch.inf, dtype=torch.float64)
    best[: len(rank_keys)] = rank_keys
    everyone = [torch.empty_like(best) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, best)
    everything = torch.cat(everyone)
    return everything[everything.isfinite()].sort().values[::copies]


def _border_of_mean(keys: Tensor, largest: float) -> float:
    """The smallest key that is too much: with it the mean of the keys up to it is over ``largest``. keys: in order."""
    means = keys.cumsum(0) / torch.arange(1, len(keys) + 1)
    over = keys[means > largest]
    return float(over[0]) if len(over) else math.inf


def noise(micro: Batch, seed: int, mini_batch: int) -> Tensor:
    """A uniform number per token, which depends only on the seed, the mini-batch, the sample and the token's place."""
    lengths = micro.ragged(c.RESPONSE_MASK).sum().tolist()
    drawn = uniforms(sample_seeds(seed, mini_batch, micro.dense(c.SAMPLE_ID).tolist(), 1, "selection"), 0, max(lengths))
    return torch.from_numpy(np.concatenate([row[:length] for row, length in zip(drawn, lengths, strict=True)]))
