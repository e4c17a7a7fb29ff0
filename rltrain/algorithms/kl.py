"""Estimators of KL(policy || reference) from the log-probs of sampled tokens. Schulman 2020, "Approximating KL divergence"."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def k1(log_ratio: Tensor) -> Tensor:
    """log(pi / pi_ref): unbiased, high variance, may be negative."""
    return log_ratio


def absolute(log_ratio: Tensor) -> Tensor:
    """|log(pi / pi_ref)|."""
    return log_ratio.abs()


def k2(log_ratio: Tensor) -> Tensor:
    """log(pi / pi_ref)^2 / 2: biased, low variance; its gradient is that of the KL."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r with r = pi_ref / pi: unbiased, never negative. Clamped as verl does: |log r| <= 20, value <= 10."""
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


def kl_per_token(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """KL estimate of each sampled token. Shapes: [tokens], [tokens] -> [tokens]; differentiable in ``log_probs``."""
    return KL_ESTIMATORS[kind](log_probs - ref_log_probs)
