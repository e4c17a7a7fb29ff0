"""LoRA (Hu et al. 2021): frozen weights W plus trained adapters, W + (alpha / rank) B A. The only file that uses peft.
peft replaces every target layer by a layer that contains the old one (``base_layer``) and the adapters (``lora_A``,
``lora_B``), and FSDP shards both alike. Exports, and engines that receive merged weights, do not depend on LoRA
(`models.weights`). If all experts of a layer are one weight, their adapters are concatenated in one A and one B (peft's
``target_parameters``), from which every forward computes the weights of all experts. `models.weights.targets` selects
the layers instead of peft, because peft changes layers of some families, and ignores a name without a match if another
name matches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from rltrain.common.errors import ConfigError
from rltrain.common.logs import count
from rltrain.common.seeds import name_seed
from rltrain.config.schema.model import CriticModelConfig, ModelConfig
from rltrain.models.files.hashed import Digests, write_weights
from rltrain.models.files.safe import UNREADABLE
from rltrain.models.vision import language_model
from rltrain.models.weights.targets import experts_among, in_short, is_of, matching, names_of

_NAME = "default"
# Initializations of adapters that leave the base weights unchanged.
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
# Options with which layers compute something other than W + scale B A, the only form that `merged` supports.
NOT_PLAIN = (
    "use_dora",
    "bias",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
)
# Prefix of model names in peft's files.
_PEFT = "base_model.model."


@dataclass(frozen=True)
class Lora:
    """Adapters of a model."""

    section: str
    """Config section, for messages."""
    rank: int
    alpha: float
    target_modules: Any
    exclude_modules: Any
    path: str | None
    dtype: torch.dtype
    seed: int
    """dtype and seed of the adapters' initial weights."""


def lora_of(cfg: ModelConfig | CriticModelConfig, section: str, dtype: torch.dtype, seed: int) -> Lora | None:
    """Return the adapters that ``cfg`` requests, or None if all weights are trained."""
    path = cfg.lora_adapter_path if isinstance(cfg, ModelConfig) else None
    if not (cfg.lora_rank or path):
        return None
    return Lora(section, cfg.lora_rank, cfg.lora_alpha, cfg.target_modules, cfg.exclude_modules, path, dtype, seed)


