"""Whose a configuration is that is none of verl's, so that one sentence says it, not one for each key."""

from __future__ import annotations

from collections.abc import Collection

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


def whose(names: Collection[str]) -> str | None:
    """The trainer whose files have these names at their top; None for verl's, ours, and those that nobody knows."""
    found = {name.replace("-", "_") for name in names}
    return next((trainer for trainer, (signs, least) in _SIGNS.items() if len(signs & found) >= least), None)
