"""Keys that every trained model has: optimizer, sharding, checkpoint contents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class OptimConfig:
    """AdamW and its learning rate."""

    lr: float = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: int = -1
    """Steps of linear warm-up; negative: lr_warmup_steps_ratio of all steps."""
    lr_warmup_steps_ratio: float = 0.0
    """Share of all steps that warm up, when lr_warmup_steps is negative."""
    lr_scheduler_type: str = "constant"
    """After warm-up: constant or cosine."""
    min_lr_ratio: float = 0.0
    """Cosine ends at this share of lr."""
    num_cycles: float = 0.5
    """Cosine waves over the run; 0.5 goes down once."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's decay rates of first and second moment."""
    eps: float = 1e-8
    """AdamW divides the first moment by the root of the second plus this; larger: gradients next to nothing move less."""
    clip_grad: float = 1.0
    """Largest global gradient norm (actor.grad_clip is the old name)."""
    total_training_steps: int = -1
    """No effect: the plan knows the number of steps."""


@dataclass
class FSDPConfig:
    """How a model is sharded and where it rests."""

    param_offload: bool = False
    """Keep the parameters in host memory while they are not needed."""
    optimizer_offload: bool = False
    """Keep the optimizer state in host memory outside the update."""
    model_dtype: str = "float32"
    """dtype of the master weights."""
    compute_dtype: str = "auto"
    """dtype of forward and backward: auto is bfloat16 on NPU and GPU, float32 on CPU. Gradients are reduced in float32."""
    fsdp_size: int = -1
    """Ranks that share one copy of the weights; -1: all. Smaller: replicas of shard groups (HSDP)."""
    reshard_after_forward: bool = True
    """Free gathered weights after the forward of each layer."""
    forward_prefetch: bool = False
    """No effect: FSDP2 prefetches by itself."""
    offload_policy: bool = False
    """No effect: use param_offload and optimizer_offload."""
    wrap_policy: dict[str, Any] = field(default_factory=dict)
    """No effect: the model's own decoder layers are wrapped."""
    mixed_precision: dict[str, Any] = field(default_factory=dict)
    """No effect: see compute_dtype."""


@dataclass
class CheckpointConfig:
    """What a checkpoint holds."""

    save_contents: list[str] = field(default_factory=lambda: ["model", "optimizer", "extra", "hf_model"])
    """model, optimizer and extra are always saved together; hf_model adds a Hugging Face folder."""
    load_contents: list[str] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    """No effect: see trainer.resume_weights_only."""
