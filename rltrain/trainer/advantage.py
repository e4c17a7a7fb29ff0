"""Advantages from scores: KL in the reward, estimator, whitening, and the samples without gradient.

Outcome estimators need only a few numbers per sample, which the driver has, so they run here. Turn estimators also run
here; the workers that store the tokens then spread their values over tokens. Token estimators run on the workers and
return moments only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rltrain.algorithms.advantages import OutcomeInputs, TurnInputs, find_estimator
from rltrain.algorithms.groups import SCORE_ROUNDING
from rltrain.algorithms.kl import FP32_ROUNDING, adapted_kl_coef, kl_rounding
from rltrain.algorithms.normalisation import normalise, shaped_reward
from rltrain.common.columns import names as c
from rltrain.common.columns.ragged import Ragged
from rltrain.config.schema import ScoringConfig
from rltrain.config.schema.algorithm import AlgorithmConfig
from rltrain.config.step_passes import StepPasses
from rltrain.runtime.samples import Samples
from rltrain.trainer.batching.balance import Ids, Layout
from rltrain.trainer.masked_samples import loss_masks
from rltrain.trainer.metrics import step as m
from rltrain.trainer.metrics.step import Metrics
from rltrain.trainer.progress import Progress
from rltrain.trainer.rewards import known_number
from rltrain.trainer.roles import Policy
from rltrain.workers.interface.tasks import TurnAdvantages


@dataclass(frozen=True)
class Whitening:
    """Affine map for token advantages: the loss uses (A - shift) * scale."""

    shift: float = 0.0
    scale: float = 1.0


class Advantages:
    """Advantage estimation. Holds the KL coefficient of the reward, which an adaptive controller updates every step."""

    def __init__(self, cfg: AlgorithmConfig, scoring: ScoringConfig, passes: StepPasses) -> None:
        self.kl_coef = cfg.kl_ctrl.kl_coef
        self._cfg, self._scoring = cfg, scoring
        self._passes = passes

    def restore(self, progress: Progress) -> None:
        """Restore the coefficient of an adaptive controller. A fixed coefficient is read from the config, which may
        have changed."""
        if progress.kl_coef is not None and self._cfg.kl_ctrl.type == "adaptive":
            self.kl_coef = progress.kl_coef

    def mask(self, samples: Samples) -> None:
        """Add the columns ``left_out`` and ``uncompared`` to the samples."""
        estimator, masks = self._passes.estimator, self._cfg.mask_truncated
        compares = self._passes.rewarded and (estimator.compares or not estimator.per_token)
        samples.update(loss_masks(samples, compares=compares, mask_truncated=masks, by_token=estimator.per_token))

    def estimate(self, samples: Samples, policy: Policy, layout: Layout) -> tuple[Whitening, Metrics]:
        """Compute A(x, y) of every sample, as ``advantage`` [n].

        It is 0 for masked samples (``left_out``), which are not in ``layout``. Without rewards it is 1 for all samples
        in supervised fine-tuning, else 0. Outcome and turn estimators compute their baseline over all samples that are
        not ``uncompared``, including masked ones.

        Token estimators also write the columns ``advantages`` and ``returns``, turn estimators ``advantages``.
        ``advantage`` is then the mean over the response, and the loss applies the returned whitening to the advantages.
        """
        samples.update({c.LOSS_TOKENS: np.where(samples[c.MASKED], 0, samples[c.LOSS_TOKENS])})
        if not self._passes.rewarded:
            # With the plain policy gradient, an advantage of 1 maximises the likelihood of the responses.
            samples.update({c.ADVANTAGE: np.full(len(samples), float(self._passes.supervised))})
            return Whitening(), {}
        # `_kl_penalty` updates `self.kl_coef` for the next step.
        coef = self.kl_coef
        samples.update({c.REWARD: shaped_reward(samples[c.SCORE], self._cfg)})
        metrics = self._kl_penalty(samples) if self._passes.kl_in_reward else {}
        if samples[c.MASKED].all():
            samples.update({c.ADVANTAGE: np.zeros(len(samples)), c.SIGNAL: np.zeros(len(samples), dtype=bool)})
            return Whitening(), metrics | m.outcome_advantage_metrics(samples)
        if self._passes.estimator.per_turn:
            return Whitening(), metrics | self._of_turns(samples, policy, layout, coef)
        if self._passes.token_advantages:
            moments = policy.token_advantages(samples, layout, coef)
            whitening = Whitening()
            if self._passes.estimator.whitens:
                whitening = Whitening(*moments["advantages"].whitening(float(self._rounding(samples, coef).max())))
            # Whitening is affine, so the mean over the tokens of a response can be whitened like the tokens.
            whitened = (samples[c.ADVANTAGE] - whitening.shift) * whitening.scale
            samples.update({c.ADVANTAGE: np.where(samples[c.MASKED], 0.0, whitened)})
            # The stored tokens are not whitened: sending shift and scale avoids a second copy of the column.
            return whitening, metrics | m.token_advantage_metrics(moments, whitening.shift, whitening.scale)
        compared = np.flatnonzero(~samples[c.EXCLUDED_FROM_BASELINE])
        terms = {
            name: torch.from_numpy(known_number(samples, name, self._scoring.reward.on_error)[compared])
            for name in self._cfg.gdpo_reward_keys
        }
        # Whitening uses only tokens that count in the loss.
        scores, groups, lengths = (
            torch.from_numpy(samples[name][compared]) for name in (c.REWARD, c.GROUP, c.LOSS_TOKENS)
        )
        baselines = None
        if self._passes.greedy_baseline:
            baselines = shaped_reward(torch.from_numpy(samples[c.BASELINE][compared]), self._cfg)
        rounding = torch.from_numpy(self._rounding(samples, coef)[compared])
        inputs = OutcomeInputs(scores, groups, lengths, terms, baselines, rounding)
        advantages: Tensor = find_estimator(self._cfg.adv_estimator)(inputs, self._cfg)
        advantages = normalise(advantages.double(), groups, lengths, self._cfg.adv_norm)
        values = np.zeros(len(samples))
        values[compared] = advantages.numpy()
        samples.update({c.ADVANTAGE: np.where(samples[c.MASKED], 0.0, values)})
        return Whitening(), metrics | m.outcome_advantage_metrics(samples)

    def _of_turns(self, samples: Samples, policy: Policy, layout: Layout, coef: float) -> Metrics:
        compared = np.flatnonzero(~samples[c.EXCLUDED_FROM_BASELINE])
        paid, states = (_ragged(samples[name][compared]) for name in (c.TURN_REWARDS, c.TURN_STATES))
        paid = paid.like(paid.values * self._cfg.reward_scaling)
        rewards = with_rest(paid, torch.from_numpy(samples[c.REWARD][compared]))
        groups, rounding = torch.from_numpy(samples[c.GROUP][compared]), self._rounding(samples, coef)[compared]
        inputs = TurnInputs(rewards, states, groups, torch.from_numpy(rounding))
        advantages = find_estimator(self._cfg.adv_estimator)(inputs, self._cfg)
        moments = policy.spread_over_turns(samples, layout, _of_ranks(samples, layout, advantages, compared))
        return m.token_advantage_metrics(moments, 0.0, 1.0)

    def _kl_penalty(self, samples: Samples) -> Metrics:
        """Subtract coef * KL from the reward, then update the coefficient for the next step."""
        coef = self.kl_coef
        samples.update({c.REWARD: samples[c.REWARD] - coef * samples[c.KL_SUM]})
        # Mean over responses of the mean over tokens: long responses must not dominate the controller.
        kl = float((samples[c.KL_SUM] / np.maximum(samples[c.POLICY_TOKENS], 1)).mean())
        self.kl_coef = adapted_kl_coef(coef, kl, len(samples), self._cfg.kl_ctrl)
        return {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coef}

    def _rounding(self, samples: Samples, coef: float) -> NDArray[np.float64]:
        """Return a bound on the rounding error of each reward [n], from its parts computed in fp32."""
        rounding = np.zeros(len(samples))
        if self._passes.kl_in_reward:
            rounding += abs(coef) * kl_rounding(samples[c.POLICY_TOKENS])
        if c.MODEL_SCORE in samples.numbers:
            weight = abs(self._scoring.reward_model.weight) * self._cfg.reward_scaling
            rounding += weight * np.abs(samples[c.MODEL_SCORE]) * FP32_ROUNDING
        return rounding

    def zero_advantage(self, samples: Samples) -> NDArray[np.bool_]:
        """Return a mask [n] of samples without gradient, which the update may skip."""
        if not self._passes.skips_silent:
            return np.array(samples[c.MASKED])
        # Exact comparison: a group of equal scores gets exactly 0, and any other advantage has a gradient.
        return ~samples[c.SIGNAL] if self._passes.token_advantages else samples[c.ADVANTAGE] == 0


def with_rest(paid: Ragged, rewards: Tensor) -> Ragged:
    """Add the rest of each reward [n] to the last turn of ``paid``, so that the turns of a sample sum to its reward."""
    of_turns = paid.sum()
    rest = rewards - of_turns
    # Set rounding errors of the sum to 0: they would make equal turns differ.
    rest = rest.where(rest.abs() > SCORE_ROUNDING * rewards.abs().maximum(of_turns.abs()), 0.0)
    values = paid.values.clone()
    values[paid.offsets[1:] - 1] += rest
    return paid.like(values)


def regroup_by_prompt(layout: Layout, groups: Ids) -> Layout:
    """Return ``layout`` with all samples of a group on the rank that has most of them, as one micro-batch. groups:
    [n]."""
    ids = np.concatenate(layout.ids)
    ranks = np.repeat(np.arange(len(layout.ids)), [len(of_rank) for of_rank in layout.ids])
    counts = np.zeros((int(groups.max(initial=-1)) + 1, len(layout.ids)), dtype=np.int64)
    np.add.at(counts, (groups[ids], ranks), 1)
    owners = counts.argmax(1)[groups[ids]]
    parts = [ids[owners == rank] for rank in range(len(layout.ids))]
    return Layout(parts, [[(len(part),)] for part in parts])


def _of_ranks(samples: Samples, layout: Layout, advantages: Ragged, ids: Ids) -> list[TurnAdvantages]:
    """Split turn advantages over the ranks. ids: the samples of the rows of ``advantages``, ascending; the layout has
    no other samples."""
    return [
        TurnAdvantages(
            advantages.select(np.searchsorted(ids, of_rank)).values.numpy(),
            np.concatenate([np.zeros(0, dtype=np.int64), *samples[c.TURN_TOKENS][of_rank]]),
        )
        for of_rank in layout.ids
    ]


def _ragged(rows: NDArray[np.object_]) -> Ragged:
    return Ragged.from_rows([torch.from_numpy(row) for row in rows])
