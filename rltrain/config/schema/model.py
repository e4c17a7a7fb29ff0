"""Keys of the models: policy, critic and reward model, and their common keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.fields import key, section
from rltrain.config.schema.trainer import TRAINS

# A default that begins with this text has the value of one of the actor's keys.
ACTOR = "${actor_rollout_ref.actor."
Dtype = Literal["auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16"]
HALF = ("float16", "fp16")
NO_MASTER = (
    "trained weights are kept in float32, because AdamW's eps and small steps are 0 in float16. Leave it out, and set "
    "compute_dtype to compute in float16"
)
Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]  # fmt: skip

_ON_DEVICE = {"trainer.device!=cpu": "on a CPU everything is in host memory"}
_COSINE = "lr_scheduler_type=cosine"
_ADAPTERS = {"uses_lora": "lora_rank=0"}
_SCORED = "reward_model.enable"
_CLASSIFIES = {
    _SCORED: "",
    "reward_model.model.type=discriminative": "a generative reward model is a judge: reward.judge.rule and "
    "reward.weights combine its score with the scorer's, and reward_model.rollout configures its replies",
}
_GENERATES = {_SCORED: "", "reward_model.model.type=generative": "the reward model is a classifier, without text"}
_RECOMPUTED = {"enable_gradient_checkpointing": "only the inputs of recomputed layers are offloaded"}


class SharesSequences:
    """A role whose sequences may be shared among devices."""

    ulysses_sequence_parallel_size: int
    ring_attention_size: int

    @property
    def ranks_per_sequence(self) -> int:
        """Number of ranks that share each sequence."""
        return self.ulysses_sequence_parallel_size * self.ring_attention_size


@dataclass
class OptimConfig:
    """AdamW and its learning rate."""

    lr: float = key(1e-6, least=0)
    """Peak learning rate."""
    lr_warmup_steps: int = -1
    """Steps of linear warm-up; 0 or less: lr_warmup_steps_ratio of all steps."""
    lr_warmup_steps_ratio: float = key(0.0, least=0, most=1, only_with={"lr_warmup_steps<1": "lr_warmup_steps is set"})
    """Share of all steps that warm up, if lr_warmup_steps is 0 or less."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """The learning rate after the warm-up."""
    min_lr_ratio: float = key(0.0, least=0, most=1, only_with=_COSINE)
    """Cosine ends at this share of lr."""
    num_cycles: float = key(0.5, least=0, only_with=_COSINE)
    """Cosine waves over the run; 0.5 decays once."""
    weight_decay: float = key(0.01, least=0)
    """Decoupled weight decay."""
    betas: list[float] = key([0.9, 0.999])
    """AdamW's decay rates of the first and the second moment."""
    eps: float = key(1e-8, over=0)
    """AdamW divides the first moment by the root of the second plus this. A larger value makes updates of weights with
    tiny gradients smaller."""
    clip_grad: float = key(1.0, over=0)
    """Largest global gradient norm (actor.grad_clip is the old name)."""
    moments: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of AdamW's two moments between steps; auto: that of the weights (model_dtype). bfloat16 halves their
    memory; the second moment is rounded stochastically."""


@dataclass
class OffloadConfig:
    """Offloading and sharding of a frozen model."""

    param_offload: bool = key(False, only_with=_ON_DEVICE)
    """Keep the parameters in host memory while they are unused."""
    tensor_parallel_size: int | None = key(None, least=1)
    """Neighbouring devices that share each matrix of a layer: each computes some heads, columns and tokens of the
    vocabulary. null: as for the actor, whose default is 1."""


@dataclass
class ShardingConfig(OffloadConfig):
    """Sharding and offloading of a model."""

    compute_dtype: Dtype = "auto"
    """dtype of forward and backward: auto is bfloat16 on NPU and GPU, float32 on CPU. In float16 the loss of a trained
    model is scaled (loss_scale). Gradients are reduced in float32."""
    fsdp_size: int = -1
    """Ranks that share one copy of the weights; -1: all. Fewer create replicas of shard groups (HSDP)."""
    expert_parallel_size: int = key(1, least=1)
    """Neighbouring ranks that share the experts of each layer: each holds some, and tokens are sent to the rank of
    their experts. 1: every rank gathers all experts of a layer while it computes that layer."""
    reshard_after_forward: bool = True
    """Free the gathered weights of each layer after its forward."""


@dataclass
class FSDPConfig(ShardingConfig):
    """Sharding and offloading of a trained model."""

    optimizer_offload: bool = key(False, only_with=_ON_DEVICE)
    """Keep the optimizer state in host memory. A step copies it to the device layer by layer."""
    model_dtype: Dtype = "float32"
    """dtype of the master weights."""
    use_no_sync_for_gradient_accumulation: bool = False
    """Reduce gradients once per optimizer step instead of after every micro-batch. Until then each device holds the
    gradients of all weights, 4 bytes per parameter of the whole model."""
    use_torch_compile: bool = False
    """Compile each decoder layer, for any number of tokens. The first steps take minutes."""


RouterReplay = Literal["disabled", "R2", "R3"]


@dataclass
class RouterReplayConfig:
    """Source of the experts in an update."""

    mode: RouterReplay = "disabled"
    """disabled: the router, whose choice changes from pass to pass by rounding. R2: the choices of the old_log_prob
    pass. R3: the choices of the rollout engine (hf or vllm), in the old_log_prob pass too. They are stored with every
    token, one byte per choice."""


@dataclass
class TrainedModelConfig:
    """A model that is trained, whole or by LoRA adapters."""

    trust_remote_code: bool = False
    """Run Python code of the model's repository."""
    override_config: dict[str, Any] = key({})
    """Free-form: fields of the model's config to replace."""
    enable_gradient_checkpointing: bool | int | str = True
    """Recompute layers in the backward pass instead of keeping their activations: True (all), False (none), a number N
    of 2 or more (the first N layers of the decoder; 1 and 0 are True and False), or selective (all, except the outputs
    of attention kernels, which are kept). The log-probs and gradients are the same bit for bit."""
    enable_activation_offload: bool = key(False, only_with=_ON_DEVICE | _RECOMPUTED)
    """Keep the input of each layer (one vector per token of a micro-batch) in host memory until the layer is recomputed
    from it. This allows longer micro-batches, at the cost of copies that layers wait for; unverified on hardware."""
    lora_rank: int = key(0, least=0)
    """Rank of LoRA adapters over frozen weights; 0: train all weights. Adapters need a larger optim.lr, such as
    3e-5."""
    lora_alpha: float = key(16.0, over=0, only_with=_ADAPTERS)
    """Adapters are scaled by lora_alpha / lora_rank."""
    # Any, because OmegaConf has no union of text and list; `check._lora` checks the type.
    target_modules: Any = key("all-linear", only_with=_ADAPTERS)
    """Layers with adapters: all-linear (all except the head), a list of names such as [q_proj,v_proj], or a pattern of
    full names. A list may name the experts of a mixture: experts, or experts.down_proj."""
    exclude_modules: Any = key(None, only_with=_ADAPTERS)
    """Layers without adapters, even if target_modules matches them: a list of names, or a pattern of full names."""

    @property
    def uses_lora(self) -> bool:
        """True if adapters (of a critic: and the head) are trained instead of all weights."""
        return self.lora_rank > 0


