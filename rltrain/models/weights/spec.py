"""Model and sharding of each role: one record per role, from its sections of the config."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from rltrain.common.device import Device, resolve_dtype
from rltrain.config.budgets import judge_lengths, longest_sequence, tensor_size
from rltrain.config.passes import ROLES, Role
from rltrain.config.schema import Config
from rltrain.config.schema.keys import get
from rltrain.config.schema.model import CriticModelConfig, FSDPConfig, ModelConfig, ShardingConfig, SharesSequences
from rltrain.config.step_passes import StepPasses, make_step_passes, rests_on_host
from rltrain.models.forward import PolicyModel, ScalarModel
from rltrain.models.load import load_config
from rltrain.models.weights.lora import Lora, lora_of

Tower = Literal["rests", "frozen", "trained"]


@dataclass(frozen=True)
class ModelSpec:
    """Settings of a model for `sharded_model`."""

    path: str
    role: str = "actor_rollout_ref.actor"
    """Config section, for messages."""
    trust_remote_code: bool = False
    override: dict[str, Any] = field(default_factory=dict)
    fsdp: ShardingConfig = field(default_factory=ShardingConfig)
    """Sharding settings."""
    master_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    gradient_checkpointing: bool | int | str = False
    activation_offload: bool = False
    """Recomputed layers: all, a number or "selective" (`recompute_activations`); and whether their inputs are
    offloaded."""
    sequence_parallel_size: int = 1
    """Number of ranks that share each sequence."""
    tensor_size: int = 1
    """Number of ranks that share each matrix (tensor parallelism)."""
    ring_size: int = 1
    """Number of groups of these ranks that pass keys and values around (`models.attention.ring`)."""
    lora: Lora | None = None
    """Adapters, in a separate dtype, over frozen weights in ``master_dtype``."""
    longest: int | None = None
    """Maximum number of tokens of a sequence."""
    fused_kernels: bool = False
    """See `kernels_of`."""
    fp32_head: bool = False
    """Compute the head's product in float32 (`head_product`)."""
    compiled: bool = False
    """Compile the decoder layers."""
    tower: Tower = "rests"
    """Mode of the vision tower, if there is one: "rests" (unused, for text prompts), "frozen" or "trained"."""
    is_copy: bool = False
    """True if the weights are the policy's initial weights."""
    rests_on_host: bool = False
    """True to offload the model in phases that do not need it (`specs_of`)."""

    @property
    def trained_dtype(self) -> torch.dtype:
        """dtype of the trained weights."""
        return self.lora.dtype if self.lora else self.master_dtype

    @property
    def section(self) -> str:
        """Config section of the model."""
        return _section(self.role)

    @property
    def ulysses_key(self) -> str:
        """Key of the size of Ulysses."""
        return f"{self.role}.ulysses_sequence_parallel_size"

    @property
    def ulysses_and_ring(self) -> tuple[int, int]:
        """Sizes of Ulysses and of the ring. Their product is ``sequence_parallel_size``."""
        return self.sequence_parallel_size // self.ring_size, self.ring_size

    def load_config(self) -> PretrainedConfig:
        """Load the Hugging Face config with the user's overrides. Raises ConfigError."""
        trust = self.trust_remote_code
        config = load_config(self.path, self.section, trust_remote_code=trust, override=self.override)
        if self.fp32_head:
            config.head_dtype = "float32"  # vLLM reads this from an export, too
        return config


Specs = dict[Role, tuple[type[Any], ModelSpec]]
"""Class and spec of each model."""

# In the functions below, ``images`` is True if prompts have images.


def actor_spec(cfg: Config, device: Device, images: bool = False, learns_from_them: bool = True) -> ModelSpec:
    """Return the spec of the trained policy. If images occur only in evaluation, the tower is frozen."""
    roles = cfg.actor_rollout_ref
    spec = _trained(cfg, "actor_rollout_ref.actor", roles.model, roles.actor.fsdp_config, roles.actor, device, images)
    spec = replace(spec, fp32_head=roles.model.fp32_head)
    return spec if learns_from_them or not images else replace(spec, tower="frozen")