def exclusion_note(model: PreTrainedModel, lora: Lora) -> str | None:
    """Return a note on an exclusion that matches no layer (peft allows it), or None."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    key = f"{lora.section}.exclude_modules"
    if not isinstance(lora.exclude_modules, str) or matching(key, lora.exclude_modules, names, required=False):
        return None
    return f"{key}={lora.exclude_modules} matches no linear layer, so it excludes nothing"


def add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Add empty adapters to a model on the meta device, and freeze everything else. Raises ConfigError."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"{lora.section}: LoRA needs peft: pip install 'rltrain[lora]'.") from error
    alpha: Any = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    config: Any = _stored_config(lora) if lora.path else LoraConfig(r=lora.rank, lora_alpha=alpha)
    config.task_type, config.inference_mode, config.exclude_modules = "CAUSAL_LM", False, None
    # Dropout would make the importance ratio of an unchanged policy differ from 1.
    config.lora_dropout = 0.0
    names = _target_layers(model, lora)
    experts = _target_experts(model, lora)
    # A wrapper without a config hides the model's family from peft, so that it adapts exactly these layers and changes
    # nothing else.
    config.target_modules = {f"held.{name}" for name in names}
    config.target_parameters = [f"held.{name}" for name in experts]
    # low_cpu_mem_usage leaves the new adapters on the meta device, where the model is.
    inject_adapter_in_model(config, nn.ModuleDict({"held": model}), low_cpu_mem_usage=True)
    for _, layer in lora_layers(model):
        layer.lora_A.to(lora.dtype)
        layer.lora_B.to(lora.dtype)
    # peft must find the layers of the saved adapter in a model whose names lack our prefix "held".
    config.target_modules = in_short(names, model)
    config.target_parameters = sorted({".".join(name.split(".")[-2:]) for name in experts}) or None
    model.peft_config = {_NAME: config}


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) of every layer with adapters. Experts have nested layers, one for each of their weights."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "lora_A", None), nn.ModuleDict):
            yield name, module


def adapted_weights(model: nn.Module) -> dict[str, Any]:
    """Return the layers with adapters by the name of the adapted parameter."""
    weights = {}
    for name, layer in lora_layers(model):
        inner = layer.base_layer
        name = f"{name}.base_layer"
        while hasattr(inner, "base_layer"):
            inner, name = inner.base_layer, f"{name}.base_layer"
        weights[f"{name}.{getattr(layer, 'parameter_name', 'weight')}"] = layer
    return weights


def first_adapters(model: nn.Module, lora: Lora) -> dict[str, Tensor]:
    """Return the initial adapters, on the CPU: from ``lora.path``, or with random A and zero B, so that B A = 0.

    Each A depends only on the seed, the section and its name: uniform up to 1 / sqrt(inputs), as in peft.
    """
    if lora.path:
        return _read_adapters(model, lora)
    weights = {}
    for name, layer in lora_layers(model):
        first, second = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
        # One generator per weight, so that the values do not depend on which other layers have adapters.
        generator = torch.Generator().manual_seed(name_seed(lora.seed, lora.section, name))
        drawn = torch.empty(first.shape)
        weights[_weight_name(name, "A")] = nn.init.kaiming_uniform_(drawn, math.sqrt(5), generator=generator)
        weights[_weight_name(name, "B")] = torch.zeros(second.shape)
    return weights


@torch.no_grad()
def merged(layer: Any, weight: Tensor) -> Tensor:
    """Merge the adapters of a layer into ``weight``: W + scale B A, in float32 and sharded like it (a collective)."""
    # A is small, so it is gathered in full. B stays sharded, so that each rank computes its rows of W.
    first, second = _full(layer.lora_A[_NAME].weight).float(), layer.lora_B[_NAME].weight
    scale = layer.scaling[_NAME]
    if weight.dim() == 3:
        return _merged_experts(layer, weight, first, _full(second).float())
    if not isinstance(weight, DTensor):
        return weight.float() + scale * (second.float() @ first)
    # The same rank holds the same rows of B and W. Under tensor parallelism a rank may have only some columns of W.
    rows = second.to_local().float()
    sizes, starts = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    assert len(rows) == sizes[0]
    local = weight.to_local().float() + scale * (rows @ first[:, starts[1] : starts[1] + sizes[1]])
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _merged_experts(layer: Any, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Merge adapters into this rank's experts. first: [experts x rank, inputs]. second: [outputs, rank x experts], with
    the experts interleaved.
    """
    local, start = weight, 0
    if isinstance(weight, DTensor):
        local = weight.to_local()
        start = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)[1][0]
    own = slice(start, start + len(local))
    first = first.unflatten(0, (len(weight), -1))[own]
    second = second.unflatten(1, (-1, len(weight))).permute(2, 0, 1)[own]
    delta = layer.scaling[_NAME] * (second @ first)
    # Some families store [experts, inputs, outputs].
    local = local.float() + (delta.mT if getattr(layer.get_base_layer(), "is_transposed", False) else delta)
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


@torch.no_grad()
def times_scale(layer: Any, second: Tensor) -> Tensor:
    """Return B of a layer times the scale of its adapters, for engines that apply no scale."""
    return second * layer.scaling[_NAME]


def ranks_of(model: nn.Module) -> dict[str, int]:
    """Return the rank of the adapters by layer name."""
    return {name: layer.r[_NAME] for name, layer in lora_layers(model)}


