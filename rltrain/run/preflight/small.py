"""A small copy of a model: same class and layer types, but small widths and random weights. Only a computation can show
whether rltrain computes a family as transformers does, but a 72B model cannot be tried at the start of a run. Families
differ in code and layer types, not in widths. So widths are reduced by field name, and only layers that differ from
each other are kept. Weights are initialized large enough to reveal mistakes.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rltrain.models.load import model_kind, without_dropout

HIDDEN, _HEAD_SIZE, VOCABULARY = 128, 32, 64
# Sizes by suffix of the field name; the first match counts. Fields that are absent, None or 0 are kept, as are values
# below a size that is marked "at most".
_SIZES = pd.read_csv(Path(__file__).with_name("small_sizes.tsv"), sep="\t").fillna("").values.tolist()
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
# Periods of layers after which the layer type changes.
_PERIODS = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "no_rope_layer_interval")
_MOST_LAYERS = 8
_MOST_WEIGHTS = 40_000_000


def small_copy(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of ``config`` in which every width is small and only a few layers of each type are left."""
    small = without_dropout(config)
    text = small.get_text_config()
    for part in _parts(small):
        _shrink(part, is_decoder=part is text)
    return small


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Return the configuration and all nested ones: decoder, towers, and the parts between them."""
    inner = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    parts = [config, *(part for piece in inner for part in _parts(piece))]
    return list({id(part): part for part in parts}.values())


def random_model(config: PretrainedConfig, *, decoder_only: bool, trust_remote_code: bool) -> PreTrainedModel:
    """Return a plain model on the CPU in float32. The state of torch's random generator does not change.

    Matrices preserve the scale of their inputs, and all other weights differ from their initial values.
    """
    kind = model_kind(config, decoder_only)
    if (count := _num_weights(kind, config, trust_remote_code)) > _MOST_WEIGHTS:
        raise ValueError(f"it still has {count:,} weights")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = kind.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager", trust_remote_code=trust_remote_code
        )
        with torch.no_grad():
            for module in model.modules():
                for weight in module.parameters(recurse=False):
                    if isinstance(module, nn.Embedding):
                        weight.normal_()
                    elif weight.dim() > 1:
                        weight.normal_(std=1.2 / math.sqrt(weight.shape[-1]))
                    else:
                        weight.add_(0.2 * torch.randn_like(weight))
    return model.eval()


def _num_weights(kind: Any, config: PretrainedConfig, trust_remote_code: bool) -> int:
    with torch.device("meta"):
        model = kind.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
    return sum(weight.numel() for weight in model.parameters())


def _shrink(config: PretrainedConfig, is_decoder: bool) -> None:
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    own_fields = _take_own_fields(config)
    depth = next((name for name in _DEPTHS if isinstance(fields.get(name), int)), None)
    layers = _kept_layers(fields, own_fields, fields[depth]) if depth else []
    for name, value in fields.items():
        setattr(config, name, len(layers) if name == depth else _small(name, value, fields, depth, layers))
        # Widths between a tower and the decoder are multiples of other widths, under various names.
        if not is_decoder and name.endswith("hidden_size") and isinstance(value, int):
            setattr(config, name, HIDDEN)
    if is_decoder and fields.get("qk_rope_head_dim"):
        for name, size in (("qk_head_dim", config.qk_nope_head_dim + config.qk_rope_head_dim),
                           ("head_dim", config.qk_rope_head_dim)):  # fmt: skip
            if fields.get(name):
                setattr(config, name, size)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ()):
        rope.setdefault("mrope_section", _sections(rope, fields))
    _one_head_each(config, fields)
    if any(own_fields.values()):
        # Twice the usual size reveals mistakes as well as any other size.
        config.per_layer_config = {
            place: {name: getattr(config, name) * (2 if name == "head_dim" else 1) for name in own_fields[layer]}
            for place, layer in enumerate(layers)
        }


def _small(name: str, value: Any, fields: dict[str, Any], depth: str | None, layers: list[int]) -> Any:
    """Return the value of field ``name`` in a small config. fields: all fields. layers: the kept layers."""
    if isinstance(value, list) and depth and len(value) == fields[depth]:
        return [_size_of(name, value[layer]) for layer in layers]
    if name.endswith(("_token_id", "_token_index")):
        return _token(value)
    if isinstance(value, list) and name in ("mlp_only_layers", "moe_layers"):
        return [layer for layer in value if layer < len(layers)]
    if name.startswith("rope_") and isinstance(value, dict):
        return _rope(value, fields)
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name == "num_kv_shared_layers":
        return len(layers) // 2 if value else 0
    if value in (fields.get(hidden) for hidden in ("hidden_size", "n_embd", "d_model")):
        return HIDDEN
    return _size_of(name, value)


def _one_head_each(config: PretrainedConfig, fields: dict[str, Any]) -> None:
    """Keep one key-value head per query head where the model has that."""
    for heads, shared in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if fields.get(shared) and fields[shared] == fields.get(heads):
            setattr(config, shared, getattr(config, heads))


def _size_of(name: str, value: Any) -> Any:
    if not value or not isinstance(value, int) or isinstance(value, bool):
        return value
    for end, size, kind in _SIZES:
        if name == end or name.endswith(f"_{end}"):
            return min(value, size) if kind else size
    return value


def _token(value: Any) -> Any:
    """Return a special token of the small vocabulary. Samples consist of ids below the special tokens."""
    if isinstance(value, list):
        return [_token(token) for token in value]
    return VOCABULARY - 16 + value % 16 if isinstance(value, int) and value >= VOCABULARY - 16 else value


def _take_own_fields(config: PretrainedConfig) -> dict[int, dict[str, Any]]:
    """Remove the per-layer fields from ``config`` and return them by layer."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    config.allow_global_per_layer_attribute_access = True
    names = config.per_layer_attributes or ()
    own_fields = {
        number: {name: value for name in names if (value := getattr(layer, name)) != getattr(config, name)}
        for number, layer in enumerate(config.per_layer_config)
    }
    config.per_layer_config, config.allow_global_per_layer_attribute_access = None, False
    return own_fields


