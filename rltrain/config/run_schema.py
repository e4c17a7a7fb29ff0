"""Keys of the run itself: reward functions, trainer, Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class CustomRewardConfig:
    """Your own reward function."""

    path: str | None = None
    """Python file with the function; null: the built-in scorer of each data_source."""
    name: str = "compute_score"
    """Function (data_source, solution_str, ground_truth, extra_info) -> number, or dict with 'score'."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Free-form: further keyword arguments of the function."""


@dataclass
class RewardConfig:
    """Where and how long scorers run."""

    num_workers: int | None = None
    """Processes that score answers; null: one for each core that the devices' workers leave, at most 16 a node and 64 in all."""
    timeout_s: float = 10.0
    """Seconds one answer may take; then its scorer is killed and the answer counts as failed."""
    on_error: float = 0.0
    """Score of an answer that could not be scored (counted in reward/error_rate)."""
    weights: dict[str, Any] = field(default_factory=dict)
    """Free-form: the rule reward as a weighted sum of numbers the scorer returns (weights.acc=0.9 weights.format=0.1); {}: its score."""
    overlap: bool = True
    """Score the answers to a prompt as soon as the last of them has ended, while others are still being generated."""
    memory_limit_mb: int = 4096
    """Address space of a scorer's process in MiB; an answer that exceeds it counts as failed. 0: no limit."""
    allow_code_execution: bool = False
    """Let scorers run programs that the model wrote. Read rewards.md of the documentation first: it is no wall against an attacker."""
    url: str | None = None
    """Address of a remote scorer (http://host:port/path); answers are sent there instead of being scored here."""
    url_concurrency: int = 8
    """Answers each of num_workers (null: one a node) has under way at reward.url."""
    url_headers: dict[str, Any] = field(default_factory=dict)
    """Free-form: headers for reward.url, such as url_headers.Authorization='Bearer ${oc.env:TOKEN}'; masked in config.yaml."""


@dataclass
class TrainerConfig:
    """The run: devices, steps, validation, saving, logging."""

    device: str = "auto"
    """auto, npu, cuda or cpu."""
    nnodes: int = 1
    """Nodes."""
    n_gpus_per_node: int = "${devices_here:${trainer.device}}"  # type: ignore[assignment]
    """Devices (and so workers) per node; on a CPU the number of worker processes. Default: as many as this machine has, on a CPU 1."""
    total_epochs: int = 30
    """Passes over the training prompts."""
    total_training_steps: int | None = None
    """Steps; where set it wins over total_epochs."""
    critic_warmup: int = 0
    """The actor learns from this step on; before it only the critic does (gae)."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Stop after that validation."""
    test_freq: int = -1
    """Validate every so many steps and after the last; -1: never."""
    save_freq: int = -1
    """Save every so many steps; -1: only at the end."""
    save_at_end: bool = True
    """Save when the run ends or is stopped by a signal."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Run folder: checkpoints, metrics, logs. On several nodes it must be storage that all of them see."""
    max_actor_ckpt_to_keep: int | None = 3
    """Newest checkpoints to keep; null or -1: all."""
    max_critic_ckpt_to_keep: int | None = None
    """No effect: a checkpoint holds all roles; see max_actor_ckpt_to_keep."""
    resume_mode: str = "auto"
    """auto (newest checkpoint in the run folder), disable, or resume_path."""
    resume_from_path: str | None = None
    """Checkpoint folder (global_step_N) for resume_mode=resume_path."""
    resume_weights_only: bool = False
    """Take only the weights from the checkpoint and start at step 0."""
    project_name: str = "rltrain"
    """Name for trackers and the default run folder."""
    experiment_name: str = "run"
    """Name for trackers and the default run folder."""
    logger: list[str] = field(default_factory=lambda: ["console", "tensorboard"])
    """console, tensorboard, wandb, mlflow, swanlab, clearml, trackio, vemlp_wandb, file (metrics.jsonl, which is always written)."""
    callbacks: list[str] = field(default_factory=list)
    """Classes or functions of your own that are told of steps, validations and checkpoints: [FILE.py:NAME]. See docs/plugins.md."""
    on_nonfinite: str = "stop"
    """When a loss or gradient is not finite: stop, or skip the optimizer step (three in a row stop)."""
    hang_floor_s: float | None = 1800.0
    """A call to the workers that takes longer than hang_factor times the longest of its kind, and than this, ends the run; null: never."""
    hang_factor: float = 5.0
    """See hang_floor_s, which also stands for the longest of a kind that is called for the first time; 0: hang_floor_s alone counts."""
    balance_batch: bool = True
    """No effect: samples are always spread over devices by length."""
    samples_freq: int = 1
    """Keep the answers of every so many steps, and of every validation, in RUN/samples (python -m rltrain.view RUN); -1: never."""
    samples_max_prompts: int = 100
    """Prompts of a step, and of a validation, whose answers are kept there, all answers of each."""
    log_val_generations: int = 0
    """Answers of each validation that trackers show as a table."""
    rollout_data_dir: str | None = None
    """Folder for all answers of every step as JSON lines, as verl writes them (N.jsonl)."""
    validation_data_dir: str | None = None
    """The same for validations."""
    default_hdfs_dir: str | None = None
    """No effect: mount remote storage and set default_local_dir."""
    del_local_ckpt_after_load: bool = False
    """No effect: see max_actor_ckpt_to_keep."""


@dataclass
class RayConfig:
    """Ray."""

    ray_init: dict[str, Any] = field(default_factory=lambda: {"address": None, "num_cpus": None})
    """Free-form arguments of ray.init: address (cluster to join; "auto" finds the one on this node; null: RAY_ADDRESS, else a local Ray),
    num_cpus (slots of a local Ray; null: the larger of cores and workers), _temp_dir, runtime_env.env_vars and others."""
