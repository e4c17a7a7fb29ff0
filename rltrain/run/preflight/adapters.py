"""Checks of LoRA adapters before anything is loaded: whether they can be computed, and used by the policy's engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rltrain.common.device import Device, resolve_dtype
from rltrain.common.errors import ConfigError
from rltrain.config.schema import ActorRolloutRefConfig
from rltrain.config.schema.conditions import as_text
from rltrain.config.schema.engines import ENGINES
from rltrain.models.weights.lora import adapted_weights, beyond_language_model, first_adapters, ranks_of
from rltrain.models.weights.spec import ModelSpec
from rltrain.workers.rollout.vllm.adapters import refuse_adapters


def adapter_problems(spec: ModelSpec, model: Any, compiled_by: str) -> Iterator[str]:
    """Yield problems of adapters that cannot be loaded or computed."""
    assert spec.lora
    if spec.compiled and any(".experts." in name for name in adapted_weights(model)):
        yield (
            f"{spec.lora.section}.target_modules={as_text(spec.lora.target_modules)}: adapters of experts compute "
            f"weights in every forward pass, which cannot be compiled. Remove {compiled_by}, or remove the experts."
        )
    if spec.lora.path:
        first_adapters(model, spec.lora)


def adapters_of_engine(roles: ActorRolloutRefConfig, device: Device, model: Any, config: Any) -> Iterator[str]:
    """Yield notes on the transfer of the policy's adapters to the engine. Raises ConfigError if it does not support
    them."""
    rollout = roles.rollout
    engine, dtype = ENGINES[rollout.name], resolve_dtype(rollout.dtype, device)
    if roles.model.merges:
        # Below float32, rounding loses an adapter's contribution of less than half a unit in the last place of a
        # weight.
        if engine.adapters and dtype != torch.float32:
            yield (
                f"adapters are merged into {str(dtype).removeprefix('torch.')} weights before they are sent, which "
                "rounds them; actor_rollout_ref.model.lora.merge=False avoids this (docs/lora.md)"
            )
    elif any(".experts." in name for name in adapted_weights(model)):
        raise ConfigError(
            "actor_rollout_ref.model.lora.merge=False: adapters of experts are sent to an engine only merged. Remove "
            "it, or remove the experts from actor_rollout_ref.model.target_modules."
        )
    elif engine.adapters and engine.package:
        refuse_adapters(ranks_of(model), beyond_language_model(model), config, device.kind, dtype)