def _kept_layers(fields: dict[str, Any], own_fields: dict[int, dict[str, Any]], depth: int) -> list[int]:
    """Return the first layers until every type has occurred, or one layer of each type if these are too many."""
    lists = [value for value in fields.values() if isinstance(value, list) and len(value) == depth]
    lists += [[own_fields.get(layer) for layer in range(depth)]]
    kinds = [tuple(map(str, kind)) for kind in zip(*lists, strict=True)]
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    periods = [fields.get(name) or 1 for name in _PERIODS] + [min(fields.get("first_k_dense_replace") or 0, 1) + 1]
    last = max(firsts[-1] + 1, 2, *periods)
    layers = list(range(min(last, depth))) if last <= _MOST_LAYERS else firsts
    # Kept twice, because layers in the second half read keys and values of the first half.
    return [*layers, *layers] if fields.get("num_kv_shared_layers") else layers


def _rope(value: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return RoPE parameters whose per-frequency lists have the length of the small heads."""
    value = copy.deepcopy(value)
    for rope in (value, *(part for part in value.values() if isinstance(part, dict))):
        for name in ("short_factor", "long_factor"):
            if rope.get(name):
                rope[name] = rope[name][: _half(rope, fields)]
        if rope.get("mrope_section"):
            rope["mrope_section"] = _sections(rope, fields)
    return value


def _half(rope: dict[str, Any], fields: dict[str, Any]) -> int:
    """Return the number of frequencies of a small head."""
    share = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    return int((16 if fields.get("qk_rope_head_dim") else _HEAD_SIZE) * share) // 2


def _sections(rope: dict[str, Any], fields: dict[str, Any]) -> list[int]:
    """Return the number of frequencies for time, height and width, in the family's order.

    Height and width get equally many. Model code has defaults only for the usual head sizes.
    """
    half, given = _half(rope, fields), rope.get("mrope_section") or ()
    sections = [half // 3] * 3
    sections[2 if given and given[0] == given[1] else 0] += half % 3
    return sections
