"""Tensor parallelism (Shoeybi et al. 2019, Megatron-LM, section 3): the ranks of a group share each layer's matrices.

FSDP alone gathers whole layers, and every rank computes whole rows of activations and logits. With tensor parallelism a
rank computes some heads, some columns of each MLP and some rows of the vocabulary. Weights are DTensors over the ranks
of the group, and FSDP shards them further over the other ranks. All ranks of a group compute the same tokens: hidden
states between the blocks, and norms of them, are equal on all.

Where hidden states enter a block, their gradients are all-reduced in the backward pass (`_Enter`). Where they leave it,
they are all-reduced in the forward pass (`_Leave`). A weight that every rank uses for its own heads (norms of queries
and keys, sinks, replicated keys and values, fused weights, which are sliced part by part) has a partial gradient on
each rank, so it enters like a hidden state. Experts are not cut: each rank of the group computes them for its share of
the tokens.

Not implemented: hidden states that are sharded between the blocks (Korthikanti et al. 2022). Ulysses does that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PretrainedConfig, PreTrainedModel

from rltrain.models.experts import PLAIN, parts_with_experts
from rltrain.models.tensor_layers import (
    Entry,
    column,
    embed,
    enter,
    entering,
    replicate,
    row,
    share_tokens,
    sliced,
    weights_of,
)
from rltrain.models.vision import language_model

# Names of the linear layers and norms of attention, by their role.
_QUERIES, _KEYS = {"q_proj", "q_b_proj", "query_key_value"}, {"k_proj", "v_proj"}
_LATENT, _FROM_LATENT = {"kv_a_proj_with_mqa"}, {"kv_b_proj"}
_OUTPUTS = {"o_proj", "out_proj", "dense"}
_HEAD_NORMS = {"q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm"}
_BEFORE, _FUSED = {"q_a_proj", "q_a_layernorm"}, {"qkv_proj"}
_OF_ATTENTION = (
    _QUERIES | _KEYS | _LATENT | _FROM_LATENT | _OUTPUTS | _HEAD_NORMS | _BEFORE | _FUSED | {"kv_a_layernorm", "sinks"}
)
# The linear layers of an MLP: those before the activation (fused: gate and up in one), and the one after it.
_MLPS = [
    ({"gate_proj", "up_proj"}, "down_proj"), ({"up_proj"}, "down_proj"), ({"gate_up_proj"}, "down_proj"),
    ({"fc1"}, "fc2"), ({"c_fc"}, "c_proj"), ({"dense_h_to_4h"}, "dense_4h_to_h"),
]  # fmt: skip
_HALVES = {"gate_up_proj"}
# Attributes of attention modules that count heads, by the field of the config.
_COUNTS = {
    "num_attention_heads": ("num_heads", "num_attention_heads", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
}


# Families (`model_type` of the text model) whose log-probs, gradients and optimizer steps were compared with a single
# process and match.
_COMPARED = """
    llama llama4_text qwen2 qwen2_moe qwen3 qwen3_moe qwen3_vl_text mistral ministral ministral3 mixtral gemma gemma2
    gemma3_text vaultgemma phi phi3 phimoe glm glm4 glm4_moe glm4_moe_lite deepseek_v2 deepseek_v3 gpt_oss olmo granite
    granitemoe granitemoeshared granite_swa granitemoe_swa smollm3 cohere cohere2 cohere2_moe minimax_m3_vl_text
    seed_oss ernie4_5 ernie4_5_moe hunyuan_v1_dense hunyuan_v1_moe exaone4 exaone_moe arcee dots1 solar_open youtu
    minicpm3 hyperclovax starcoder2 helium nanochat cwm jais2 gpt_neox hy_v3 mellum axk1 persimmon
    nemotron stablelm
