"""Hugging Face models in, out of a folder or the hub."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from rltrain.errors import ConfigError


def load_config(
    path: str, section: str = "actor_rollout_ref.model", *, trust_remote_code: bool = False,
    override: dict[str, Any] | None = None,
) -> PretrainedConfig:  # fmt: skip
    """The model's config with ``override_config`` of ``section`` applied. Raises ConfigError when the folder is not a model."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{section}.path={path} is not a Hugging Face model: {error}") from error
    for key, value in (override or {}).items():
        if not hasattr(config, key):
            raise ConfigError(f"{section}.override_config.{key}: {type(config).__name__} has no such field.")
        setattr(config, key, value)
    return config


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """A copy with every dropout at zero: it would make the importance ratio of an unchanged policy differ from 1."""
    config = copy.deepcopy(config)
    for key, value in vars(config).items():
        if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def with_one_label(config: PretrainedConfig) -> PretrainedConfig:
    """A copy whose classification head gives one number."""
    config = copy.deepcopy(config)
    config.num_labels = 1
    return config


def read_weights(
    path: str, config: PretrainedConfig, dtype: torch.dtype, *, scalar: bool = False, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model with its weights, on the CPU, in ``dtype``. ``scalar``: a classifier; a head that is not there starts at 0."""
    kind: Any = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    model, report = kind.from_pretrained(
        path, config=config, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
    )
    if scalar and "score.weight" in report["missing_keys"]:
        nn.init.zeros_(model.score.weight)
    return model


def empty_model(
    config: PretrainedConfig,
    attention: str,
    dtype: torch.dtype,
    *,
    scalar: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The module structure on the meta device: no memory, no weights. Raises ConfigError where there is no such structure."""
    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = kind.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
            )
    except ValueError as error:
        raise ConfigError(f"transformers has no {kind.__name__} for {type(config).__name__}: {error}") from error
    if scalar and not isinstance(getattr(model, "score", None), nn.Linear):
        raise ConfigError(
            f"{type(model).__name__} has no linear head named 'score'; rltrain cannot use it as a critic or reward model."
        )
    return model


def recompute_activations(model: PreTrainedModel) -> None:
    """Gradient checkpointing of every decoder layer (transformers renamed the method on its way from 5.5 to 5.23)."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, as the model itself names them: what FSDP shards one by one."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} does not name its decoder layers (_no_split_modules); rltrain cannot shard it."
        )
    return layers


def source_dtype(config: PretrainedConfig) -> torch.dtype:
    """The dtype of the checkpoint the model came from."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
