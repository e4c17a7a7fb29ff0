"""Keys of the models besides the policy: critic and reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rltrain.config.model_schema import CheckpointConfig, FSDPConfig, OptimConfig

_ACTOR = "${actor_rollout_ref.actor."


@dataclass
class CriticModelConfig:
    """The model under the value head."""

    path: str | None = None
    """Hugging Face folder or hub name; null: the actor's. A classification head of one label is kept, else the head starts at 0."""
    trust_remote_code: bool = "${actor_rollout_ref.model.trust_remote_code}"  # type: ignore[assignment]
    """Run Python code that comes with the model."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Free-form: fields of the model's config to replace."""
    enable_gradient_checkpointing: bool = True
    """Recompute each layer in the backward pass."""
    lora_rank: int = 0
    """The critic's own LoRA: rank of adapters over frozen weights; 0: train all weights. Adapters want a larger optim.lr, such as 1e-4."""
    lora_alpha: float = 16.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    target_modules: Any = "all-linear"
    """Layers that get adapters: all-linear (all but the head), a list of names such as [q_proj,v_proj], or a pattern of full names."""
    exclude_modules: Any = None
    """Layers that get none all the same: a list of names, or a pattern of full names."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""
    tokenizer_path: str | None = None
    """No effect: the critic reads the actor's tokens."""
    use_remove_padding: bool = True
    """No effect: sequences are always packed."""
    use_shm: bool = False
    """No effect: weights are read once, by rank 0."""
    external_lib: str | None = None
    """No effect: import it in your own entry point."""

    @property
    def uses_lora(self) -> bool:
        """Whether adapters and the head are trained instead of all weights."""
        return self.lora_rank > 0


@dataclass
class CriticConfig:
    """The value function. Sizes and passes follow the actor's unless set."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """Model."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """Optimizer."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """No effect: a checkpoint always holds the whole critic."""
    strategy: str = _ACTOR + "strategy}"
    """Follows the actor."""
    ppo_mini_batch_size: int = _ACTOR + "ppo_mini_batch_size}"  # type: ignore[assignment]
    """Prompts per optimizer step, over all devices, with all their answers."""
    ppo_micro_batch_size_per_gpu: int | None = _ACTOR + "ppo_micro_batch_size_per_gpu}"  # type: ignore[assignment]
    """Samples per forward and backward on one device, when use_dynamic_bsz=False."""
    forward_micro_batch_size_per_gpu: int | None = "${critic.ppo_micro_batch_size_per_gpu}"  # type: ignore[assignment]
    """Samples per forward of the values pass on one device, when use_dynamic_bsz=False."""
    use_dynamic_bsz: bool = _ACTOR + "use_dynamic_bsz}"  # type: ignore[assignment]
    """Cut micro-batches by tokens instead of by samples."""
    ppo_max_token_len_per_gpu: int = _ACTOR + "ppo_max_token_len_per_gpu}"  # type: ignore[assignment]
    """Tokens per forward and backward on one device."""
    forward_max_token_len_per_gpu: int = "${critic.ppo_max_token_len_per_gpu}"  # type: ignore[assignment]
    """Tokens per forward of the values pass on one device."""
    ppo_epochs: int = _ACTOR + "ppo_epochs}"  # type: ignore[assignment]
    """Passes over each batch."""
    shuffle: bool = _ACTOR + "shuffle}"  # type: ignore[assignment]
    """Shuffle the prompts of a batch before it is cut into mini-batches."""
    cliprange_value: float = 0.5
    """The loss does not reward values that move further than this from those of the values pass."""
    loss_agg_mode: str = _ACTOR + "loss_agg_mode}"
    """As actor.loss_agg_mode."""
    ulysses_sequence_parallel_size: int = 1
    """Devices that share each sequence."""
    rollout_n: int | None = None
    """No effect: it follows actor_rollout_ref.rollout.n."""


@dataclass
class RewardModelModelConfig:
    """The reward model."""

    path: str | None = None
    """Hugging Face folder or hub name of a sequence classifier with one label."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    input_tokenizer: str | None = None
    """No effect: answers are always written anew with the reward model's own tokenizer and chat template."""
    fsdp_config: FSDPConfig = field(default_factory=lambda: FSDPConfig(param_offload=False))
    """Sharding; param_offload keeps the reward model in host memory between its passes."""
    use_remove_padding: bool = True
    """No effect: sequences are always packed."""
    external_lib: str | None = None
    """No effect: import it in your own entry point."""


@dataclass
class OverlongBufferConfig:
    """DAPO's soft penalty for long answers (reward_manager=dapo)."""

    enable: bool = False
    """Subtract a penalty that grows linearly over the last tokens before data.max_response_length."""
    len: int = 0
    """Those last tokens."""
    penalty_factor: float = 1.0
    """Penalty of an answer at the limit."""
    log: bool = False
    """No effect: the penalty is always logged as reward/overlong/mean."""


@dataclass
class RewardModelConfig:
    """Rewards by a model, and how rewards are put together: weight * model + rule_weight * rule, minus penalties."""

    enable: bool = False
    """Score answers with a reward model."""
    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    """Model."""
    weight: float = 1.0
    """Weight of the reward model's score."""
    rule_weight: float = 1.0
    """Weight of the rule reward beside a reward model; 0: no scorer is needed, none runs."""
    micro_batch_size_per_gpu: int | None = _ACTOR + "ppo_micro_batch_size_per_gpu}"  # type: ignore[assignment]
    """Samples per forward on one device, when use_dynamic_bsz=False."""
    use_dynamic_bsz: bool = _ACTOR + "use_dynamic_bsz}"  # type: ignore[assignment]
    """Cut by tokens instead of by samples."""
    forward_max_token_len_per_gpu: int = _ACTOR + "ppo_max_token_len_per_gpu}"  # type: ignore[assignment]
    """Tokens per forward on one device."""
    reward_manager: str = "naive"
    """naive (one answer at a time), dapo (the same with overlong_buffer), or batch (your function takes lists of answers)."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    """Penalty for long answers."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """No effect: a function of your own takes custom_reward_function.reward_kwargs."""
    launch_reward_fn_async: bool = False
    """No effect: scoring always runs in its own processes."""