"""
COMPARED = frozenset(_COMPARED.split())


class Plan(NamedTuple):
    """The modules of a model that a tensor-parallel group shares."""

    attentions: list[tuple[str, Any]]
    mlps: list[tuple[str, Any]]
    """attentions, mlps: (name, module). The linear layers are direct children of the module."""
    experts: list[Any]
    """Experts that each rank computes for its share of the tokens."""
    size: int


def tensor_problem(model: PreTrainedModel, config: PretrainedConfig, size: int) -> str | None:
    """Return why ``size`` ranks cannot share the matrices of ``model``, with a fix, or None."""
    if size == 1:
        return None
    text, found = config.get_text_config(), _plan(model, size)
    heads, kv_heads = _heads(text)
    if heads % size or (kv_heads % size and size % kv_heads):
        fits = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        return (
            f"the model has {heads} attention heads and {kv_heads} key-value heads, which {size} ranks cannot share. "
            f"Use one of {', '.join(map(str, fits))}."
        )
    if not isinstance(found, str) and len(found.attentions) != text.num_hidden_layers:
        found = f"{type(model).__name__} has layers without known attention"
    if isinstance(found, str):
        return f"{found}, which the plan of tensor parallelism does not cover. Leave it out (docs/models.md)."
    if text.model_type not in COMPARED:
        return f"{text.model_type} has not been compared with one process. Leave it out (docs/models.md)."
    if text.vocab_size % size:
        return f"it does not divide the vocabulary of {text.vocab_size:,} tokens. Use a divisor, or leave it out."
    for name, mlp in found.mlps:
        widths = {child.weight.shape[0] // (1 + (path in _HALVES)) for path, child in _columns(mlp)}
        if any(width % size for width in widths):
            return f"it does not divide the {max(widths):,} columns of {name}. Use a divisor, or leave it out."
    return None


def _heads(text: PretrainedConfig) -> tuple[int, int]:
    heads = text.num_attention_heads
    # Latent attention expands keys and values to all heads.
    latent = getattr(text, "kv_lora_rank", None)
    return heads, heads if latent else (getattr(text, "num_key_value_heads", None) or heads)


def _plan(model: PreTrainedModel, size: int) -> Plan | str:
    """Return the plan, or the first part of the decoder that it does not cover."""
    plan, covered = Plan([], [], [], size), set[int]()
    decoder: Any = language_model(model)
    names = {id(module): name for name, module in model.named_modules()}
    for part in parts_with_experts(decoder):
        if hasattr(part, PLAIN):
            plan.experts.append(part)
        covered |= {id(module) for module in part.modules()}
    for module in decoder.modules():
        children = _children(module)
        if id(module) in covered or not children:
            continue
        if children & _OUTPUTS and children & (_QUERIES | _FUSED):
            if odd := children - _OF_ATTENTION or _odd_norms(module):
                return f"{type(module).__name__} has {sorted(odd)[0]}"
            plan.attentions.append((names[id(module)], module))
        elif any(children == first | {last} for first, last in _MLPS):
            plan.mlps.append((names[id(module)], module))
        else:
            continue
        covered |= {id(inner) for inner in module.modules()}
    wide = model.config.get_text_config().hidden_size
    for module in decoder.modules():
        # Routers and gates of shared experts are narrow, so they are not split.
        if module is model.get_output_embeddings():
            continue
        if id(module) not in covered and isinstance(module, nn.Linear) and min(module.weight.shape) >= min(wide, 64):
            return f"{type(model).__name__} has {names[id(module)]}"
    return plan


def _children(module: nn.Module) -> set[str]:
    """Return the names of the direct children and parameters that hold weights."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return own | {name for name, child in module.named_children() if next(child.parameters(), None) is not None}


def _odd_norms(module: Any) -> set[str]:
    """Return norms that normalize over several heads, because their statistics would span ranks."""
    sizes = {getattr(module, name, None) for name in ("head_dim", "head_size")}
    norms = [(name, child) for name, child in module.named_children() if name in _HEAD_NORMS]
    return {name for name, child in norms for weight in child.parameters() if weight.shape not in {(n,) for n in sizes}}


def _columns(mlp: nn.Module) -> Iterator[tuple[str, Any]]:
    last = {name for _, name in _MLPS}
    yield from ((name, _base(child)) for name, child in mlp.named_children() if _children(child) and name not in last)


def _base(layer: Any) -> Any:
    """Return the linear layer under adapters."""
    return getattr(layer, "base_layer", layer)


# -- splitting ---------------------------------------------------------------------------------------------------------


def split(model: PreTrainedModel, mesh: DeviceMesh) -> list[Any]:
    """Shard the weights of a model on the meta device over ``mesh`` [ranks of a group], and make it compute its share.

    Returns the experts whose gradients are partial: each rank computes them for its share of the tokens.
    """
    plan = _plan(model, mesh.size())
    assert isinstance(plan, Plan)  # otherwise `tensor_problem` has rejected the model
    splitter = _Splitter(model, mesh)
    splitter.vocabulary()
    for _, attention in plan.attentions:
        splitter.attention(attention)
    for _, mlp in plan.mlps:
        splitter.mlp(mlp)
    for part in plan.experts:
        part.forward = partial(share_tokens, part.forward, splitter.group)
    return plan.experts


