"""Gated delta nets over packed sequences (Yang et al. 2025, arXiv 2412.06464): Qwen3-Next, Qwen3.5, OLMo Hybrid.

Such a layer carries a state through its sample: the last tokens of a short convolution, and per head a memory that maps
keys to values. The layer of transformers does not reset the state between the samples of a packed row. Therefore its
forward is replaced by one that runs segment by segment. The state after a prompt is computed once, and every response
starts from it. In the embedded engine, the cache stores this state. Parameters keep their names from transformers.

On CUDA, the kernels of flash-linear-attention and causal-conv1d are used if they are installed. They are called with
their documented arguments but have not been run here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import softplus
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from rltrain.common.device import send
from rltrain.common.errors import ConfigError
from rltrain.config.schema.families import family
from rltrain.models.attention.delta_rule import delta_rule, fused_rule
from rltrain.models.attention.packing import AttentionPlan
from rltrain.models.attention.ulysses import share_of_heads, share_of_tokens


class State(NamedTuple):
    """State of a layer for n samples: the last tokens before the convolution [n, width - 1, channels], and the memory
    [n, heads, key size, value size] in fp32.
    """

    tokens: Tensor
    memory: Tensor


class Projected(NamedTuple):
    """Projections of the hidden states: query, key, value [tokens, heads, size], and the raw step size and decay
    [tokens, heads]. Queries and keys may have fewer heads.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    step: Tensor
    decay: Tensor


class Weights(NamedTuple):
    """Weights of a layer, or of one rank's share of its heads. filters [channels, width]; all others [heads]."""

    filters: Tensor
    bias: Tensor | None
    log_decay: Tensor
    decay_bias: Tensor


# -- transformers' modules ---------------------------------------------------------------------------------------------


def adopt(model: PreTrainedModel) -> None:
    """Replace the forward of a model's gated delta nets by one for packed rows and the embedded engine's cache.

    Raises ConfigError if the layers do not have the expected structure.
    """
    text = model.config.get_text_config()
    if not family(text.model_type).gated_delta_nets:
        return
    expected = list(getattr(text, "layer_types", ())).count("linear_attention")
    num_nets = 0
    for layer in model.modules():
        net = getattr(layer, "linear_attn", None)
        if net is None or not all(hasattr(net, name) for name in ("conv1d", "A_log", "dt_bias", "num_k_heads")):
            continue
        num_nets += 1
        # Older transformers versions do not pass a forward's arguments to these layers. Recomputation calls the hook
        # again with the same arguments.
        layer.register_forward_pre_hook(_keep_arguments, with_kwargs=True)
        net.forward = partial(_forward, net)
    if num_nets != expected:
        raise ConfigError(
            f"{num_nets} of the {expected} recurrent layers of {type(model).__name__} are supported gated delta nets. "
            "Try another version of transformers."
        )


def _keep_arguments(layer: Any, _: Any, arguments: dict[str, Any]) -> None:
    names = ("rltrain_plan", "rltrain_group", "rltrain_cache")
    vars(layer.linear_attn)["rltrain_arguments"] = [arguments.get(name) for name in names]


