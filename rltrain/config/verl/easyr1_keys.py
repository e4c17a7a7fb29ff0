"""What becomes of EasyR1's keys, as its public configuration classes have them."""

from __future__ import annotations

from typing import Any

_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_M, _F, _W, _C = "actor_rollout_ref.model.", _A + "fsdp_config.", "worker.actor.", "worker.critic."
# Its key -> ours; one that ends with a star stands for all that begin so, and the first row that fits counts. What has
# the same name, and means the same, is not listed.
KEYS: dict[str, str] = {
    "data.rollout_batch_size": "data.train_batch_size", "data.override_chat_template": _M + "custom_chat_template",
    _W + "global_batch_size": _A + "ppo_mini_batch_size", _W + "max_grad_norm": _A + "optim.clip_grad",
    _W + "clip_ratio_dual": _A + "clip_ratio_c", _W + "ulysses_size": _A + "ulysses_sequence_parallel_size",
    _W + "ulysses_sequence_parallel_size": _A + "ulysses_sequence_parallel_size",
    _W + "loss_avg_mode": _A + "loss_agg_mode", _W + "loss_type": _A + "policy_loss.loss_mode",
    _W + "model.model_path": _M + "path", _W + "model.freeze_vision_tower": _A + "freeze_vision_tower",
    _W + "model.lora.rank": _M + "lora_rank", _W + "model.lora.alpha": _M + "lora_alpha",
    _W + "model.lora.*": _M + "*", _W + "model.tokenizer_path": _M + "tokenizer_path",
    _W + "model.override_config.*": _M + "override_config.*", _W + "model.*": _M + "*",
    _W + "optim.lr_warmup_ratio": _A + "optim.lr_warmup_steps_ratio", _W + "optim.*": _A + "optim.*",
    _W + "fsdp.torch_dtype": _F + "model_dtype", _W + "fsdp.mp_param_dtype": _F + "compute_dtype",
    _W + "fsdp.enable_full_shard": _F + "reshard_after_forward", _W + "fsdp.fsdp_size": _F + "fsdp_size",
    _W + "offload.offload_optimizer": _F + "optimizer_offload",
    "worker.rollout.tensor_parallel_size": _R + "tensor_model_parallel_size",
    "worker.reward.num_cpus": "reward.num_workers", "worker.reward.reward_function_kwargs.*":
    "custom_reward_function.reward_kwargs.*", _C + "global_batch_size": "critic.ppo_mini_batch_size",
    _C + "max_grad_norm": "critic.optim.clip_grad", _C + "ulysses_size": "critic.ulysses_sequence_parallel_size",
    _C + "model.model_path": "critic.model.path", _C + "optim.lr_warmup_ratio": "critic.optim.lr_warmup_steps_ratio",
    _C + "loss_avg_mode": "critic.loss_agg_mode",
    _C + "offload.offload_optimizer": "critic.model.fsdp_config.optimizer_offload",
    _C + "fsdp.torch_dtype": "critic.model.fsdp_config.model_dtype", "trainer.total_episodes": "trainer.total_epochs",
    "trainer.max_steps": "trainer.total_training_steps", "trainer.val_freq": "trainer.test_freq",
    "trainer.val_generations_to_log": "trainer.log_val_generations", "trainer.save_limit":
    "trainer.max_actor_ckpt_to_keep", "trainer.save_checkpoint_path": "trainer.default_local_dir",
    "trainer.find_last_checkpoint": "trainer.resume_mode",
    "worker.actor.*": _A + "*", "worker.rollout.*": _R + "*", _C + "model.*": "critic.model.*",
    _C + "optim.*": "critic.optim.*", _C + "*": "critic.*",
}  # fmt: skip
_LOSSES = {"token": "token-mean", "seq": "seq-mean-token-mean"}
# Pattern -> what a value of its is here.
VALUES: dict[str, dict[Any, Any]] = {
    "*.loss_avg_mode": _LOSSES, "*.loss_type": {"default": "vanilla"},
    "*.limit_images": {0: None},  # no limit of its own
    "*.find_last_checkpoint": {True: "auto", False: "disable"}, "*dtype": {"bf16": "bfloat16", "fp32": "float32"},
}  # fmt: skip
_COMPUTES = "it changes how EasyR1 computes, not what"
# Rows as those of `keys`: what needs nothing here, and what is refused where the condition holds.
NO_EFFECT: dict[str, str] = dict.fromkeys(
    ("*.padding_free", "*.use_torch_compile", "*.enable_rank0_init", "*.use_orig_params",
     "*.filter_overlong_prompts_workers", "*.val_batch_size", "*.disable_tqdm", "*.ray_timeline",
     "worker.rollout.enable_chunked_prefill", "worker.hybrid_engine", "*.training_steps",
     "worker.ref.fsdp.enable_full_shard", "worker.ref.fsdp.fsdp_size", "worker.ref.fsdp.torch_dtype",
     "worker.reward.reward_type", "data.video_fps"), _COMPUTES
)  # fmt: skip
REFUSED: dict[str, str] = {
    **dict.fromkeys(("*.mp_reduce_dtype!=fp32", "*.mp_buffer_dtype!=fp32"), "sums are taken in float32 here"),
    "data.video_key!=videos": "there is no training on videos here",
    "worker.*.strategy!=fsdp|fsdp2": "the training backend is FSDP2",
    "worker.reward.skip_special_tokens=False": "a scorer sees no special tokens here",
    "trainer.load_checkpoint_path": "of a checkpoint of EasyR1's the weights can be read, not the optimizer: "
    "python -m rltrain.checkpoint export global_step_N/actor FOLDER, and give FOLDER as worker.actor.model.model_path",
    "trainer.save_model_only": "write actor_rollout_ref.actor.checkpoint.save_contents=[model]",
}
# EasyR1's defaults; those that are ours, too, are left out when it is read.
DEFAULTS: dict[str, Any] = {
    "data.rollout_batch_size": 512, "data.filter_overlong_prompts": True, "algorithm.adv_estimator": "grpo",
    "data.max_prompt_length": 512, "data.max_response_length": 512, "data.seed": 1, "data.shuffle": True,
    _W + "global_batch_size": 256, _W + "clip_ratio_low": 0.2, _W + "clip_ratio_high": 0.3, _W + "clip_ratio_dual": 3.0,
    _W + "loss_avg_mode": "token", _W + "max_grad_norm": 1.0, _W + "optim.lr": 1e-6, _W + "optim.weight_decay": 1e-2,
    "worker.rollout.name": "vllm", "worker.rollout.n": 1, "worker.rollout.tensor_parallel_size": 2,
    "worker.rollout.gpu_memory_utilization": 0.6, "worker.rollout.max_num_batched_tokens": 8192,
    "worker.rollout.seed": 1, "trainer.total_epochs": 15, "trainer.project_name": "easy_r1",
    "trainer.experiment_name": "demo", "trainer.logger": ["console", "wandb"], "trainer.n_gpus_per_node": 8,
    "trainer.val_freq": -1, "trainer.save_freq": -1, "trainer.save_limit": -1, "algorithm.kl_penalty": "kl",
    "algorithm.kl_coef": 1e-3, "algorithm.filter_low": 0.01, "algorithm.filter_high": 0.99, "algorithm.filter_key":
    "overall", "trainer.max_try_make_batch": 20, "worker.rollout.temperature": 1.0, "worker.rollout.top_p": 1.0,
    **{f"worker.{role}.micro_batch_size_per_device_for_{what}": size for role in ("actor", "critic")
       for what, size in (("update", 4), ("experience", 16))},
}  # fmt: skip
# Keys that make sense together alone, which functions of `easyr1` read.
TOGETHER = (
    *("data.train_files", "data.val_files", "data.prompt_key", "data.answer_key", "data.image_key", "data.image_dir"),
    *("data.format_prompt", "worker.reward.reward_function", "worker.reward.score_function"),
    *("worker.reward.compute_score", "algorithm.disable_kl", "algorithm.use_kl_loss", "algorithm.kl_*"),
    *("*.micro_batch_size_per_device_for_*", "*.dynamic_batching", "worker.rollout.val_override_config*"),
    *("algorithm.online_filtering", "algorithm.filter_key", "algorithm.filter_low", "algorithm.filter_high"),
    *("trainer.max_try_make_batch", "data.mini_rollout_batch_size", "*.optim.strategy"),
    *("*.fsdp.enable_cpu_offload", "*.offload.offload_params"),
)
