"""Checks that ranks can share experts and matrices of the models, and that LoRA adapters can be computed and used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rltrain.common.device import Device, get_device, resolve_dtype
from rltrain.common.errors import ConfigError
from rltrain.config.passes import ROLES, Role
from rltrain.config.schema import ActorRolloutRefConfig, Config
from rltrain.config.schema.conditions import as_text
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.keys import get
from rltrain.models.experts import experts_problem
from rltrain.models.routing import num_experts
from rltrain.models.tensor_parallel import tensor_problem
from rltrain.models.weights.lora import adapted_weights, beyond_language_model, first_adapters, ranks_of
from rltrain.models.weights.spec import ModelSpec, actor_spec
from rltrain.trainer.plan import devices_per_copy
from rltrain.workers.rollout.vllm.adapters import refuse_adapters


def sharing_problems(cfg: Config, role: Role, spec: ModelSpec, model: Any, config: Any) -> Iterator[str]:
    """Yield problems of experts and matrices that cannot be divided among the ranks."""
    yield from _experts(cfg, role, spec, model, config)
    size, section = spec.tensor_size, ROLES[role].fsdp
    if get(cfg, f"{section}.tensor_parallel_size") is None:
        section = ROLES["actor"].fsdp
    key, heads = f"{section}.tensor_parallel_size={size}", config.get_text_config().num_attention_heads
    if problem := tensor_problem(model, config, size):
        yield f"{key}: {'' if role == 'actor' else f'of {spec.path}, '}{problem}"
    elif size > 1 and heads % (size * spec.sequence_parallel_size):
        yield (
            f"{key} x {spec.role}.ulysses_sequence_parallel_size={spec.sequence_parallel_size} does not divide the "
            f"{heads} attention heads of the model. Lower one of them."
        )
    own = config.get_text_config().vocab_size
    policy = actor_spec(cfg, get_device(cfg.trainer.device)).load_config().get_text_config().vocab_size
    if size > 1 and role in ("ref", "teacher") and own != policy:
        yield (
            f"{key}: {spec.section}.path={spec.path} has {own:,} tokens and the policy {policy:,}, so parts of the "
            "vocabulary differ. Leave it out, or use a model with as many tokens."
        )


def _experts(cfg: Config, role: Role, spec: ModelSpec, model: Any, config: Any) -> Iterator[str]:
    """Yield problems of experts that cannot be divided among the ranks."""
    size, section = spec.fsdp.expert_parallel_size, ROLES[role].fsdp
    own = hasattr(get(cfg, section), "expert_parallel_size")
    # A frozen model is sharded like the actor, and may have no experts.
    if size == 1 or not (own or num_experts(config)):
        return
    key = f"{section if own else ROLES['actor'].fsdp}.expert_parallel_size={size}"
    devices = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    if problem := experts_problem(model, config, size, devices_per_copy(spec.fsdp.fsdp_size, devices)):
        yield f"{key}: {'' if own else f'of {spec.path}, '}{problem}"
    if spec.compiled:
        yield f"{key}: layers whose tokens change devices cannot be compiled. Remove {section}.use_torch_compile."


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
