"""Token rewards and token-level advantages, computed on the worker that stores the tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rltrain.algorithms.advantages import TokenInputs, find_estimator
from rltrain.algorithms.moments import Moments
from rltrain.algorithms.normalisation import shaped_reward
from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch
from rltrain.common.columns.ragged import Ragged
from rltrain.config.schema.algorithm import AlgorithmConfig
from rltrain.workers.interface.results import PassNumbers
from rltrain.workers.interface.tasks import TurnAdvantages


def token_advantages(batch: Batch, cfg: AlgorithmConfig, kl_coef: float) -> tuple[Batch, PassNumbers]:
    """Compute ``advantages`` (before whitening) and ``returns`` per token, and moments for whitening and metrics.

    The last token of a response is rewarded with its score (`shaped_reward`); with a KL in the reward, ``kl_coef``
    times its KL is subtracted from every token. Numbers: ``signal`` [n] (any nonzero advantage), ``advantage`` [n]
    (mean over the response), and moments over the loss tokens.
    """
    if not len(batch):
        return Batch(), PassNumbers()
    lengths = batch.dense(c.POLICY_TOKENS)
    rewards = Ragged(torch.zeros(int(lengths.sum()), dtype=torch.float64), lengths)
    # A response without policy tokens has no token to carry its score.
    rewards.values[rewards.from_end == 0] = shaped_reward(batch.dense(c.SCORE)[lengths > 0].double(), cfg)
    if cfg.use_kl_in_reward:
        rewards.values.sub_(kl_coef * batch.ragged(c.REF_KL).values)
    values = batch.ragged(c.VALUES) if c.VALUES in batch else None
    of_tokens = (c.OLD_LOG_PROBS, c.SUM_PI_SQUARED, c.IS_WEIGHTS) if c.SUM_PI_SQUARED in batch else ()
    log_probs, squares, weights = (
        column.like(column.values.double()) if column else None
        for column in (batch.ragged(name) if name in batch else None for name in of_tokens or [""] * 3)
    )
    inputs = TokenInputs(
        rewards,
        values.like(values.values.double()) if values else None,
        shaped_reward(batch.dense(c.BASELINE).double(), cfg) if c.BASELINE in batch else None,
        batch.dense(c.GROUP) if squares else None,
        log_probs,
        squares,
        weights,
    )
    estimate = find_estimator(cfg.adv_estimator)(inputs, cfg)
    quantities = {"returns": estimate.returns.values}
    if values:
        quantities |= {"values": values.values, "errors": estimate.returns.values - values.values}
    columns = {c.ADVANTAGES: estimate.advantages, c.RETURNS: estimate.returns}
    numbers = _numbers(batch, estimate.advantages, quantities)
    return Batch({name: column.like(column.values.float()) for name, column in columns.items()}), numbers


def spread_over_turns(batch: Batch, turns: TurnAdvantages) -> tuple[Batch, PassNumbers]:
    """Spread turn advantages as ``advantages`` per token. Numbers: as in `token_advantages`."""
    if not len(batch):
        return Batch(), PassNumbers()
    of_tokens = torch.from_numpy(np.repeat(turns.advantages, turns.tokens))
    advantages = Ragged(of_tokens, batch.dense(c.POLICY_TOKENS))
    numbers = _numbers(batch, advantages, {"returns": advantages.values})
    return Batch({c.ADVANTAGES: advantages.like(advantages.values.float())}), numbers


def _numbers(batch: Batch, advantages: Ragged, quantities: dict[str, Tensor]) -> PassNumbers:
    """Return numbers and moments. quantities: additional per-token quantities to measure."""
    quantities = {"advantages": advantages.values, **quantities}
    mask = batch.ragged(c.LOSS_MASK).values if c.LOSS_MASK in batch else slice(None)
    return PassNumbers(
        {
            c.SIGNAL: (advantages.like(advantages.values.abs()).sum() > 0).numpy(),
            c.ADVANTAGE: advantages.mean().nan_to_num().numpy(),
        },
        {name: Moments.of(quantity[mask]) for name, quantity in quantities.items()},
    )