def _forward(net: Any, hidden_states: Tensor, *_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor:
    """Run the layer on a packed row [1, tokens, hidden], or on the engine's rows [rows, 1, hidden]. Returns the same
    shape."""
    plan, group, states = vars(net).pop("rltrain_arguments", (None, None, None))
    if (plan is None and states is None) or attention_mask is not None:
        raise NotImplementedError(f"{type(net).__name__} was called without a packing plan, or with a custom mask")
    projected, gate = _project(net, hidden_states.flatten(0, 1))
    weights = Weights(net.conv1d.weight.squeeze(1), net.conv1d.bias, net.A_log, net.dt_bias)
    advance = partial(_advance, net=net)
    if states is not None:
        before, alone = states.state_before(net.layer_idx), not states.is_prefill
        lengths = (1,) * len(hidden_states) if alone else plan.query_lengths
        core, after = advance(projected, weights, lengths=lengths, before=before)
        states.keep_state(net.layer_idx, after)
    elif group is None:
        core = _by_plan(advance, projected, weights, plan)
    else:
        core = _with_others(advance, projected, weights, plan, group)
    norm, last = (net.norm, net.out_proj) if hasattr(net, "out_proj") else (net.o_norm, net.o_proj)
    core = norm(core.to(hidden_states.dtype).flatten(0, 1), gate.flatten(0, 1))
    return last(core.view(*hidden_states.shape[:2], -1))


def _project(net: Any, hidden: Tensor) -> tuple[Projected, Tensor]:
    """Project hidden [tokens, size]. Returns the projections and the gate of the output [tokens, heads, size]."""
    if hasattr(net, "in_proj_qkvz"):
        projections = net.fix_query_key_value_ordering(net.in_proj_qkvz(hidden[None]), net.in_proj_ba(hidden[None]))
        query, key, value, gate, step, decay = (projection[0] for projection in projections)
        return Projected(query, key, value, step, decay), gate
    if hasattr(net, "in_proj_qkv"):
        parts = net.in_proj_qkv(hidden).split([net.key_dim, net.key_dim, net.value_dim], -1)
        gate, step, decay = net.in_proj_z(hidden), net.in_proj_b(hidden), net.in_proj_a(hidden)
    else:
        parts = net.q_proj(hidden), net.k_proj(hidden), net.v_proj(hidden)
        gate, step, decay = net.g_proj(hidden), net.b_proj(hidden), net.a_proj(hidden)
    sizes = (net.head_k_dim, net.head_k_dim, net.head_v_dim)
    query, key, value = (part.unflatten(-1, (-1, size)) for part, size in zip(parts, sizes, strict=True))
    return Projected(query, key, value, step, decay), gate.unflatten(-1, (-1, net.head_v_dim))


# -- segments, prompts and ranks ---------------------------------------------------------------------------------------

Advance = Callable[..., tuple[Tensor, State]]


def _by_plan(advance: Advance, projected: Projected, weights: Weights, plan: AttentionPlan) -> Tensor:
    """Compute outputs [tokens, heads, value size]: first of segments without a prefix, then of responses, which start
    from the final states of their prompts."""
    if not plan.has_prefixes:
        return advance(projected, weights, lengths=plan.query_lengths, before=None)[0]
    order, back, firsts, seconds, prompts = _rounds(plan, projected.query.device)
    projected = Projected(*(tensor.index_select(0, order) for tensor in projected))
    ends = (sum(firsts), sum(seconds))
    first_round, two = (Projected(*parts) for parts in zip(*(tensor.split(ends) for tensor in projected), strict=True))
    core, after = advance(first_round, weights, lengths=firsts, before=None)
    start = State(*(tensor.index_select(0, prompts) for tensor in after))
    second_core, _ = advance(two, weights, lengths=seconds, before=start)
    return torch.cat([core, second_core]).index_select(0, back)


@lru_cache(4)
# The first call may be in inference mode, and autograd cannot save tensors created in that mode.
@torch.inference_mode(False)
def _rounds(
    plan: AttentionPlan, device: torch.device
) -> tuple[Tensor, Tensor, tuple[int, ...], tuple[int, ...], Tensor]:
    """Return the order of tokens in which segments without a prefix come first, the inverse of this order, the segment
    lengths in both groups, and for each segment with a prefix the index of its prompt in the first group.
    """
    firsts = [segment for segment in plan.segments if not segment.prefix_length]
    seconds = [segment for segment in plan.segments if segment.prefix_length]
    order = torch.cat([torch.arange(segment.start, segment.stop) for segment in (*firsts, *seconds)])
    place = {(segment.start, segment.stop): number for number, segment in enumerate(firsts)}
    prompts = torch.tensor([place[segment.prefix] for segment in seconds])
    first_lengths, two = (tuple(segment.stop - segment.start for segment in segments) for segments in (firsts, seconds))
    return send(order, device), send(order.argsort(), device), first_lengths, two, send(prompts, device)


def _with_others(
    advance: Advance, projected: Projected, weights: Weights, plan: AttentionPlan, group: ProcessGroup
) -> Tensor:
    """Compute the outputs of `_by_plan` if each rank holds a slice of the tokens: a rank computes all tokens for its
    share of the heads."""
    ranks, rank = group.size(), group.rank()
    numbers = torch.stack([projected.step, projected.decay], -1)
    parts = [tensor.transpose(0, 1)[None] for tensor in (*projected[:3], numbers)]
    query, key, value, numbers = (tensor[0].transpose(0, 1) for tensor in share_of_heads(group, *parts))
    filters = [
        # Filters are repeated in the same way as `share_of_heads` repeats their heads.
        part.unflatten(0, tensor.shape[1:]).repeat_interleave(math.lcm(tensor.shape[1], ranks) // tensor.shape[1], 0)
        for part, tensor in zip(
            weights.filters.split([tensor[0].numel() for tensor in projected[:3]]), projected[:3], strict=True
        )
    ]
    own_weights = Weights(
        torch.cat([kernel.chunk(ranks)[rank].flatten(0, 1) for kernel in filters]),
        None,
        weights.log_decay.chunk(ranks)[rank],
        weights.decay_bias.chunk(ranks)[rank],
    )
    core = _by_plan(advance, Projected(query, key, value, *numbers.unbind(-1)), own_weights, plan)
    return share_of_tokens(group, core[None])[0]


# -- a layer over consecutive segments ---------------------------------------------------------------------


def _advance(
    projected: Projected, weights: Weights, *, lengths: Sequence[int], before: State | None, net: Any
) -> tuple[Tensor, State]:
    """Run the layer over segments of these lengths, from the states in ``before`` or from zero.

    Returns [tokens, heads, value size] and the final states of the segments.
    """
    three = projected[:3]
    channels = torch.cat([tensor.flatten(1) for tensor in three], 1)
    channels, tokens = _convolve(channels, weights, lengths, before and before.tokens, net.activation)
    parts = channels.split([tensor[0].numel() for tensor in three], 1)
    query, key, value = (part.view(tensor.shape) for part, tensor in zip(parts, three, strict=True))
    times = value.shape[1] // key.shape[1]
    query, key = (tensor.repeat_interleave(times, 1) if times > 1 else tensor for tensor in (query, key))
    step = projected.step.sigmoid() * (2.0 if getattr(net, "allow_neg_eigval", False) else 1.0)
    decay = -weights.log_decay.float().exp() * softplus(projected.decay.float() + weights.decay_bias)
    # The kernel requires half precision and does not support rows of single tokens.
    rule = fused_rule() if _on_cuda(query) and query.dtype.itemsize < 4 and max(lengths) > 1 else None
    core, memory = (rule or delta_rule)(query, key, value, decay, step, lengths, before and before.memory)
    return core, State(tokens, memory)


def _convolve(
    channels: Tensor, weights: Weights, lengths: Sequence[int], before: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Convolve every segment causally. Returns [tokens, channels] and the last width - 1 tokens of each segment."""
    width = weights.filters.shape[1] - 1
    if before is None:
        before = channels.new_zeros(len(lengths), width, channels.shape[1])
    if max(lengths) == 1:
        row = torch.cat([before.to(channels.dtype), channels[:, None]], 1)
        return _filtered(row, weights, activation)[:, 0], row[:, 1:]
    # Prepend each segment's past, so that a single unpadded convolution suffices for the row.
    where, out, last = _laid(tuple(lengths), width, channels.device)
    row = torch.cat([before.to(channels.dtype).flatten(0, 1), channels]).index_select(0, where)
    kernel = _fused_convolution() if _on_cuda(row) else None
    if kernel is not None:
        convolved = kernel(row.mT[None], weights.filters, weights.bias, activation=activation)[0, :, width:].mT
    else:
        convolved = _filtered(row, weights, activation)
    return convolved.index_select(0, out), row.index_select(0, last).unflatten(0, (-1, width))


def _filtered(row: Tensor, weights: Weights, activation: str) -> Tensor:
    """Apply filters and activation to row [..., n, channels]. Returns [..., n - width + 1, channels]. Sums are in fp32,
    as in kernels."""
    filters = weights.filters.float().mT
    length = row.shape[-2] - len(filters) + 1
    # Compute explicit products, because not every device has a depthwise convolution.
    convolved = sum(row.narrow(-2, first, length).float() * tap for first, tap in enumerate(filters))
    convolved = convolved if weights.bias is None else convolved + weights.bias
    return ACT2FN[activation](convolved.to(row.dtype))


@lru_cache(8)
# The first call may be in inference mode, and autograd cannot save tensors created in that mode.
@torch.inference_mode(False)
def _laid(lengths: tuple[int, ...], width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return three index tensors. The first selects from (pasts, tokens) a row in which each segment follows its past.
    The second finds the tokens in the convolution of that row, which is shorter by the first past. The third has the
    last ``width`` rows of each segment.
    """
    firsts = (0, *accumulate(lengths))
    pasts = len(lengths) * width
    where, out, last = [], [], []
    for number, (first, length) in enumerate(zip(firsts, lengths, strict=False)):
        where += [torch.arange(number * width, (number + 1) * width), torch.arange(first, first + length) + pasts]
        out.append(torch.arange(first, first + length) + number * width)
        end = first + length + (number + 1) * width
        last.append(torch.arange(end - width, end))
    return tuple(send(torch.cat(pieces), device) for pieces in (where, out, last))  # type: ignore[return-value]


# -- kernels of accelerators (not run) ---------------------------------------------------------------------------------


def _on_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda


@cache
def _fused_convolution() -> Callable[..., Tensor] | None:
    """Return causal-conv1d's kernel, or None if it is not installed. It maps [1, channels, tokens], pads with zeros,
    and applies the activation."""
    try:
        from causal_conv1d import causal_conv1d_fn
    except ImportError:
        return None
    return causal_conv1d_fn


# -- checks ------------------------------------------------------------------------------------------------------------


def bytes_per_row(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the state size of one sample in the embedded engine, in bytes; 0 without recurrent layers."""
    text = config.get_text_config()
    if not family(text.model_type).gated_delta_nets:
        return 0
    keys, values = (
        (getattr(text, f"linear_num_{name}_heads"), getattr(text, f"linear_{name}_head_dim"))
        for name in ("key", "value")
    )
    channels = 2 * keys[0] * keys[1] + values[0] * values[1]
    tokens = (text.linear_conv_kernel_dim - 1) * channels * dtype.itemsize
    return int(text.layer_types.count("linear_attention") * (tokens + 4 * values[0] * keys[1] * values[1]))