class _Splitter:
    """Changes to the modules of a model for this rank of a group."""

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh) -> None:
        self._model, self._mesh = model, mesh
        self.group, self._size, self._rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self._entry, self._enter = Entry(self.group), partial(enter, group=self.group)
        self._heads, self._kv_heads = _heads(model.config.get_text_config())

    def vocabulary(self) -> None:
        """Shard the embedding and the head by tokens."""
        embedding: Any = self._model.get_input_embeddings()
        head: Any = self._model.get_output_embeddings()
        tied = head is not None and head.weight is embedding.weight
        self._shard(embedding, "weight", 0)
        rows = embedding.weight.shape[0] // self._size
        embedding.forward = partial(embed, embedding, embedding.forward, self.group, self._rank * rows)
        if tied:
            head.weight = embedding.weight
        elif head is not None:
            self._shard(head, "weight", 0)
        if head is not None and head.bias is not None:
            self._shard(head, "bias", 0)

    def attention(self, module: Any) -> None:
        """Shard attention by heads."""
        kv_heads = max(1, self._kv_heads // self._size)
        share = partial(self._column, entry=self._entry)
        ways: list[tuple[set[str], Callable[[Any], None]]] = [
            (_QUERIES, share), (_KEYS, share if self._kv_heads >= self._size else self._keys), (_FUSED, self._fused),
            (_LATENT, self._latent), (_FROM_LATENT, partial(self._column, entry=None)), (_OUTPUTS, self._row),
            (_HEAD_NORMS | {"kv_a_layernorm"}, partial(replicate, group=self.group)),
        ]  # fmt: skip
        for name, child in list(module.named_children()):
            for names, way in ways:
                if name in names:
                    way(child)
        if "sinks" in module._parameters:
            replicate(module, self.group, sinks=self._rows(self._heads))
        counts = {"num_attention_heads": self._heads // self._size, "num_key_value_heads": kv_heads}
        for field, name in ((field, name) for field, names in _COUNTS.items() for name in names):
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, counts[field])
        if isinstance(getattr(module, "num_key_value_groups", None), int):
            module.num_key_value_groups = self._heads // self._size // kv_heads
        if _children(module) & _FUSED:
            # The forward of a module with fused weights splits their output by the numbers of heads in the config.
            module.config = copy.copy(module.config)
            for field, count in counts.items():
                setattr(module.config, field, count)

    def _keys(self, layer: Any) -> None:
        self._slices(layer, [self._kv_rows(_base(layer).weight.shape[0])])

    def _fused(self, layer: Any) -> None:
        head_dim = _base(layer).weight.shape[0] // (self._heads + 2 * self._kv_heads)
        queries, keys = self._heads * head_dim, self._kv_heads * head_dim
        parts = [self._rows(queries), self._kv_rows(keys, queries), self._kv_rows(keys, queries + keys)]
        self._slices(layer, parts)

    def _latent(self, layer: Any) -> None:
        # This rank's heads use the output in two ways: through kv_b_proj, and as the positional part of the keys, which
        # all heads share. Its gradient is therefore summed here.
        layer.forward = partial(entering, layer.forward, self.group)

    def mlp(self, module: nn.Module) -> None:
        """Shard an MLP by columns before the activation, and by rows after it."""
        columns = dict(_columns(module))
        for name, child in list(module.named_children()):
            if name in _HALVES:
                half = _base(child).weight.shape[0] // 2
                self._slices(child, [self._rows(half), self._rows(half, half)])
            elif name in columns:
                self._column(child, self._entry)
            elif _children(child):
                self._row(child)

    def _rows(self, count: int, start: int = 0) -> slice:
        """Return this rank's share of rows [start, start + count)."""
        share = count // self._size
        return slice(start + self._rank * share, start + (self._rank + 1) * share)

    def _kv_rows(self, count: int, start: int = 0) -> slice:
        """Return the rows of this rank's key-value heads. Several ranks may share one head."""
        if self._kv_heads >= self._size:
            return self._rows(count, start)
        share = count // self._kv_heads
        first = start + self._rank * self._kv_heads // self._size * share
        return slice(first, first + share)

    def _column(self, layer: Any, entry: Entry | None) -> None:
        """Shard the outputs of a linear layer. entry: None if its input has already passed through `enter`."""
        first, second = _adapters(layer)
        for each, enters in ((_base(layer), entry), (second, entry and self._enter)):
            if each is not None:
                for name in weights_of(each):
                    self._shard(each, name, 0)
                each.forward = partial(column, each, enters)
        if first is not None and entry is None:
            replicate(first, self.group)

    def _row(self, layer: Any) -> None:
        """Shard the inputs of a linear layer. A bias is added once."""
        for each in (_base(layer), _adapters(layer)[0]):
            if each is not None:
                self._shard(each, "weight", 1)
                each.forward = partial(row, each, self.group)

    def _slices(self, layer: Any, rows: list[slice]) -> None:
        """Let a linear layer compute only these rows of its outputs. Its weights are not split."""
        for each, entry in ((_base(layer), self._entry), (_adapters(layer)[1], self._enter)):
            if each is not None:
                each.forward = partial(sliced, each, rows, self.group, entry)

    def _shard(self, module: Any, name: str, dim: int) -> None:
        weight, shape = getattr(module, name), list(getattr(module, name).shape)
        shape[dim] //= self._size
        spread = DTensor.from_local(weight.new_empty(shape), self._mesh, [Shard(dim)], run_check=False)
        module.register_parameter(name, nn.Parameter(spread, requires_grad=weight.requires_grad))


def _adapters(layer: Any) -> tuple[Any, Any]:
    """Return A and B of a layer with adapters, or None for each."""
    if not isinstance(getattr(layer, "lora_A", None), nn.ModuleDict):
        return None, None
    (first,), (second,) = layer.lora_A.values(), layer.lora_B.values()
    return first, second
