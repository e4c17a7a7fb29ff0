"""Other trainers: what our keys are called there, for the error of a mistyped key; and whose a configuration is, so
that one sentence says it, not one for each key."""

from __future__ import annotations

from collections.abc import Collection

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."

# Our key -> the last part of its names in transformers, TRL, OpenRLHF and ms-swift. A name that means something else
# here, or that nothing here does, is left out: a wrong hint is worse than none.
_NAMES = {
    _ACTOR + "optim.lr": "learning_rate actor_learning_rate",
    "critic.optim.lr": "critic_learning_rate",
    _ACTOR + "optim.lr_warmup_steps_ratio": "warmup_ratio lr_warmup_ratio",
    _ACTOR + "optim.lr_warmup_steps": "warmup_steps",
    _ACTOR + "optim.lr_scheduler_type": "lr_scheduler_type lr_scheduler",
    _ACTOR + "optim.eps": "adam_eps adam_epsilon",
    _ACTOR + "optim.betas": "adam_betas adam_beta1 adam_beta2",
    _ACTOR + "optim.clip_grad": "max_grad_norm grad_clip gradient_clip clip_grad_norm",
    _ROLLOUT + "n": "num_generations n_samples_per_prompt group_size num_return_sequences",
    "data.max_response_length": "max_completion_length max_new_tokens generate_max_len max_tokens response_length",
    "data.max_prompt_length": "prompt_max_len prompt_length",
    _ROLLOUT + "max_model_len": "max_seq_len max_seq_length max_length max_model_length",
    "data.train_batch_size": "batch_size rollout_batch_size global_batch_size",
    _ACTOR + "ppo_mini_batch_size": "mini_batch_size train_mini_batch_size",
    _ACTOR + "ppo_micro_batch_size_per_gpu": "per_device_train_batch_size micro_train_batch_size micro_batch_size",
    _ACTOR + "ppo_epochs": "num_iterations ppo_epoch num_ppo_epochs max_epochs",
    _ACTOR + "kl_loss_coef": "beta kl_beta init_kl_coef kl_loss_coeff",
    "actor_rollout_ref.ref.update_every_steps": "ref_model_sync_steps sync_ref_model",
    "actor_rollout_ref.ref.update_mix": "ref_model_mixup_alpha",
    _ACTOR + "clip_ratio": "epsilon cliprange clip_eps eps_clip clip_range",
    _ACTOR + "clip_ratio_high": "epsilon_high eps_clip_high",
    _ACTOR + "entropy_coeff": "entropy_coef entropy_loss_coef ent_coef",
    _ACTOR + "top_entropy_quantile": "token_entropy_percentile_threshold",
    _ACTOR + "adaptive_entropy.target_entropy": "entropy_target use_adaptive_entropy",
    _ACTOR + "adaptive_entropy.delta_ent_coef": "entropy_coef_delta",
    _ACTOR + "adaptive_entropy.max_ent_coef": "entropy_coef_max",
    _ACTOR + "policy_loss.loss_mode": "loss_type policy_loss_type",
    "algorithm.adv_estimator": "advantage advantage_estimator estimator algo",
    "algorithm.mask_truncated": "mask_truncated_completions apply_overlong_filtering overlong_filter",
    "trainer.total_training_steps": "max_steps total_steps num_steps train_steps training_steps",
    "trainer.total_epochs": "epochs num_epochs num_train_epochs num_episodes",
    "trainer.save_freq": "save_steps save_interval save_every save_every_n_steps",
    "trainer.test_freq": "eval_steps eval_interval eval_freq val_freq test_interval",
    "trainer.max_actor_ckpt_to_keep": "save_total_limit",
    "trainer.default_local_dir": "output_dir save_path ckpt_path checkpoint_dir save_dir",
    "trainer.experiment_name": "run_name exp_name wandb_run_name",
    "trainer.project_name": "wandb_project project",
    "trainer.logger": "report_to loggers",
    "trainer.resume_mode": "resume_from_checkpoint load_checkpoint",
    "trainer.n_gpus_per_node": "n_gpus num_gpus gpus n_npus n_devices n_npus_per_node",
    "trainer.nnodes": "num_nodes n_nodes",
    "data.seed": "seed random_seed",
    "actor_rollout_ref.model.path": "model_name_or_path pretrain model_name model_path",
    "data.train_files": "dataset dataset_name prompt_data train_dataset train_file",
    "data.val_files": "eval_dataset val_dataset val_file test_files",
    "custom_reward_function.path": "reward_funcs reward_function remote_rm_url reward_fn",
    "actor_rollout_ref.model.lora_rank": "lora_r peft_lora_r",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "gradient_checkpointing",
    _ROLLOUT + "tensor_model_parallel_size": "tp_size vllm_tensor_parallel_size tensor_parallel_size",
    _ROLLOUT + "gpu_memory_utilization": "vllm_gpu_memory_utilization gpu_memory_utilisation",
}
_BY_LEAF = {name: key for key, names in _NAMES.items() for name in names.split()}
_OTHERS_PAGE = "docs/from-others.md"
# Trainer -> the page that lists its keys, and top-level names of its files. A file with two of the names (one if the
# row has one) belongs to that trainer. The first match counts.
_SIGNS = {
    "EasyR1": ("docs/from-easyr1.md", "worker"),
    "MindSpeed RL": ("docs/from-mindspeed-rl.md", "megatron_training rl_config generate_config actor_config"),
    "AReaL": (_OTHERS_PAGE, "gconfig train_dataset valid_dataset allocation_mode cluster saver"),
    "LLaMA-Factory": (_OTHERS_PAGE, "stage finetuning_type template cutoff_len dataset_dir pref_loss"),
    "ms-swift": (_OTHERS_PAGE, "rlhf_type tuner_type train_type external_plugins infer_backend"),
    "OpenRLHF": (
        "docs/from-openrlhf.md",
        "pretrain n_samples_per_prompt micro_train_batch_size init_kl_coef actor_num_nodes prompt_data",
    ),
    "TRL": (
        "docs/from-trl.md",
        "num_generations max_completion_length per_device_train_batch_size reward_funcs vllm_mode "
        "model_name_or_path dataset_name gradient_accumulation_steps use_vllm",
    ),
}


def own_name(key: str) -> str | None:
    """The key here of what ``key`` is called in another trainer, or None.

    Beside a section its key must be of that section, since `critic.epochs` is another thing than ``trainer.epochs``;
    others have all their settings in a trainer's.
    """
    section, _, leaf = key.rpartition(".")
    own_key = _BY_LEAF.get(leaf)
    fits = not section or section == "trainer" or (own_key or "").split(".")[0] == section.split(".")[0]
    return own_key if fits else None


def names_elsewhere(key: str) -> list[str]:
    """What other trainers call a key of ours."""
    return _NAMES.get(key, "").split()


def trainer_of(names: Collection[str]) -> tuple[str, str] | None:
    """Return the trainer whose files have these top-level names, and the page about its keys; None for verl's files,
    ours and unknown ones."""
    plain = {name.replace("-", "_") for name in names}
    for trainer, (page, signs) in _SIGNS.items():
        if len(plain.intersection(signs.split())) >= min(2, len(signs.split())):
            return trainer, page
    return None
