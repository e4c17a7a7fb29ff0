"""Checks that the ranks of a run can share the experts and matrices of its models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rltrain.common.device import get_device
from rltrain.config.passes import ROLES, Role
from rltrain.config.schema import Config
from rltrain.config.schema.keys import get
from rltrain.models.experts import experts_problem
from rltrain.models.routing import num_experts
from rltrain.models.tensor_parallel import tensor_problem
from rltrain.models.weights.spec import ModelSpec, actor_spec
from rltrain.trainer.plan import devices_per_copy


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
    policy, own = (each.get_text_config().vocab_size for each in (_policy_config(cfg), config))
    if size > 1 and role in ("ref", "teacher") and own != policy:
        yield (
            f"{key}: {spec.section}.path={spec.path} has {own:,} tokens and the policy {policy:,}, so parts of the "
            "vocabulary differ. Leave it out, or use a model with as many tokens."
        )


def _policy_config(cfg: Config) -> Any:
    return actor_spec(cfg, get_device(cfg.trainer.device)).load_config()


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
