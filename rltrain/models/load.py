"""Loading of Hugging Face models, from a folder or the hub."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from rltrain.common.errors import ConfigError
from rltrain.common.logs import count
from rltrain.config.schema.conditions import is_off
from rltrain.config.schema.families import family
from rltrain.models.attention.recurrent import adopt
from rltrain.models.attention.scores import count_places_here
from rltrain.models.files.entries import NoEntries, read_entries
from rltrain.models.files.safe import UNREADABLE
from rltrain.models.files.source import model_problem
from rltrain.models.vision import takes_images, tower

_HEAD = "score.weight"


def load_config(
    path: str, section: str = "actor_rollout_ref.model", *, trust_remote_code: bool = False,
    override: dict[str, Any] | None = None,
) -> PretrainedConfig:  # fmt: skip
    """Load the model's config with ``override``. Raises ConfigError if the path has no model or a key is unknown."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, StrictDataclassError) as error:
        # For a missing folder, transformers only reports that it is not a valid hub name.
        absent = None if Path(path).is_dir() else model_problem(f"{section}.path", path)
        raise ConfigError(absent or f"{section}.path={path} is not a Hugging Face model: {error}") from error
    for key, value in (override or {}).items():
        # In a model with a vision tower, most keys that users change belong to the decoder.
        owner = config if hasattr(config, key) else config.get_text_config()
        if not hasattr(owner, key):
            # verl accepts any name. An unknown key is ignored if its value disables something, such as a dropout of 0
            # for another family.
            if is_off(value):
                continue
            raise ConfigError(f"{section}.override_config.{key}: {type(config).__name__} has no such field.")
        setattr(owner, key, value)
    return config


def split_by_owner(config: PretrainedConfig, override: dict[str, Any]) -> dict[str, Any]:
    """Return ``override`` with the decoder's keys (see `load_config`) under ``text_config``, as engines require."""
    of_decoder = {key: value for key, value in override.items() if not hasattr(config, key)}
    of_config = {key: value for key, value in override.items() if key not in of_decoder}
    return of_config | ({"text_config": of_decoder} if of_decoder else {})


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy with zero dropout, because dropout would make the ratio of an unchanged policy differ from 1."""
    config = copy.deepcopy(config)
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig))):
        for key, value in vars(part).items():
            if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, float):
                setattr(part, key, 0.0)
    return config


def model_kind(config: PretrainedConfig, decoder_only: bool) -> Any:
    """Return the class that builds the model, with its vision tower if it has one. ``decoder_only``: without a head."""
    if decoder_only:
        return AutoModel
    sees = takes_images(config) and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def read_weights(
    path: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    *,
    decoder_only: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load the model with its weights, on the CPU, in ``dtype``. ``decoder_only``: without any head.

    Raises ConfigError for files that contain anything but tensors, or lack weights.
    """
    kind = model_kind(config, decoder_only)
    how: Any = {"config": config, "dtype": dtype, "trust_remote_code": trust_remote_code}
    try:
        model, loading_info = kind.from_pretrained(path, **how, output_loading_info=True)
    except UNREADABLE as error:
        raise ConfigError(f"the weights of {path} cannot be read as tensors: {error}") from error
    # transformers initializes missing weights with random numbers.
    if missing := sorted(loading_info["missing_keys"]):
        raise ConfigError(
            f"the files of {path} lack {count(len(missing), 'weight')} of {type(model).__name__}: "
            f"{missing[0]}{', …' if len(missing) > 1 else ''}. Copy the model again."
        )
    loaded_model: PreTrainedModel = model
    return loaded_model


def read_score_head(path: str) -> Tensor | None:
    """Load the classification head of a checkpoint [1, hidden], or return None if it has none.

    Raises ConfigError for more than one label.
    """
    try:
        entries = read_entries(path, fetch=True)
    except NoEntries:
        return None
    if _HEAD not in entries.empty:
        return None
    if (labels := entries.empty[_HEAD].shape[0]) != 1:
        raise ConfigError(f"{path} is a classifier with {labels} labels, but critic and reward model need one label.")
    return entries.read(_HEAD)


