"""The tokens that a loss treats differently.

They are chosen over the whole global mini-batch: a choice per micro-batch or rank would depend on how the batch was
cut.
"""

from __future__ import annotations

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
    """Which of this rank's tokens are among the selected of all ranks (a collective). Ties at the border are all taken.

    inputs: all tokens of this rank's part of the mini-batch; the ranks of a sequence-parallel group have the same part.
    num_tokens: tokens of the global mini-batch.
    """
    copies = cfg.ulysses_sequence_parallel_size
    mask = inputs.mask.values
    sums = torch.stack([(inputs.advantages * mask).double().sum(), (inputs.log_probs * mask).double().sum()])
    dist.all_reduce(sums)
    advantage, log_prob = (sums / max(num_tokens * copies, 1)).tolist()
    keys = selection.keys(inputs, noise, BatchMeans(advantage, log_prob), cfg).double()
    count = max(1, int(selection.share(cfg) * num_tokens))
    # The border is among the ``count`` smallest keys of some rank, so no more of them are gathered. Ranks with fewer
    # fill up with inf, because all gather tensors of one size.
    best = torch.full((count,), torch.inf, dtype=torch.float64, device=keys.device)
    rank_keys = keys.topk(min(count, len(keys)), largest=False).values
    best[: len(rank_keys)] = rank_keys
    everyone = [torch.empty_like(best) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, best)
    # Every key comes once from each rank of its sequence-parallel group.
    border = torch.cat(everyone).kthvalue(count * copies).values
    # With fewer candidates than ``count`` the border is inf, which is also the key of tokens that are no candidates.
    return (keys <= border) & keys.isfinite()


def noise(micro: Batch, seed: int, mini_batch: int) -> Tensor:
    """A uniform number per token, which depends only on the seed, the mini-batch, the sample and the token's place."""
    lengths = micro.ragged(c.RESPONSE_MASK).sum().tolist()
    drawn = uniforms(sample_seeds(seed, mini_batch, micro.dense(c.SAMPLE_ID).tolist(), 1, "selection"), 0, max(lengths))
    return torch.from_numpy(np.concatenate([row[:length] for row, length in zip(drawn, lengths, strict=True)]))
