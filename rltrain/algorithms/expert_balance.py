"""Expert balance: weights of an auxiliary loss, computed before its forward pass, and updates of the router biases."""

from __future__ import annotations

import torch
from torch import Tensor


def load_of(choices: Tensor, num_experts: int) -> Tensor:
    """Count the tokens per expert [layers, experts] in ``choices`` [tokens, layers, experts per token]."""
    layers = choices.shape[1]
    places = choices.long() + num_experts * torch.arange(layers, device=choices.device)[:, None]
    return places.flatten().bincount(minlength=layers * num_experts).view(layers, num_experts)


def balance_weights(load: Tensor, experts_per_token: int) -> Tensor:
    """Return weights W of router probabilities for the load-balancing loss   (Fedus et al. 2021, Switch, eq. 4 to 6).

    They satisfy sum_t sum_le W_le p_tle = mean_l N sum_e f_le P_le.

    load: tokens of each expert over a whole mini-batch [layers, experts]. N: experts per layer. f: share of the tokens
    routed to an expert; with k experts per token they sum to k, as in transformers' `router_aux_loss_coef`. P: mean
    over tokens of the router's probability p of an expert. With perfect balance the loss is k. f has no gradient, so
    once it is known the mini-batch can be split in any way (Qiu et al. 2025, arXiv 2501.11873, for a global batch).
    """
    layers, num_experts = load.shape
    tokens = load.sum(1, keepdim=True).clamp(min=1) / experts_per_token
    return num_experts * load / tokens.square() / layers


def bias_steps(load: Tensor, rate: float) -> Tensor:
    """Return bias updates: rate x sign(mean load - load)   (Wang et al. 2024, arXiv 2408.15664, algorithm 1).

    load: tokens of each expert [layers, experts], as integers, so that an expert at the mean keeps its bias.
    """
    return rate * (load.sum(1, keepdim=True) - load.shape[1] * load).sign().float()
