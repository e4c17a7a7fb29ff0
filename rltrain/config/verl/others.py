"""Other trainers: what our keys are called there, for the error of a mistyped key; and whose a configuration is, so
that one sentence says it, not one for each key."""

from __future__ import annotations

from collections.abc import Collection

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."

# By the last part of a name in transformers, TRL, OpenRLHF or ms-swift. A name that means something else here, or that
# nothing here does, is left out: a wrong hint is worse than none.
_BY_LEAF = {
    **dict.fromkeys(("learning_rate", "actor_learning_rate"), f"{_ACTOR}optim.lr"),
    "critic_learning_rate": "critic.optim.lr",
    **dict.fromkeys(("warmup_ratio", "lr_warmup_ratio"), f"{_ACTOR}optim.lr_warmup_steps_ratio"),
    "warmup_steps": f"{_ACTOR}optim.lr_warmup_steps",
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), f"{_ACTOR}optim.lr_scheduler_type"),
    **dict.fromkeys(("adam_eps", "adam_epsilon"), f"{_ACTOR}optim.eps"),
    **dict.fromkeys(("adam_betas", "adam_beta1", "adam_beta2"), f"{_ACTOR}optim.betas"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clip", "clip_grad_norm"), f"{_ACTOR}optim.clip_grad"),
    **dict.fromkeys(("num_generations", "n_samples_per_prompt", "group_size", "num_return_sequences"), f"{_ROLLOUT}n"),
    **dict.fromkeys(
        ("max_completion_length", "max_new_tokens", "generate_max_len", "max_tokens", "response_length"),
        "data.max_response_length",
    ),
    **dict.fromkeys(("prompt_max_len", "prompt_length"), "data.max_prompt_length"),
    **dict.fromkeys(("max_seq_len", "max_seq_length", "max_length", "max_model_length"), f"{_ROLLOUT}max_model_len"),
    **dict.fromkeys(("batch_size", "rollout_batch_size", "global_batch_size"), "data.train_batch_size"),
    **dict.fromkeys(("mini_batch_size", "train_mini_batch_size"), f"{_ACTOR}ppo_mini_batch_size"),
    **dict.fromkeys(
        ("per_device_train_batch_size", "micro_train_batch_size", "micro_batch_size"),
        f"{_ACTOR}ppo_micro_batch_size_per_gpu",
    ),
    **dict.fromkeys(("num_iterations", "ppo_epoch", "num_ppo_epochs"), f"{_ACTOR}ppo_epochs"),
    **dict.fromkeys(("beta", "kl_beta", "init_kl_coef", "kl_loss_coeff"), f"{_ACTOR}kl_loss_coef"),
    **dict.fromkeys(("epsilon", "cliprange", "clip_eps", "eps_clip", "clip_range"), f"{_ACTOR}clip_ratio"),
    **dict.fromkeys(("epsilon_high", "eps_clip_high"), f"{_ACTOR}clip_ratio_high"),
    **dict.fromkeys(("entropy_coef", "entropy_loss_coef", "ent_coef"), f"{_ACTOR}entropy_coeff"),
    **dict.fromkeys(("loss_type", "policy_loss_type"), f"{_ACTOR}policy_loss.loss_mode"),
    **dict.fromkeys(("advantage", "advantage_estimator", "estimator", "algo"), "algorithm.adv_estimator"),
    **dict.fromkeys(
        ("max_steps", "total_steps", "num_steps", "train_steps", "training_steps"), "trainer.total_training_steps"
    ),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "max_epochs", "num_episodes"), "trainer.total_epochs"),
    **dict.fromkeys(("save_steps", "save_interval", "save_every", "save_every_n_steps"), "trainer.save_freq"),
    **dict.fromkeys(("eval_steps", "eval_interval", "eval_freq", "val_freq", "test_interval"), "trainer.test_freq"),
    "save_total_limit": "trainer.max_actor_ckpt_to_keep",
    **dict.fromkeys(
        ("output_dir", "save_path", "ckpt_path", "checkpoint_dir", "save_dir"), "trainer.default_local_dir"
    ),
    **dict.fromkeys(("run_name", "exp_name", "wandb_run_name"), "trainer.experiment_name"),
    **dict.fromkeys(("wandb_project", "project"), "trainer.project_name"),
    **dict.fromkeys(("report_to", "loggers"), "trainer.logger"),
    **dict.fromkeys(("resume_from_checkpoint", "load_checkpoint"), "trainer.resume_mode"),
    **dict.fromkeys(
        ("n_gpus", "num_gpus", "gpus", "n_npus", "n_devices", "n_npus_per_node"), "trainer.n_gpus_per_node"
    ),
    **dict.fromkeys(("num_nodes", "n_nodes"), "trainer.nnodes"),
    **dict.fromkeys(("seed", "random_seed"), "data.seed"),
    **dict.fromkeys(("model_name_or_path", "pretrain", "model_name", "model_path"), "actor_rollout_ref.model.path"),
    **dict.fromkeys(("dataset", "dataset_name", "prompt_data", "train_dataset", "train_file"), "data.train_files"),
    **dict.fromkeys(("eval_dataset", "val_dataset", "val_file", "test_files"), "data.val_files"),
    **dict.fromkeys(("reward_funcs", "reward_function", "remote_rm_url", "reward_fn"), "custom_reward_function.path"),
    **dict.fromkeys(("lora_r", "peft_lora_r"), "actor_rollout_ref.model.lora_rank"),
    "gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    **dict.fromkeys(
        ("tp_size", "vllm_tensor_parallel_size", "tensor_parallel_size"), f"{_ROLLOUT}tensor_model_parallel_size"
    ),
    **dict.fromkeys(("vllm_gpu_memory_utilization", "gpu_memory_utilisation"), f"{_ROLLOUT}gpu_memory_utilization"),
}

# Trainer -> (names at the top of its files, how many of them there are at least). The first that fits counts.
_SIGNS: dict[str, tuple[set[str], int]] = {
    "MindSpeed RL": ({"megatron_training", "rl_config", "generate_config", "actor_config"}, 2),
    "AReaL": ({"gconfig", "train_dataset", "valid_dataset", "allocation_mode", "cluster", "saver"}, 2),
    "LLaMA-Factory": ({"stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "pref_loss"}, 2),
    "ms-swift": ({"rlhf_type", "tuner_type", "train_type", "external_plugins", "infer_backend"}, 2),
    "OpenRLHF": (
        {
            "pretrain",
            "n_samples_per_prompt",
            "micro_train_batch_size",
            "init_kl_coef",
            "actor_num_nodes",
            "prompt_data",
        },
        2,
    ),
    "TRL": (
        {
            *("num_generations", "max_completion_length", "per_device_train_batch_size", "reward_funcs", "vllm_mode"),
            *("model_name_or_path", "dataset_name", "gradient_accumulation_steps", "use_vllm"),
        },
        2,
    ),
}


def own_name(key: str) -> str | None:
    """The key here of what ``key`` is called in another trainer, or None.

    Beside a section its key must be of that section, since `critic.epochs` is another thing than `trainer.epochs`;
    others have all their settings in a trainer's.
    """
    section, _, leaf = key.rpartition(".")
    found = _BY_LEAF.get(leaf)
    fits = not section or section == "trainer" or (found or "").split(".")[0] == section.split(".")[0]
    return found if fits else None


def trainer_of(names: Collection[str]) -> str | None:
    """The trainer whose files have these names at their top; None for verl's, ours, and those that nobody knows."""
    plain = {name.replace("-", "_") for name in names}
    return next((trainer for trainer, (signs, least) in _SIGNS.items() if len(signs & plain) >= least), None)