def frozen_spec(cfg: Config, device: Device, images: bool = False, role: Role = "ref") -> ModelSpec:
    """Return the spec of a frozen policy: the initial one, or the model that ``role`` names, sharded like the actor."""
    actor, section = actor_spec(cfg, device, images), ROLES[role].section
    path = get(cfg, f"{section}.model.path") or actor.path
    # A master dtype wider than the compute dtype is useless for frozen weights, unless they are updated by less than
    # the compute dtype's precision.
    ref = cfg.actor_rollout_ref.ref
    mixes = role == "ref" and ref.update_every_steps and ref.update_mix < 1
    return replace(
        actor,
        path=path,
        role=section,
        master_dtype=torch.float32 if mixes else actor.compute_dtype,
        gradient_checkpointing=False,
        sequence_parallel_size=get(cfg, f"{section}.ranks_per_sequence"),
        ring_size=get(cfg, f"{section}.ring_attention_size"),
        lora=None,
        tower="frozen" if images else "rests",
        is_copy=path == actor.path,
    )


def critic_spec(cfg: Config, device: Device, images: bool = False) -> ModelSpec:
    """Return the spec of the value function."""
    return _trained(cfg, "critic", cfg.critic.model, cfg.critic.model.fsdp_config, cfg.critic, device, images)


def reward_model_spec(cfg: Config, device: Device) -> ModelSpec:
    """Return the spec of the model that scores responses, from text only."""
    model = cfg.reward_model.model
    dtype = resolve_dtype(model.fsdp_config.compute_dtype, device)
    spec = ModelSpec(model.path or "", "reward_model", model.trust_remote_code, fsdp=model.fsdp_config)
    # It is never trained, so it is stored in its compute dtype.
    return replace(
        spec,
        master_dtype=dtype,
        compute_dtype=dtype,
        longest=longest_sequence(cfg),
        fused_kernels=cfg.actor_rollout_ref.model.use_liger,
    )


def judge_spec(cfg: Config, device: Device) -> ModelSpec:
    """Return the spec of the model that generates judgements of responses."""
    return replace(reward_model_spec(cfg, device), longest=sum(judge_lengths(cfg)))


def specs_of(cfg: Config, device: Device, passes: StepPasses | None = None) -> Specs:
    """Return the models of a run: the policy (also in an evaluation), and the roles in ``passes.roles``. passes: None
    for a run without images.
    """
    passes = passes or make_step_passes(cfg)

    def model(role: Role) -> tuple[type[Any], ModelSpec]:
        if role == "actor":
            return PolicyModel, actor_spec(cfg, device, passes.images, passes.images_in_training)
        if role == "critic":
            return ScalarModel, critic_spec(cfg, device, passes.images_in_training)
        if role == "reward_model":
            return ScalarModel, reward_model_spec(cfg, device)
        if role == "judge":
            return PolicyModel, judge_spec(cfg, device)
        return PolicyModel, frozen_spec(cfg, device, passes.images_in_training, role)

    kinds = {role: model(role) for role in ROLES if role == "actor" or role in passes.roles}
    return {
        role: (kind, replace(spec, rests_on_host=rests_on_host(cfg, role), tensor_size=tensor_size(cfg, role)))
        for role, (kind, spec) in kinds.items()
    }


def _trained(
    cfg: Config,
    role: str,
    model: ModelConfig | CriticModelConfig,
    fsdp: FSDPConfig,
    sharing: SharesSequences,
    device: Device,
    images: bool,
) -> ModelSpec:
    tower: Tower = "frozen" if cfg.actor_rollout_ref.actor.freeze_vision_tower else "trained"
    dtype, compute_dtype = resolve_dtype(fsdp.model_dtype, device), resolve_dtype(fsdp.compute_dtype, device)
    lora = lora_of(model, _section(role), dtype, cfg.data.seed)
    return ModelSpec(
        path=model.path or cfg.actor_rollout_ref.model.path,
        role=role,
        trust_remote_code=model.trust_remote_code,
        # The attention implementation is always ours (see `effects`).
        override={key: value for key, value in model.override_config.items() if key != "attn_implementation"},
        fsdp=fsdp,
        master_dtype=compute_dtype if lora else dtype,  # the weights under adapters are frozen too
        compute_dtype=compute_dtype,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        activation_offload=model.enable_activation_offload,
        sequence_parallel_size=sharing.ranks_per_sequence,
        ring_size=sharing.ring_attention_size,
        lora=lora,
        longest=longest_sequence(cfg),
        fused_kernels=cfg.actor_rollout_ref.model.use_liger,
        compiled=fsdp.use_torch_compile,
        tower=tower if images else "rests",
    )


def _section(role: str) -> str:
    return role.removesuffix(".actor") + ".model"
