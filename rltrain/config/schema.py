"""Every configuration key, its type, its default and its help text (the string under each field).

Names and meanings are verl's. A default that starts with ``${`` follows another key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rltrain.config.algorithm_schema import AlgorithmConfig
from rltrain.config.critic_schema import CriticConfig, RewardModelConfig
from rltrain.config.model_schema import CheckpointConfig, FSDPConfig, OptimConfig
from rltrain.config.rollout_schema import RolloutConfig
from rltrain.config.run_schema import CustomRewardConfig, RayConfig, RewardConfig, TrainerConfig

_ACTOR = "${actor_rollout_ref.actor."


@dataclass
class SamplerConfig:
    """Which prompts come next."""

    name: str = "shuffle"
    """shuffle (in order with data.shuffle=False), solve_rate (mostly skips prompts always or never solved before), or FILE.py:NAME."""
    revisit: float = 0.1
    """solve_rate: how often such a prompt is looked at again, per epoch."""


@dataclass
class DataConfig:
    """Prompts: files, columns, lengths, order."""

    train_files: Any = None
    """Parquet file or list of files to train on (required)."""
    val_files: Any = None
    """Parquet file or list of files to validate on; null: no validation."""
    train_batch_size: int = 1024
    """Prompts per step. The incomplete tail of an epoch is left out."""
    gen_batch_size: int | None = None
    """Prompts per round of generation with algorithm.filter_groups; null: train_batch_size."""
    max_prompt_length: int = 512
    """Longest prompt in tokens, chat template included."""
    max_response_length: int = 512
    """Longest answer in tokens."""
    filter_overlong_prompts: bool = False
    """Leave out rows whose prompt is longer than max_prompt_length."""
    filter_overlong_prompts_workers: int = 1
    """No effect: prompts are tokenised once, in batches, when they are read."""
    truncation: str = "error"
    """What to do with a prompt that is still too long: error, left (keep the end), right (keep the start), middle (keep both ends)."""
    prompt_key: str = "prompt"
    """Column with the chat messages."""
    reward_fn_key: str = "data_source"
    """Column that chooses the scorer."""
    image_key: str = "images"
    """No effect: rows with something in the columns images or videos are refused in this version."""
    shuffle: bool = True
    """Shuffle the prompts anew in every epoch; batch k depends on data.seed and k alone."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """Which prompts come next."""
    seed: int = 1
    """Decides the order of prompts, and the sampling unless rollout.seed is set."""
    train_max_samples: int = -1
    """Use only the first rows for training; -1: all."""
    val_max_samples: int = -1
    """Use only the first rows for validation; -1: all."""
    val_batch_size: int | None = None
    """No effect: all validation prompts are handed to the engines at once."""
    return_raw_chat: bool = False
    """No effect: messages are always kept."""
    trust_remote_code: bool = False
    """No effect: see actor_rollout_ref.model.trust_remote_code."""
    dataloader_num_workers: int = 0
    """No effect: there is no data loader to feed."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Free-form arguments of the chat template, such as enable_thinking."""


@dataclass
class PolicyLossConfig:
    """Which surrogate is maximised."""

    loss_mode: str = "vanilla"
    """vanilla (PPO with dual clip), gspo, gpg, cispo, sapo, geo_mean, clip_cov, kl_cov, dppo_tv, dppo_kl, or your own: FILE.py:NAME."""
    clip_cov_ratio: float = 0.0002
    """clip_cov: share of tokens that get no gradient."""
    clip_cov_lb: float = 1.0
    """clip_cov: smallest covariance of such a token."""
    clip_cov_ub: float = 5.0
    """clip_cov: largest covariance of such a token."""
    kl_cov_ratio: float = 0.0002
    """kl_cov: share of tokens that are held back by a KL."""
    ppo_kl_coef: float = 0.1
    """kl_cov: weight of that KL."""