@dataclass
class LoraConfig:
    """Transfer of adapters to the rollout engine."""

    merge: bool = True
    """Merge adapters into the weights for the engine, which gets all weights in every step. False: the engine gets the
    frozen weights once, and only adapters in every later sync (megabytes). It then computes with both, as the trainer
    does, while merging rounds W + B A to the engine's dtype. Not with rollout.name=sglang. See docs/lora.md."""


@dataclass
class ModelConfig(TrainedModelConfig):
    """The model that is trained."""

    path: str = ""
    """Hugging Face folder or hub name (required), or a run folder: the model of its newest checkpoint."""
    external_lib: list[str] = key([])
    """Modules, or files FILE.py, that driver and workers import before they load a model, such as one that registers a
    family with transformers."""
    use_liger: bool = key(False, only_with={"trainer.device!=cpu": "fused kernels exist only for accelerators"})
    """Compute RMSNorm, SwiGLU and rotary embeddings of all models except the engine's with fused kernels: Liger's on
    CUDA (pip install 'rltrain[liger]'), torch_npu's on NPU."""
    fp32_head: bool = False
    """Multiply with the head (lm_head) in float32 if the model computes in half precision, in actor, reference and
    engine: log-probs of trainer and engine are closer, because no logit is rounded. Not with rollout.name=sglang. See
    docs/precision.md."""
    custom_chat_template: str | None = None
    """Chat template to use instead of the tokenizer's."""
    lora_adapter_path: str | None = None
    """Continue training a peft adapter: a folder or hub name, which sets rank, scale and layers. The reference is the
    model without the adapter."""

    lora: LoraConfig = section(LoraConfig, only_with=_ADAPTERS)
    """Adapters and the engine."""

    @property
    def uses_lora(self) -> bool:
        """True if adapters are trained instead of the weights."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None

    @property
    def merges(self) -> bool:
        """True if the engine gets weights without separate adapters."""
        return self.lora.merge or not self.uses_lora


@dataclass
class CriticModelConfig(TrainedModelConfig):
    """The model under the value head."""

    path: str | None = None
    """Hugging Face folder or hub name; null: the actor's. A classification head with one label is kept; otherwise the
    head starts at 0."""
    # The default follows the actor's key, because the critic usually is the actor's model, with the same code.
    trust_remote_code: bool = key("${actor_rollout_ref.model.trust_remote_code}")
    """Run Python code of the model's repository."""
    fsdp_config: FSDPConfig = section(FSDPConfig)
    """Sharding."""


