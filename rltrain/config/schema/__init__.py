"""Every configuration key: type, default, rules (see `fields`), and the help text, which is the string under each
field.

Names and meanings are verl's. A default that starts with ``${`` follows another key. Keys of verl that change nothing
here are not fields but rows of ``verl/keys.tsv``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rltrain.config.schema.algorithm import REWARDED, AlgorithmConfig, KLKind
from rltrain.config.schema.distillation import DistillationConfig
from rltrain.config.schema.fields import key, section
from rltrain.config.schema.model import (
    ACTOR,
    Aggregation,
    CriticConfig,
    FSDPConfig,
    ModelConfig,
    OffloadConfig,
    OptimConfig,
    RewardModelConfig,
    RouterReplayConfig,
    SharesSequences,
)
from rltrain.config.schema.policy_loss import POLICY_LOSS, PolicyLossConfig
from rltrain.config.schema.reward import CustomRewardConfig, RewardConfig, ScoringConfig
from rltrain.config.schema.rollout import RolloutConfig
from rltrain.config.schema.trainer import TRAINS, VALIDATES, WITH_CRITIC, TrainerConfig

_SUMS = "seq-mean-token-sum-norm"
_WITH_REFERENCE = {
    "actor.use_kl_loss or algorithm.use_kl_in_reward": "there is no reference policy with use_kl_loss=False"
}
_WHOLE = {
    "actor_rollout_ref.model.uses_lora=False": "with LoRA the reference is the actor without its adapters, as in verl"
}
_REFERENCE_PASS = {
    "algorithm.use_kl_in_reward or actor.kl_loss_type!=full": "kl_loss_type=full runs the reference inside the update"
}
_WITH_SCORER = {"reward_model.runs_scorers": "only the reward model counts unless reward_model.rule_weight is set"}


@dataclass
class SamplerConfig:
    """Order of the prompts."""

    name: str = key("shuffle", among=("shuffle", "solve_rate"), plugin=True)
    """shuffle (in file order with data.shuffle=False), solve_rate (skips most prompts that were always or never solved
    before), or a user's sampler: FILE.py:NAME (verl's data.sampler.class_path and class_name)."""
    revisit: float = key(0.1, least=0, most=1, only_with="name=solve_rate")
    """solve_rate: number of times per epoch that such a prompt is tried again."""


@dataclass
class DataConfig:
    """Prompts: files, columns, lengths, order."""

    # Any, because OmegaConf has no union of text and list; see `check.as_list`.
    train_files: Any = key(None, only_with=TRAINS)
    """Data file or list of data files to train on: Parquet, JSON lines, JSON, CSV (required, except for an
    evaluation)."""
    val_files: Any = None
    """Data file or list of data files to validate on; null: no validation."""
    train_batch_size: int = key(1024, least=1, only_with=TRAINS)
    """Prompts per step. The incomplete last batch of an epoch is dropped."""
    gen_batch_size: int | None = key(
        None,
        least=1,
        only_with={
            "algorithm.filter_groups.enable or trainer.verl_version!=0.9": "in verl 0.9 it is the size of a fetch"
        },
    )
    """Prompts per round of generation with algorithm.filter_groups. Without filter_groups: prompts per step, instead of
    train_batch_size (verl 0.5 to 0.8). null: train_batch_size."""
    max_prompt_length: int = key(512, least=1)
    """Longest prompt in tokens, including the chat template."""
    max_response_length: int = key(512, least=1)
    """Longest response in tokens."""
    filter_overlong_prompts: bool = False
    """Drop rows whose prompt is longer than max_prompt_length."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """Treatment of a prompt that is too long and not dropped: error, left (keep the end), right (keep the start),
    middle (keep both ends)."""
    prompt_key: str = "prompt"
    """Column with the chat messages."""
    image_key: str = "images"
    """Column with the images of a prompt: each {bytes} or {path}, relative to the folder of the file."""
    min_pixels: int | None = key(None, least=1)
    """Smaller images are scaled up to this number of pixels (width times height); null: only the processor's bound."""
    max_pixels: int | None = key(None, least=1)
    """Larger images are scaled down to this number of pixels; null: only the processor's bound."""
    video_fps: float = key(2.0, over=0)
    """Frames to sample per second of a video."""
    video_max_frames: int = key(64, least=2)
    """Maximum frames to sample of a video. Two frames become the tokens of one image of their size."""
    video_min_pixels: int | None = key(None, least=1)
    """As min_pixels, for the frames of videos."""
    video_max_pixels: int | None = key(None, least=1)
    """As max_pixels, for the frames of videos."""
    reward_fn_key: str = "data_source"
    """Column that selects the scorer."""
    shuffle: bool = True
    """Shuffle the prompts again in every epoch. Batch k depends only on data.seed and k."""
    custom_cls: str | None = key(None, plugin=True)
    """A user's dataset class that makes the rows: FILE.py:NAME (verl's data.custom_cls.path and name); null: rows are
    read from the data files."""
    own_keys: dict[str, Any] = key({})
    """Free-form: additional keys of data for the user's classes (custom_cls, sampler), passed in their config. Unknown
    keys of data are put here."""
    sampler: SamplerConfig = section(SamplerConfig)
    """Order of the prompts."""
    mixing: dict[str, Any] = key({})
    """Free-form: the weight of each data_source or file (by its path or name) among the prompts of a batch, such as
    {openai/gsm8k: 3, math.parquet: 1}; 0 excludes rows. {}: all rows have equal weight."""
    seed: int = 1
    """Seed of the order of prompts, and of sampling unless rollout.seed is set."""
    train_max_samples: int = -1
    """Train on only this number of rows, drawn with data.seed (with data.shuffle=False the first); 0 or less: all."""
    val_max_samples: int = key(-1, only_with=VALIDATES)
    """Validate on only this number of rows, chosen in the same way; 0 or less: all."""
    apply_chat_template_kwargs: dict[str, Any] = key({})
    """Free-form: arguments of the chat template, such as enable_thinking."""