def empty_model(
    config: PretrainedConfig,
    attention: str,
    dtype: torch.dtype,
    *,
    decoder_only: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the model on the meta device, without weights. attention: implementation of the decoder's layers."""
    kind = model_kind(config, decoder_only)
    # Image patches attend in both directions, which packed attention does not support.
    attn = {"": attention, "text_config": attention, "vision_config": "sdpa"} if takes_images(config) else attention
    try:
        with torch.device("meta"):
            model = kind.from_config(config, dtype=dtype, attn_implementation=attn, trust_remote_code=trust_remote_code)
    except KeyError as error:
        if error.args != (attention,):
            raise
        raise ConfigError(
            f"{type(config).__name__} computes attention outside of transformers' attention interface, so packed "
            "sequences cannot be trained. Use a model of a supported family (docs/models.md)."
        ) from error
    except ValueError as error:
        raise ConfigError(f"transformers cannot build {type(config).__name__} as {kind.__name__}: {error}") from error
    adopt(model)
    count_places_here(model)
    return _hand_on(model)


def _hand_on(model: PreTrainedModel) -> PreTrainedModel:
    """Pass our keyword arguments to the attention of layers that do not forward them."""
    layer: Any
    closed = family(model.config.get_text_config().model_type).closed_layers
    for layer in model.modules() if closed else ():
        if type(layer).__name__ == closed:
            layer.register_forward_pre_hook(_keep_ours, with_kwargs=True)
            layer.self_attn.register_forward_pre_hook(_give_ours, with_kwargs=True)
    return model


def _keep_ours(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    # If activations are recomputed, this hook is called again, with the arguments of that forward pass.
    layer.self_attn.of_layer = {name: value for name, value in kwargs.items() if name.startswith("rltrain_")}


def _give_ours(attention: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | vars(attention).pop("of_layer")


def recompute_activations(
    model: PreTrainedModel, section: str, layers: bool | int | str = True, *, offload: bool = False
) -> None:
    """Enable gradient checkpointing of decoder layers (transformers renamed the method between 5.5 and 5.23).

    layers: True, a number (the first layers of the decoder, and a vision tower), or "selective" (all, but the outputs
    of attention kernels are kept). offload: keep a layer's input in host memory until recomputation. section: config
    section of the model. Raises ConfigError for a model that does not support it.
    """
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"{type(model).__name__} cannot recompute activations in transformers. "
            f"Set {section}.enable_gradient_checkpointing=False."
        )
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # Reentrant checkpointing needs an input with a gradient, but under LoRA the embeddings are frozen, so the first
    # hidden states have none. Every dropout is 0, so no random state has to be restored.
    enable({"use_reentrant": False, "preserve_rng_state": False})
    module: Any
    for module in model.modules() if offload or layers == "selective" else ():
        if recompute := getattr(module, "_gradient_checkpointing_func", None):
            if layers == "selective":
                recompute = partial(recompute, context_fn=partial(create_selective_checkpoint_contexts, _is_kept))
            module._gradient_checkpointing_func = partial(_from_host, recompute) if offload else recompute
    if not isinstance(layers, bool | str):
        _recompute_first(model, f"{section}.enable_gradient_checkpointing={layers}", layers)


def _recompute_first(model: PreTrainedModel, key: str, number: int) -> None:
    """Disable the recomputation of decoder layers after the first ``number``."""
    aside = {id(module) for part in tower(model) for module in part.modules()}
    blocks: list[Any] = [layer for layer in decoder_layers(model) if id(layer) not in aside]
    if number > len(blocks):
        raise ConfigError(f"{key}: the model has {len(blocks)} layers. Use at most {len(blocks)}, or True for all.")
    for block in blocks[number:]:
        if not isinstance(block, GradientCheckpointingLayer):
            raise ConfigError(f"{key}: {type(model).__name__} recomputes all layers or none. Use True or False.")
        block.gradient_checkpointing = False


def _is_kept(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the outputs of attention kernels on any device. They are the most expensive to recompute per byte: the cost
    grows with the square of the length, but the output only with the length.
    """
    kernel = any(word in str(operator) for word in ("attention", "attn"))
    return CheckpointPolicy.PREFER_SAVE if kernel else CheckpointPolicy.PREFER_RECOMPUTE


def _from_host(recompute: Callable[..., Any], layer: Callable[..., Any], *inputs: Tensor, **others: Any) -> Any:
    """Run ``recompute`` of a layer with its inputs in pinned host memory until recomputation."""
    kind = inputs[0].device.type
    with torch.autograd.graph.save_on_cpu(pin_memory=kind != "cpu", device_type=kind):
        return recompute(layer, *inputs, **others)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks of decoder and vision tower that FSDP shards, from the model's `_no_split_modules`."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} does not name its decoder layers (_no_split_modules); it cannot be sharded."
        )
    return layers


def source_dtype(config: PretrainedConfig, path: str | None = None) -> torch.dtype:
    """Return the dtype of the source checkpoint from its config, else the dtype of most numbers in its files.

    path: path of the checkpoint, or None to use only the config.
    """
    # Qwen3-VL's configs have a dtype only for the decoder.
    named = (getattr(part, "dtype", None) for part in (config, config.get_text_config()))
    if named_dtype := next((dtype for dtype in named if isinstance(dtype, torch.dtype)), None):
        return named_dtype
    try:
        return (path and read_entries(path).dtype) or torch.float32
    except NoEntries:
        return torch.float32