@dataclass
class CriticOptimConfig(OptimConfig):
    """AdamW of the critic and its learning rate."""

    lr: float = key(1e-5, least=0)
    """Peak learning rate."""


@dataclass
class CriticConfig(SharesSequences):
    """The value function. Its sizes and passes follow the actor's unless set."""

    model: CriticModelConfig = section(CriticModelConfig)
    """Model."""
    optim: CriticOptimConfig = section(CriticOptimConfig, only_with=TRAINS)
    """Optimizer."""
    ppo_mini_batch_size: int = key(ACTOR + "ppo_mini_batch_size}", least=1)
    """Prompts per optimizer step over all devices, with all their responses."""
    ppo_micro_batch_size_per_gpu: int | None = key(None, least=1)
    """Samples per forward and backward on one device; null: as for the actor."""
    forward_micro_batch_size_per_gpu: int | None = key(None, least=1)
    """Samples per forward of the values pass on one device; null: as in the critic's update."""
    use_dynamic_bsz: bool | None = key(ACTOR + "use_dynamic_bsz}")
    """As actor.use_dynamic_bsz."""
    ppo_max_token_len_per_gpu: int | None = key(None, least=1)
    """Tokens per forward and backward on one device; null: as for the actor."""
    forward_max_token_len_per_gpu: int | None = key(None, least=1)
    """Tokens per forward of the values pass on one device; null: as in the critic's update."""
    ppo_epochs: int = key(ACTOR + "ppo_epochs}", least=1)
    """Passes over each batch."""
    shuffle: bool = key(ACTOR + "shuffle}")
    """Shuffle the prompts of a batch before it is cut into mini-batches."""
    cliprange_value: float = key(0.5, least=0)
    """Clip range of the value loss: moving a value further than this from the result of the values pass does not reduce
    the loss.
    """
    loss_agg_mode: Aggregation | None = key(ACTOR + "loss_agg_mode}")
    """As actor.loss_agg_mode; null: token-mean."""
    ulysses_sequence_parallel_size: int = key(1, least=1)
    """Devices that share each sequence."""
    ring_attention_size: int = key(1, least=1)
    """As actor.ring_attention_size."""


@dataclass
class RewardModelModelConfig:
    """The reward model."""

    path: str | None = None
    """Hugging Face folder or hub name of a sequence classifier with one label, or with type=generative of a
    chat model."""
    type: Literal["discriminative", "generative"] = "discriminative"
    """discriminative: a classifier, whose output is the score. generative: a judge, whose message is
    reward.judge.prompt and whose reply is read by reward.judge.parse."""
    apply_chat_template_kwargs: dict[str, Any] = key({}, only_with=_GENERATES)
    """Free-form: arguments of the judge's chat template, such as enable_thinking."""
    trust_remote_code: bool = False
    """Run Python code of the model's repository."""
    fsdp_config: ShardingConfig = section(ShardingConfig)
    """Sharding; param_offload keeps the reward model in host memory between its passes."""