@dataclass
class CheckpointConfig:
    """Contents of a checkpoint."""

    save_contents: list[str] = key(
        ["model", "optimizer", "extra", "hf_model"], among=("model", "optimizer", "extra", "hf_model")
    )
    """model, optimizer and extra are always saved together; hf_model adds a Hugging Face folder."""


@dataclass
class AdaptiveEntropyConfig:
    """An entropy bonus with a target (Skywork-OR1)."""

    target_entropy: float | None = key(None, over=0)
    """Target of the mean entropy of a token, in nats. The weight of the bonus starts at entropy_coeff and changes from
    step to step. The bonus applies only in steps that begin at or below the target. null: the weight stays
    entropy_coeff."""
    delta_ent_coef: float = key(0.0001, least=0, only_with="target_entropy")
    """Increase of the weight after a step that began below the target, and decrease after one that began above."""
    max_ent_coef: float = key(0.005, least=0, only_with="target_entropy")
    """Largest weight; the smallest is 0."""

    @property
    def enabled(self) -> bool:
        """True if the weight is adapted."""
        return self.target_entropy is not None


@dataclass
class ActorConfig(SharesSequences):
    """The update of the policy."""

    optim: OptimConfig = section(OptimConfig, only_with=TRAINS)
    """Optimizer."""
    fsdp_config: FSDPConfig = section(FSDPConfig)
    """Sharding."""
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    """Policy loss."""
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    """Checkpoint contents."""
    router_replay: RouterReplayConfig = section(RouterReplayConfig, only_with=TRAINS)
    """Routing replay."""
    ppo_mini_batch_size: int = key(256, least=1)
    """Prompts per optimizer step over all devices, with all their responses."""
    ppo_micro_batch_size_per_gpu: int | None = key(None, least=1)
    """Samples per forward and backward on one device, or on a whole sequence-parallel group. See use_dynamic_bsz."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens (True) or by samples (False). null: by the tokens of ppo_micro_batch_size_per_gpu
    longest sequences if it is set, else by ppo_max_token_len_per_gpu. Other passes follow the same rule, and without
    sizes of their section they use the actor's."""
    ppo_max_token_len_per_gpu: int = key(16384, least=1)
    """Tokens per forward and backward on one device; the budget of a sequence-parallel group is this times its size."""
    ppo_epochs: int = key(1, least=1)
    """Passes over each batch."""
    recompute_old_log_prob: Literal["auto", "always"] = "auto"
    """Source of the old log-probs of the first mini-batch. auto: the update's forward, unless they are needed earlier;
    always: a separate pass."""
    shuffle: bool = False
    """Shuffle the prompts of a batch before it is cut into mini-batches, again in every epoch over it."""
    clip_ratio: float = key(
        0.2,
        least=0,
        only_with={
            "clip_ratio_low=null or clip_ratio_high=null": "clip_ratio_low and clip_ratio_high are both set",
            **POLICY_LOSS,
        },
    )
    """PPO clips the importance ratio to [1 - clip_ratio, 1 + clip_ratio]."""
    clip_ratio_low: float | None = key(None, least=0, only_with=POLICY_LOSS)
    """Lower clip range; null: clip_ratio."""
    clip_ratio_high: float | None = key(None, least=0, only_with=POLICY_LOSS)
    """Upper clip range; null: clip_ratio."""
    clip_ratio_c: float = key(3.0, least=1, only_with=POLICY_LOSS)
    """Dual clip: with a negative advantage A the loss is at most -A * clip_ratio_c. dppo_tv, dppo_kl: largest weight of
    a token."""
    tau_pos: float = key(1.0, over=0)
    """sapo: temperature of the gate for positive advantages."""
    tau_neg: float = key(1.05, over=0)
    """sapo: temperature of the gate for other advantages."""
    freeze_vision_tower: bool = False
    """Prompts with images: freeze the vision tower of the policy and of a critic, and the projection of its features.
    With LoRA it is frozen anyway unless target_modules names its layers."""
    loss_agg_mode: Aggregation | None = None
    """Aggregation of token losses over the global mini-batch; null: the loss's default (gspo, sapo, geo_mean and real
    seq-mean-token-mean, luspo and topr seq-mean-token-sum, others token-mean), and token-mean for entropy and KL."""
    loss_scale_factor: int | None = key(
        None,
        least=1,
        only_with={f"loss_agg_mode={_SUMS} or critic.loss_agg_mode={_SUMS}": f"only loss_agg_mode={_SUMS} uses it"},
    )
    """Divisor of seq-mean-token-sum-norm; null: data.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    adaptive_entropy: AdaptiveEntropyConfig = section(AdaptiveEntropyConfig)
    """Entropy target."""
    router_aux_loss_coef: float = key(0.0, least=0)
    """Models with experts: weight of the load-balancing loss, N sum_e f_e P_e of a layer (Switch Transformer), averaged
    over layers. f is computed over the whole mini-batch: with router_replay it is known, otherwise it takes one more
    forward. Model cards train with 0.001; 0: none."""
    router_bias_update_rate: float = key(0.0, least=0)
    """Models whose routers have a correction bias (DeepSeek-V3, GLM-4-MoE): after each optimizer step, the bias of an
    expert moves up by this if its load in the mini-batch was below the mean, and down if it was above (Wang et al.
    2024). DeepSeek-V3 was trained with 0.001; 0: the bias is fixed."""
    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss."""
    kl_loss_coef: float = key(0.001, least=0, only_with="use_kl_loss")
    """Weight of the KL in the loss."""
    kl_loss_type: KLKind = key("low_var_kl", only_with="use_kl_loss")
    """Estimator of the KL in the loss: kl (k1), abs, mse (k2), low_var_kl (k3); with + (k3+): its value with the
    gradient of k2; full: the exact KL over the vocabulary."""
    use_bias_correction_kl: bool = key(
        False,
        only_with={
            "use_kl_loss": "use_kl_loss is False",
            "kl_loss_type!=full": "kl_loss_type=full takes no sampled tokens",
        },
    )
    """Multiply the KL of a token by pi / pi_old, which makes it unbiased when the policy has moved (DeepSeek-V3.2)."""
    off_policy_mask_threshold: float | None = key(None, least=0)
    """Mask responses with a negative advantage in the policy loss, not in its denominators, if the mean over tokens of
    log pi_engine - log pi exceeds this (DeepSeek-V3.2); null: mask none."""
    top_entropy_quantile: float = key(1.0, over=0, most=1, only_with=REWARDED)
    """Share of the tokens of a global mini-batch that enter the policy loss: those with the highest entropy of the
    policy that sampled them. The others stay in the denominators (Wang et al. 2025)."""
    ulysses_sequence_parallel_size: int = key(1, least=1)
    """Neighbouring devices that share each sequence (Ulysses), and thus their token budgets. It must divide the
    attention heads."""
    ring_attention_size: int = key(1, least=1)
    """Share each sequence among this many times as many devices, which pass keys and values around (ring attention). It
    need not divide the attention heads, and sends more data than Ulysses."""

    @property
    def ranks_per_sample(self) -> int:
        """Return the number of ranks that compute the same samples."""
        return self.ranks_per_sequence * (self.fsdp_config.tensor_parallel_size or 1)


