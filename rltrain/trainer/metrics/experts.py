"""Load of the experts during updates: metrics and alarms."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.trainer.metrics.step import Metrics

log = logging.getLogger(__name__)

# In a single step an expert may be unused by chance. It counts as dead after _IDLE_STEPS steps in a row without tokens,
# if its earlier share predicts at least _TOKENS_MISSED tokens for these steps. An expert that is still in use has no
# tokens for so long with a probability of 1 in 5e8.
_IDLE_STEPS, _TOKENS_MISSED = 5, 20
# The load counts as uneven if for _GROWN_STEPS steps in a row MaxVio is more than _TIMES_GROWN times its mean over the
# first steps, and more than _LEAST_GROWTH above it. A growth of 1 is one mean load more on the busiest expert.
_GROWN_STEPS, _TIMES_GROWN, _LEAST_GROWTH = 5, 2.0, 1.0
_WAYS_OUT = (
    "Its routers may be collapsing: lower actor_rollout_ref.actor.optim.lr, replay the experts of the old_log_prob "
    "pass or the engine (actor_rollout_ref.actor.router_replay.mode=R2 or R3), or add a load-balancing loss "
    "(actor_rollout_ref.actor.router_aux_loss_coef=0.001)"
)
_STATE = "tokens", "tokens_at_last_use", "idle_steps", "first_max_vio", "counters"


class ExpertLoad:
    """Metrics of the expert load, and warnings, each at most once per run.

    num_experts: per layer (0: a dense policy). compiled: the layers are compiled and do not expose their routing.
    """

    def __init__(self, num_experts: float, *, compiled: bool) -> None:
        self._has_experts, self._compiled = bool(num_experts), compiled
        self._warned_unseen = False
        self._tokens = self._tokens_at_last_use = self._idle_steps = np.zeros((0, 0), dtype=np.int64)
        """[layers, experts]: tokens so far; tokens of the layer when the expert was last used; steps since then."""
        self._first_max_vio = np.zeros(0)
        self._grown_steps = 0
        self._warned_dead = self._warned_uneven = False

    def measure(self, load: NDArray[np.int64] | None) -> Metrics:
        """Return metrics of a step. load: tokens that its update sent to each expert [layers, experts].

        MaxVio of a layer is (largest load - mean load) / mean load (Wang et al. 2024, arXiv 2408.15664, eq. 4).
        """
        if load is None:
            self._tell_unseen()
            return {}
        if not load.sum():  # no sample had a gradient
            return {}
        max_vio = load.max(1) / load.mean(1) - 1
        metrics = {
            "moe/max_vio/mean": float(max_vio.mean()),
            "moe/max_vio/max": float(max_vio.max()),
            "moe/idle_experts": float((load == 0).sum()),
            "moe/dead_experts": float(self._dead(load)),
        }
        self._compare_with_first_steps(metrics["moe/max_vio/mean"])
        return metrics

    def _tell_unseen(self) -> None:
        if self._has_experts and not self._warned_unseen:
            self._warned_unseen = True
            why = "compiled layers do not expose" if self._compiled else "its routers do not expose"
            log.warning("note: the load of the policy's experts is not measured, because %s their routing", why)

    def _dead(self, load: NDArray[np.int64]) -> int:
        """Return the number of experts that were used before and no longer are."""
        if not self._tokens.size:
            self._tokens = self._tokens_at_last_use = self._idle_steps = np.zeros_like(load)
        self._tokens = self._tokens + load
        of_layer = self._tokens.sum(1, keepdims=True)
        self._tokens_at_last_use = np.where(load > 0, of_layer, self._tokens_at_last_use)
        self._idle_steps = np.where(load > 0, 0, self._idle_steps + 1)
        share = self._tokens / np.maximum(self._tokens_at_last_use, 1)
        missed = share * (of_layer - self._tokens_at_last_use)
        dead = (self._idle_steps >= _IDLE_STEPS) & (missed >= _TOKENS_MISSED)
        number = int(dead.sum())
        if number and not self._warned_dead:
            self._warned_dead = True
            layer, expert = np.argwhere(dead)[0].tolist()
            log.warning(
                "%d of the policy's experts got tokens before but none in the last %d updates, such as expert %d of "
                "MoE layer %d, counted from 0 (moe/dead_experts counts them in every step). %s",
                number, _IDLE_STEPS, expert, layer, _WAYS_OUT
            )  # fmt: skip
        return number

    def _compare_with_first_steps(self, max_vio: float) -> None:
        if len(self._first_max_vio) < _GROWN_STEPS:
            self._first_max_vio = np.append(self._first_max_vio, max_vio)
            return
        first = float(self._first_max_vio.mean())
        has_grown = max_vio > max(_TIMES_GROWN * first, first + _LEAST_GROWTH)
        self._grown_steps = self._grown_steps + 1 if has_grown else 0
        if self._grown_steps >= _GROWN_STEPS and not self._warned_uneven:
            self._warned_uneven = True
            log.warning(
                "the load of the policy's experts has become uneven: moe/max_vio/mean is %.3g, and was %.3g in the "
                "first updates. %s", max_vio, first, _WAYS_OUT
            )  # fmt: skip

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the state for a checkpoint; empty if nothing was measured."""
        if not self._tokens.size:
            return {}
        counters = np.array([self._grown_steps, self._warned_dead, self._warned_uneven], dtype=np.int64)
        arrays = self._tokens, self._tokens_at_last_use, self._idle_steps, self._first_max_vio, counters
        return dict(zip(_STATE, arrays, strict=True))

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore from ``state``."""
        if not state:
            return
        self._tokens, self._tokens_at_last_use, self._idle_steps, self._first_max_vio, counters = (
            state[name] for name in _STATE
        )
        self._grown_steps = int(counters[0])
        self._warned_dead, self._warned_uneven = (bool(flag) for flag in counters[1:])
