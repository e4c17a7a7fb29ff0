"""What values keys may have, key by key. Rules between keys are in `check`."""

from __future__ import annotations

import math

from rltrain.config.declarations import ESTIMATORS, POLICY_LOSSES
from rltrain.config.engines import ENGINES

_A = "actor_rollout_ref."
DEVICES = ("auto", "npu", "cuda", "cpu")
# tracker -> the package it needs. metrics.jsonl is the file.
LOGGERS = {
    "console": None, "file": None, "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "swanlab": "swanlab",
    "clearml": "clearml", "trackio": "trackio", "vemlp_wandb": "volcengine_ml_platform",
}  # fmt: skip
_DTYPES = ("auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16")
CONTENTS = ("model", "optimizer", "extra", "hf_model")
KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+", "full")
AGGREGATION = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# Keys that may also be FILE.py:NAME.
# Rounds of dynamic sampling in a step, unless filter_groups.max_num_gen_batches says.
DEFAULT_ROUNDS = 10
PLUGINS = ("algorithm.adv_estimator", _A + "actor.policy_loss.loss_mode", "data.sampler.name")
# key -> its allowed values
CHOICES = {
    "data.sampler.name": ("shuffle", "solve_rate"),
    "data.truncation": ("error", "left", "right", "middle"),
    _A + "actor.strategy": ("fsdp2", "fsdp"),
    _A + "actor.fsdp_config.model_dtype": _DTYPES,
    _A + "actor.fsdp_config.compute_dtype": _DTYPES,
    _A + "rollout.dtype": _DTYPES,
    _A + "rollout.name": tuple(ENGINES),
    _A + "rollout.tail": ("off", "exact", "oversample", "carry_over"),
    _A + "actor.optim.lr_scheduler_type": ("constant", "cosine"),
    _A + "actor.policy_loss.loss_mode": tuple(POLICY_LOSSES),
    _A + "actor.kl_loss_type": KL_KINDS,
    _A + "actor.loss_agg_mode": AGGREGATION,
    _A + "actor.recompute_old_log_prob": ("auto", "always"),
    "critic.loss_agg_mode": AGGREGATION,
    "critic.strategy": ("fsdp2", "fsdp"),
    "critic.optim.lr_scheduler_type": ("constant", "cosine"),
    "critic.model.fsdp_config.model_dtype": _DTYPES,
    "critic.model.fsdp_config.compute_dtype": _DTYPES,
    "reward_model.reward_manager": ("naive", "dapo", "batch"),
    "reward_model.model.fsdp_config.compute_dtype": _DTYPES,
    "algorithm.adv_estimator": tuple(ESTIMATORS),
    "algorithm.kl_penalty": KL_KINDS,
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.rollout_correction.rollout_is": (None, "token", "sequence"),
    "algorithm.rollout_correction.loss_type": ("ppo_clip", "reinforce"),
    _A + "rollout.on_log_prob_gap": ("warn", "stop"),
    "trainer.device": DEVICES,
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "trainer.on_nonfinite": ("stop", "skip"),
}
# key -> smallest value
AT_LEAST = {
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    _A + "actor.ppo_mini_batch_size": 1,
    _A + "actor.ppo_epochs": 1,
    _A + "actor.ppo_micro_batch_size": 1,
    _A + "actor.ppo_micro_batch_size_per_gpu": 1,
    _A + "actor.ppo_max_token_len_per_gpu": 1,
    _A + "actor.ulysses_sequence_parallel_size": 1,
    _A + "actor.optim.lr": 0,
    _A + "actor.optim.weight_decay": 0,
    _A + "actor.optim.num_cycles": 0,
    _A + "actor.kl_loss_coef": 0,
    _A + "actor.clip_ratio": 0,
    _A + "actor.clip_ratio_low": 0,
    _A + "actor.clip_ratio_high": 0,
    _A + "actor.clip_ratio_c": 1,
    _A + "actor.loss_scale_factor": 1,
    _A + "actor.policy_loss.clip_cov_ratio": 0,
    _A + "actor.policy_loss.kl_cov_ratio": 0,
    _A + "actor.policy_loss.ppo_kl_coef": 0,
    "algorithm.kl_ctrl.kl_coef": 0,
    "algorithm.kl_ctrl.horizon": 1,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    "critic.ppo_mini_batch_size": 1,
    "critic.ppo_epochs": 1,
    "critic.ppo_micro_batch_size_per_gpu": 1,
    "critic.forward_micro_batch_size_per_gpu": 1,
    "critic.cliprange_value": 0,
    "critic.ulysses_sequence_parallel_size": 1,
    "critic.optim.lr": 0,
    "critic.optim.weight_decay": 0,
    "data.gen_batch_size": 1,
    "reward_model.micro_batch_size_per_gpu": 1,
    "reward_model.forward_max_token_len_per_gpu": 1,
    "reward_model.weight": 0,
    "reward_model.rule_weight": 0,
    _A + "actor.entropy_coeff": -math.inf,
    "reward_model.overlong_buffer.penalty_factor": 0,
    _A + "ref.log_prob_micro_batch_size": 1,
    _A + "ref.log_prob_micro_batch_size_per_gpu": 1,
    _A + "ref.ulysses_sequence_parallel_size": 1,
    _A + "rollout.log_prob_micro_batch_size": 1,
    _A + "rollout.log_prob_micro_batch_size_per_gpu": 1,
    _A + "rollout.n": 1,
    _A + "rollout.log_prob_gap_limit": 0,
    _A + "rollout.tail_max_age": 1,
    _A + "rollout.tail_draft_tokens": 1,
    _A + "rollout.max_num_seqs": 1,
    _A + "rollout.max_num_batched_tokens": 1,
    _A + "rollout.update_weights_bucket_megabytes": 1,
    _A + "rollout.tensor_model_parallel_size": 1,
    _A + "rollout.val_kwargs.n": 1,
    _A + "rollout.val_kwargs.temperature": 0,
    "trainer.hang_factor": 0,
    "trainer.hang_floor_s": 1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.total_epochs": 1,
    "trainer.total_training_steps": 1,
    "trainer.samples_max_prompts": 1,
    "trainer.log_val_generations": 0,
    _A + "model.lora_rank": 0,
    "critic.model.lora_rank": 0,
    "reward.num_workers": 1,
    "reward.timeout_s": 0.01,
}