@dataclass
class RefModelConfig:
    """The weights of the reference."""

    path: str | None = key(
        "${actor_rollout_ref.model.path}",
        only_with=_WHOLE,
    )
    """Hugging Face folder or hub name: the initial model of the training, or another one with its tokenizer."""


@dataclass
class RefConfig(SharesSequences):
    """The frozen reference policy, sharded and computed like the actor. Its budgets follow the actor's unless set."""

    model: RefModelConfig = section(RefModelConfig)
    """Model."""
    fsdp_config: OffloadConfig = section(
        OffloadConfig,
        only_with=_WHOLE,
    )
    """Sharding; param_offload keeps the reference in host memory between its passes."""
    log_prob_micro_batch_size_per_gpu: int | None = key(None, least=1, only_with=_REFERENCE_PASS)
    """Samples per forward on one device; null: as for the actor."""
    log_prob_use_dynamic_bsz: bool | None = key(ACTOR + "use_dynamic_bsz}", only_with=_REFERENCE_PASS)
    """As actor.use_dynamic_bsz."""
    log_prob_max_token_len_per_gpu: int | None = key(None, least=1, only_with=_REFERENCE_PASS)
    """Tokens per forward on one device; null: as for the actor."""
    ulysses_sequence_parallel_size: int = key(ACTOR + "ulysses_sequence_parallel_size}", least=1)
    """Devices that share each sequence. It may differ from the actor's, except with full KLs and with LoRA."""
    ring_attention_size: int = key(ACTOR + "ring_attention_size}", least=1)
    """As actor.ring_attention_size."""
    update_every_steps: int | None = key(None, least=1)
    """Interval in steps at which the reference is updated from the policy (update_mix); null: never. A reference that
    is updated is part of the checkpoint."""
    update_mix: float = key(1.0, over=0, most=1, only_with={"update_every_steps": "the reference is never updated"})
    """Share a of the policy in the update: reference = a * policy + (1 - a) * reference. Below 1 the reference is
    stored in float32."""

    def updates_after(self, step: int) -> bool:
        """Return whether the reference is updated at the end of ``step`` (from 1)."""
        return bool(self.update_every_steps) and step % (self.update_every_steps or 1) == 0