@dataclass
class JudgeRolloutConfig:
    """Replies of a generative reward model."""

    name: str = key("hf", among=tuple(ENGINES))
    """Engine: hf (embedded decode loop), whichever engine the policy uses."""
    temperature: float = key(0.0, least=0)
    """Sampling temperature; 0: greedy. The same message gets the same reply in every step, sampled or not."""
    top_k: int = key(-1, only_with="temperature>0")
    """Sample among the k most likely tokens; -1: all."""
    top_p: float = key(1.0, over=0, most=1, only_with="temperature>0")
    """Sample among the most likely tokens that together have this probability."""
    prompt_length: int | None = key(None, least=1)
    """Maximum tokens of a message to the judge, in its tokenizer and chat template; null: the longest prompt and
    response, plus 1,024. A response whose message is longer counts as failed."""
    response_length: int = key(2048, least=1)
    """Maximum tokens of a reply."""
    gpu_memory_utilization: float = key(0.5, over=0, most=1)
    """Share of the device memory free before the replies, for keys and values."""
    max_num_seqs: int = key(256, least=1)
    """Maximum number of replies that an engine generates at once."""
    max_num_batched_tokens: int = key(8192, least=1)
    """Maximum tokens of messages that an engine computes at once."""


@dataclass
class OverlongBufferConfig:
    """DAPO's soft penalty (reward_manager=dapo)."""

    enable: bool = False
    """Subtract a penalty that grows linearly over the last tokens before the limit."""
    len: int = key(0, only_with="enable")
    """Number of last tokens before the limit over which the penalty grows."""
    max_resp_len: int | None = key(None, least=1, only_with="enable")
    """The limit in tokens; null: data.max_response_length. The penalty keeps growing beyond it."""
    penalty_factor: float = key(1.0, least=0, only_with="enable")
    """Penalty of a response at the limit."""


@dataclass
class RewardModelConfig:
    """Rewards by a model, and the sum of rewards: weight * model + rule_weight * rule, minus penalties."""

    enable: bool = False
    """Score responses with a reward model, which shares the devices with the other models."""
    model: RewardModelModelConfig = section(RewardModelModelConfig, only_with=_SCORED)
    """Model."""
    rollout: JudgeRolloutConfig = section(JudgeRolloutConfig, only_with=_GENERATES)
    """Replies of a generative reward model."""
    weight: float = key(1.0, least=0, only_with=_CLASSIFIES)
    """Weight of the reward model's score."""
    rule_weight: float | None = key(None, least=0, only_with=_CLASSIFIES)
    """Weight of the rule reward next to a reward model. null or 0: only the model scores, and no scorer runs."""
    micro_batch_size_per_gpu: int | None = key(None, least=1, only_with=_CLASSIFIES)
    """Samples per forward on one device; null: as for the actor."""
    use_dynamic_bsz: bool | None = key(ACTOR + "use_dynamic_bsz}", only_with=_CLASSIFIES)
    """As actor.use_dynamic_bsz."""
    forward_max_token_len_per_gpu: int | None = key(None, least=1, only_with=_CLASSIFIES)
    """Tokens per forward on one device; null: as for the actor."""
    reward_manager: Literal["naive", "dapo", "batch"] = "naive"
    """naive (one response at a time), dapo (the same with overlong_buffer), or batch (the user's function takes lists
    of responses)."""
    overlong_buffer: OverlongBufferConfig = section(OverlongBufferConfig, only_with="reward_manager=dapo")
    """Penalty for long responses."""

    @property
    def classifies(self) -> bool:
        """True if a classifier scores responses."""
        return self.enable and self.model.type == "discriminative"

    @property
    def judges(self) -> bool:
        """True if a model on the run's devices judges responses in text."""
        return self.enable and self.model.type == "generative"

    @property
    def runs_scorers(self) -> bool:
        """True if responses get a rule reward or a judge's, alone or added to a classifier's."""
        return not self.classifies or bool(self.rule_weight)
