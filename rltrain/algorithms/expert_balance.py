"""What has experts used evenly: a loss, whose weights are known before the forward that it is of; steps of a bias."""

from __future__ import annotations

import torch
from torch import Tensor


def load_of(choices: Tensor, num_experts: int) -> Tensor:
    """How many of ``choices`` [tokens, layers, experts per token] each expert has [layers, experts]."""
    layers = choices.shape[1]
    places = choices.long() + num_experts * torch.arange(layers, device=choices.device)[:, None]
    return places.flatten().bincount(minlength=layers * num_experts).view(layers, num_experts)


def balance_weights(load: Tensor, experts_per_token: int) -> Tensor:
    """W with sum_t sum_le W_le p_tle = mean_l N sum_e f_le P_le   (Fedus et al. 2021, Switch Transformer, eq. 4 to 6).

    load: tokens of each expert over a whole mini-batch [layers, experts]. N: experts of a layer. f: the share of the
    tokens that went to an expert; with k experts a token they add up to k, as in transformers' `router_aux_loss_coef`.
    P: mean over the tokens of p, the router's share for an expert. Where all are even, the loss is k. f has no
    gradient, so a mini-batch may be computed in any number of parts once it is known (Qiu et al. 2025, arXiv
    2501.11873, of a global batch).
    """
    layers, num_experts = load.shape
    tokens = load.sum(1, keepdim=True).clamp(min=1) / experts_per_token
    return num_experts * load / tokens.square() / layers


def bias_steps(load: Tensor, rate: float) -> Tensor:
    """rate x sign(mean load - load) by layer and expert   (Wang et al. 2024, arXiv 2408.15664, algorithm 1).

    load: tokens of each expert [layers, experts], as integers, so that an expert at the mean keeps its bias.
    """
    return rate * (load.sum(1, keepdim=True) - load.shape[1] * load).sign().float()