@dataclass
class ActorRolloutRefConfig:
    """Actor, rollout engine and reference on shared devices."""

    model: ModelConfig = section(ModelConfig)
    """Model."""
    actor: ActorConfig = section(ActorConfig)
    """Update."""
    ref: RefConfig = section(RefConfig, only_with=_WITH_REFERENCE)
    """Reference policy."""
    rollout: RolloutConfig = section(RolloutConfig)
    """Generation."""


@dataclass
class RayConfig:
    """Ray."""

    ray_init: dict[str, Any] = key({"address": None, "num_cpus": None})
    """Free-form arguments of ray.init: address (cluster to join; "auto" finds the one on this node; null: RAY_ADDRESS,
    else a local Ray), num_cpus (slots of a local Ray; null: the larger of cores and workers), _temp_dir,
    runtime_env.env_vars and others."""


@dataclass(frozen=True)
class ClusterConfig:
    """The sections that name the cluster and its devices."""

    ray_kwargs: RayConfig
    trainer: TrainerConfig


@dataclass
class SFTConfig:
    """Supervised fine-tuning on responses from the data."""

    enabled: bool = False
    """Learn the assistant's turns of conversations in the data (rltrain sft sets it)."""
    messages_key: str = key("messages", only_with="enabled")
    """Column with conversations: messages of the roles system, user, assistant and tool. Rows without it need
    data.prompt_key and response_key. In sft.messages_key, response_key and tools_key, a dot selects a field of a
    column."""
    response_key: str = key("response", only_with="enabled")
    """Column with the response as text, for rows without messages_key."""
    tools_key: str = key("tools", only_with="enabled")
    """Column with the JSON schemas of the tools that a conversation may call: a list, or its JSON text."""
    turns: Literal["all", "last"] = key("all", only_with="enabled")
    """Assistant turns that are learned: all, or last (earlier ones belong to the prompt)."""


@dataclass
class Config:
    """All settings of a run."""

    data: DataConfig = section(DataConfig)
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    """Actor, rollout engine and reference."""
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    """Advantages."""
    distillation: DistillationConfig = section(DistillationConfig, only_with=TRAINS)
    """A teacher."""
    sft: SFTConfig = section(SFTConfig, only_with=TRAINS)
    """Supervised fine-tuning."""
    critic: CriticConfig = section(CriticConfig, only_with=WITH_CRITIC)
    """Value function (gae)."""
    custom_reward_function: CustomRewardConfig = section(CustomRewardConfig, only_with=_WITH_SCORER)
    """The user's reward function."""
    reward: RewardConfig = section(RewardConfig, only_with=_WITH_SCORER)
    """Scoring processes."""
    reward_model: RewardModelConfig = section(RewardModelConfig)
    """Reward model and reward manager."""
    trainer: TrainerConfig = section(TrainerConfig)
    """The run."""
    ray_kwargs: RayConfig = section(RayConfig)
    """Ray."""

    @property
    def learns_from_rewards(self) -> bool:
        """False if a teacher or the responses in the data are the only training signal."""
        return not (self.distillation.is_alone or self.sft.enabled)

    @property
    def cluster(self) -> ClusterConfig:
        """The sections of the cluster."""
        return ClusterConfig(self.ray_kwargs, self.trainer)

    @property
    def scoring(self) -> ScoringConfig:
        """The sections of the scorers."""
        return ScoringConfig(self.custom_reward_function, self.reward, self.reward_model)
