"""KL(policy || reference): estimates from the log-probs of sampled tokens, the exact KL, and its reward coefficient.

Schulman 2020, "Approximating KL divergence".
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rltrain.algorithms.shapes import PerToken
from rltrain.config.schema.algorithm import KLControlConfig

# Machine epsilon of float32, the dtype of the log-probs.
FP32_ROUNDING = 2.0**-23


def k1(log_ratio: PerToken) -> PerToken:
    """Return log(pi / pi_ref): unbiased, high variance, may be negative."""
    return log_ratio


def absolute(log_ratio: PerToken) -> PerToken:
    """Return |log(pi / pi_ref)|."""
    return log_ratio.abs()


def k2(log_ratio: PerToken) -> PerToken:
    """Return log(pi / pi_ref)^2 / 2: biased, low variance; its expected gradient is the gradient of the KL."""
    return log_ratio.square() / 2


def k3(log_ratio: PerToken) -> PerToken:
    """Return r - 1 - log r, r = pi_ref / pi: unbiased, nonnegative. Clamped as in verl: |log r| <= 20, value <= 10."""
    log_r = (-log_ratio).clamp(-20, 20)
    return (log_r.exp() - 1 - log_r).clamp(-10, 10)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": k1,
    "k1": k1,
    "abs": absolute,
    "mse": k2,
    "k2": k2,
    "low_var_kl": k3,
    "k3": k3,
}


def kl_per_token(log_probs: PerToken, ref_log_probs: PerToken, kind: str) -> PerToken:
    """Return the KL estimate per sampled token: [tokens], [tokens] -> [tokens]; differentiable in ``log_probs``.

    A name that ends with ``+`` combines the estimator's value with k2's gradient: among these estimators, only k2 has a
    gradient that estimates the KL's gradient.
    """
    log_ratio = log_probs - ref_log_probs
    if not kind.endswith("+"):
        return KL_ESTIMATORS[kind](log_ratio)
    # A straight-through estimator: k2 cancels in the value but keeps its gradient.
    carrier = k2(log_ratio)
    return carrier + (KL_ESTIMATORS[kind[:-1]](log_ratio) - carrier).detach()


def binary_kl(probs: PerToken, others: PerToken) -> PerToken:
    """Return the KL of the binary choice "this token or another" of ``probs`` from ``others``; all [tokens]."""
    # verl's value. It avoids log(0): if a token has probability 1, all others have probability 0.
    tiny = 1e-8
    of_token = probs * ((probs + tiny) / (others + tiny)).log()
    return of_token + (1 - probs) * ((1 - probs + tiny) / (1 - others + tiny)).log()


def kl_rounding(num_tokens: NDArray[np.int_]) -> NDArray[np.float64]:
    """Return a bound on the rounding error of the KL of a response [n]: one fp32 epsilon per token.

    Two passes of equal models may differ by this much if their micro-batches differ.
    """
    return num_tokens.astype(np.float64) * FP32_ROUNDING


def adapted_kl_coef(coef: float, kl: float, num_samples: int, cfg: KLControlConfig) -> float:
    """Return the next KL coefficient: proportional control to ``target_kl`` (Ziegler et al. 2019, section 2.2)."""
    if cfg.type == "fixed":
        return coef
    # The coefficient is kept across steps and in checkpoints, so a KL of NaN must not reach it.
    error = min(max(kl / cfg.target_kl - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / cfg.horizon) if math.isfinite(error) else coef