def beyond_language_model(model: PreTrainedModel) -> list[str]:
    """Return the layers with adapters outside of the language model."""
    names = [name for name, _ in lora_layers(model)]
    return sorted({*names} - {*_below(language_model(model), model, names)})


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside the context. A model without adapters is unchanged.

    peft's ``disable_adapter`` is not used, because it also toggles requires_grad, either on shards or on gathered
    weights, depending on FSDP's current state.
    """
    layers = [layer for _, layer in lora_layers(model)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the adapters under peft's names, copied to the host of rank 0; {} on other ranks (a collective)."""
    weights = {}
    for name, layer in lora_layers(model):
        for kind, adapters in (("A", layer.lora_A), ("B", layer.lora_B)):
            full = _full(adapters[_NAME].weight)
            if dist.get_rank() == 0:
                weights[f"{_PEFT}{name}.lora_{kind}.weight"] = full.to("cpu", copy=True).contiguous()
    return weights


def write_adapter(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], base: str, folder: str, digests: Digests
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` for peft, on rank 0.

    base: base model of the adapters. Raises DiskError.
    """
    config = model.peft_config[_NAME]
    config.base_model_name_or_path = base
    config.save_pretrained(folder)
    write_weights(weights, Path(folder) / "adapter_model.safetensors", digests)


def _target_layers(model: PreTrainedModel, lora: Lora) -> list[str]:
    """Return the linear layers that get adapters, without the head, because log-probs use only the weight of the head,
    not its adapters."""
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    if lora.path:
        chosen = _stored_layers(lora, linear)
        _miss_none(model, lora, chosen, linear)
        return [name for name in linear if name in chosen]
    if lora.target_modules == "all-linear":
        if any(".experts." in name and parameter.dim() > 2 for name, parameter in model.named_parameters()):
            raise ConfigError(
                f"{lora.section}.target_modules=all-linear does not reach the experts of this model, whose weights are "
                "not linear layers. Name the layers that are to be trained, such as "
                f"{lora.section}.target_modules=[q_proj,k_proj,v_proj,o_proj], or [q_proj,v_proj,experts]."
            )
        chosen = set(_below(language_model(model), model, linear))
    else:
        wanted = lora.target_modules
        if experts := _target_experts(model, lora):
            wanted = [wish for wish in names_of(wanted) if not any(is_of(wish, name) for name in experts)]
        chosen = matching(f"{lora.section}.target_modules", wanted, linear)
        # A vision tower often has the same layer names as the decoder, but a name such as q_proj refers to the
        # decoder's.
        chosen = set(_below(language_model(model), model, chosen)) or chosen
    if lora.exclude_modules:
        # A pattern may be meant for other models, for example with a vision tower.
        required = not isinstance(lora.exclude_modules, str)
        chosen -= matching(f"{lora.section}.exclude_modules", lora.exclude_modules, linear, required=required)
    if not chosen and not _target_experts(model, lora):
        left = f"{lora.section}.exclude_modules={lora.exclude_modules} excludes all layers. Remove some names."
        none = f"{type(model).__name__} has no linear layer below its head. Train all its weights."
        raise ConfigError(left if lora.exclude_modules else none)
    return [name for name in linear if name in chosen]


def _target_experts(model: PreTrainedModel, lora: Lora) -> list[str]:
    """Return the expert weights that get adapters, from targets such as ``experts`` or ``experts.down_proj``."""
    wanted = _stored_config(lora).target_parameters or [] if lora.path else lora.target_modules
    weights = (name for name, weight in model.named_parameters() if ".experts." in name and weight.dim() == 3)
    return experts_among(weights, wanted)


def _stored_layers(lora: Lora, linear: list[str]) -> set[str]:
    """Return the layers with weights in an adapter's file. Raises ConfigError for layers unknown to this model."""
    fitting = {f"{_PEFT}{name}.lora_{kind}.weight": name for name in linear for kind in "AB"}
    stored = _stored_weights(lora)
    if _stored_config(lora).target_parameters:
        # `_read_adapters` checks the adapters of experts.
        stored = {name: weight for name, weight in stored.items() if ".experts." not in name}
    text = f"{lora.section}.lora_adapter_path={lora.path} does not fit this model"
    for odd in sorted(stored.keys() - fitting):
        layer = odd.removeprefix(_PEFT).rpartition(".lora_")[0]
        inside = max((name for name in linear if f".{odd}".count(f".{name}.")), key=len, default=None)
        if inside is None:
            raise ConfigError(f"{text}, which has no linear layer {layer or odd} below the head.")
        raise ConfigError(
            f"{text}: it has {odd}, which peft would call {_PEFT}{inside}.lora_A.weight or lora_B. Save it with peft's "
            "save_pretrained, or rename its weights."
        )
    return {fitting[name] for name in stored}


def _miss_none(model: PreTrainedModel, lora: Lora, chosen: set[str], linear: list[str]) -> None:
    """Raise ConfigError if the adapter's config names decoder layers that are missing from its file."""
    from peft.tuners.tuners_utils import check_target_module_exists

    config, decoder = _stored_config(lora), _below(language_model(model), model, linear)
    whole = config.target_modules == "all-linear"
    missing = [name for name in decoder if name not in chosen and (whole or check_target_module_exists(config, name))]
    if missing:
        raise ConfigError(
            f"{lora.section}.lora_adapter_path={lora.path} has no weights for {count(len(missing), 'layer')} that its "
            f"adapter_config.json names (target_modules), such as {missing[0]}. Copy the adapter again."
        )


def _below(part: nn.Module, model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    inside = {id(module) for module in part.modules()}
    return [name for name in names if id(model.get_submodule(name)) in inside]


def _stored_config(lora: Lora) -> Any:
    from peft import LoraConfig, PeftConfig

    assert lora.path is not None
    try:
        config = PeftConfig.from_pretrained(lora.path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{lora.section}.lora_adapter_path={lora.path} is not a peft adapter: {error}") from error
    values = {name: getattr(config, name, None) for name in NOT_PLAIN if name != "target_parameters"}
    odd = [f"{name}={value}" for name, value in values.items() if value and value != "none"]
    if not isinstance(config, LoraConfig):
        odd = [f"peft_type={config.peft_type.value}"]
    elif config.init_lora_weights not in PLAIN_STARTS:
        odd = [f"init_lora_weights={config.init_lora_weights}"]
    if odd:
        raise ConfigError(
            f"{lora.section}.lora_adapter_path={lora.path} has {', '.join(odd)}: only plain LoRA of linear "
            "layers can be trained."
        )
    return config


def _stored_weights(lora: Lora) -> dict[str, Tensor]:
    from peft.utils import load_peft_weights

    assert lora.path is not None
    try:
        return load_peft_weights(lora.path, device="cpu")
    except (ValueError, *UNREADABLE) as error:
        raise ConfigError(f"{lora.section}.lora_adapter_path={lora.path} has no weights: {error}") from error


def _read_adapters(model: nn.Module, lora: Lora) -> dict[str, Tensor]:
    stored_weights = _stored_weights(lora)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    weights = {}
    for name, _ in lora_layers(model):
        for kind in ("A", "B"):
            weight_name = _weight_name(name, kind)
            weight = stored_weights.get(f"{_PEFT}{name}.lora_{kind}.weight")
            if weight is None or weight.shape != shapes[weight_name]:
                adapter_shape = "no such weight" if weight is None else f"shape {list(weight.shape)}"
                raise ConfigError(
                    f"{lora.section}.lora_adapter_path={lora.path} does not fit this model: {weight_name} is "
                    f"{list(shapes[weight_name])} here, and the adapter has {adapter_shape}."
                )
            weights[weight_name] = weight
    return weights


def _full(weight: Tensor) -> Tensor:
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()


def _weight_name(layer: str, kind: str) -> str:
    return f"{layer}.lora_{kind}.{_NAME}.weight"