@dataclass
class ActorConfig:
    """The policy's update."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """Policy loss."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoint contents."""
    strategy: str = "fsdp2"
    """Training backend: fsdp2 (fsdp is read as fsdp2)."""
    ppo_mini_batch_size: int = 256
    """Prompts per optimizer step, over all devices, with all their answers."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Samples per forward and backward on one device, when use_dynamic_bsz=False."""
    ppo_micro_batch_size: int | None = None
    """Old: the same over all data-parallel ranks."""
    use_dynamic_bsz: bool = True
    """Cut micro-batches by tokens (ppo_max_token_len_per_gpu) instead of by samples."""
    ppo_max_token_len_per_gpu: int = 16384
    """Tokens per forward and backward on one device; times the sequence-parallel size for a group."""
    ppo_epochs: int = 1
    """Passes over each batch."""
    recompute_old_log_prob: str = "auto"
    """Old log-probs of the first mini-batch. auto: from the update's own forward, unless needed earlier; always: from a pass."""
    shuffle: bool = False
    """Shuffle the prompts of a batch, anew for every pass, before it is cut into mini-batches."""
    clip_ratio: float = 0.2
    """PPO clips the importance ratio to [1 - clip_ratio, 1 + clip_ratio]."""
    clip_ratio_low: float | None = None
    """Lower clip range; null: clip_ratio."""
    clip_ratio_high: float | None = None
    """Upper clip range; null: clip_ratio."""
    clip_ratio_c: float = 3.0
    """Dual clip: with a negative advantage A the loss is at most -A * clip_ratio_c. dppo_tv, dppo_kl: largest weight of a token."""
    tau_pos: float = 1.0
    """sapo: temperature of the gate for positive advantages."""
    tau_neg: float = 1.05
    """sapo: temperature of the gate for the others."""
    loss_agg_mode: str = "token-mean"
    """token-mean, seq-mean-token-sum, seq-mean-token-mean or seq-mean-token-sum-norm, over the global mini-batch."""
    loss_scale_factor: int | None = None
    """seq-mean-token-sum-norm divides by this; null: data.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss."""
    kl_loss_coef: float = 0.001
    """Weight of that KL."""
    kl_loss_type: str = "low_var_kl"
    """kl (k1), abs, mse (k2), low_var_kl (k3); with + (k3+): its value with the gradient of k2; full: the exact KL over the vocabulary."""
    ulysses_sequence_parallel_size: int = 1
    """Neighbouring devices that share each sequence (Ulysses), so that it takes their token budgets together. It divides the heads."""
    use_torch_compile: bool = False
    """No effect: nothing is compiled in this version."""
    use_fused_kernels: bool = False
    """No effect: logits are always computed in chunks."""
    entropy_from_logits_with_chunking: bool = False
    """No effect: entropy is always computed in chunks."""
    entropy_checkpointing: bool = False
    """No effect: logits are always recomputed in the backward pass."""
    calculate_entropy: bool = False
    """No effect: entropy is always measured."""


@dataclass
class RefConfig:
    """The frozen reference policy. Budgets follow the actor's unless set."""

    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding; param_offload keeps the reference in host memory between its passes."""
    strategy: str = _ACTOR + "strategy}"
    """Follows the actor."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Samples per forward on one device, when log_prob_use_dynamic_bsz=False."""
    log_prob_micro_batch_size: int | None = None
    """Old: the same over all data-parallel ranks."""
    log_prob_use_dynamic_bsz: bool = _ACTOR + "use_dynamic_bsz}"  # type: ignore[assignment]
    """Cut by tokens instead of by samples."""
    log_prob_max_token_len_per_gpu: int = _ACTOR + "ppo_max_token_len_per_gpu}"  # type: ignore[assignment]
    """Tokens per forward on one device."""
    ulysses_sequence_parallel_size: int = _ACTOR + "ulysses_sequence_parallel_size}"  # type: ignore[assignment]
    """Devices that share each sequence; another number than the actor's will do, but for full KLs and LoRA."""
    use_torch_compile: bool = False
    """No effect: nothing is compiled in this version."""


@dataclass
class ModelConfig:
    """The model that is trained."""

    path: str = ""
    """Hugging Face folder or hub name (required)."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Free-form: fields of the model's config to replace."""
    custom_chat_template: str | None = None
    """Chat template to use instead of the tokenizer's."""
    enable_gradient_checkpointing: bool = True
    """Recompute each layer in the backward pass."""
    use_remove_padding: bool = True
    """No effect: sequences are always packed."""
    lora_rank: int = 0
    """Rank of LoRA adapters over frozen weights; 0: train all weights. Adapters want a larger optim.lr, such as 3e-5."""
    lora_alpha: float = 16.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    target_modules: Any = "all-linear"
    """Layers that get adapters: all-linear (all but the head), a list of names such as [q_proj,v_proj], or a pattern of full names."""
    exclude_modules: Any = None
    """Layers that get none all the same: a list of names, or a pattern of full names."""
    lora_adapter_path: str | None = None
    """Go on training a peft adapter: a folder or hub name, which says rank, scale and layers. The reference stays the model without it."""
    use_shm: bool = False
    """No effect: weights are read once, by rank 0."""
    use_liger: bool = False
    """No effect: there are no Liger kernels here."""
    use_fused_kernels: bool = False
    """No effect: logits are always computed in chunks."""
    enable_activation_offload: bool = False
    """No effect in this version."""
    external_lib: str | None = None
    """No effect: import it in your own entry point."""

    @property
    def uses_lora(self) -> bool:
        """Whether adapters are trained instead of the weights."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None


@dataclass
class ActorRolloutRefConfig:
    """Actor, rollout engine and reference, which share the devices."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Model."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """Update."""
    ref: RefConfig = field(default_factory=RefConfig)
    """Reference policy."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation."""
    hybrid_engine: bool = True
    """No effect: roles always share the devices."""


@dataclass
class Config:
    """Everything a run can be told."""

    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    """Actor, rollout engine and reference."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Advantages."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Value function (gae)."""
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    """Your own reward function."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Scoring processes."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """Reward model and reward manager."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The run."""
    ray_kwargs: RayConfig = field(default_factory=RayConfig)
    """Ray."""
