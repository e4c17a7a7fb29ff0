"""Keys that users bring along: other spellings of ours, keys without a meaning here, keys of other backends.

They stand in tables and not in the schema, so that help, defaults and a printed configuration show only what has an
effect.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

_A = "actor_rollout_ref."

# Spelling of another verl version -> ours. A prefix ends in a dot.
RENAMED = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_manager": "reward_model.reward_manager",
    "reward.reward_kwargs.overlong_buffer_cfg.": "reward_model.overlong_buffer.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.": "reward_model.overlong_buffer.",
    "reward.reward_model.enable": "reward_model.enable",
    "reward.reward_model.model.": "reward_model.model.",
    "critic.fsdp.": "critic.model.fsdp_config.",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.grad_clip": "critic.optim.clip_grad",
    "ray_init.": "ray_kwargs.ray_init.",
    _A + "actor.optim.warmup_style": _A + "actor.optim.lr_scheduler_type",
    _A + "actor.grad_clip": _A + "actor.optim.clip_grad",
    _A + "actor.optim.override_optimizer_config.eps": _A + "actor.optim.eps",
    _A + "actor.fsdp_config.ulysses_sequence_parallel_size": _A + "actor.ulysses_sequence_parallel_size",
    _A + "actor.fsdp_config.dtype": _A + "actor.fsdp_config.compute_dtype",
    _A + "rollout.checkpoint_engine.update_weights_bucket_megabytes": _A + "rollout.update_weights_bucket_megabytes",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
}

# Keys of verl's that change nothing here -> why. "*" stands for any text. A value after "=" is what happens anyway, so
# it needs no note; in rows without one, null and False need none.
IGNORED = {
    "critic.checkpoint.*": "a checkpoint always holds the whole critic",
    "critic.enable=null": "there is a critic with algorithm.adv_estimator=gae",
    "critic.model.tokenizer_path": "the critic reads the actor's tokens",
    "critic.rollout_n": "it follows actor_rollout_ref.rollout.n",
    "critic.strategy=fsdp2": "every model is sharded with FSDP2",
    "reward.reward_model.*": "the reward model runs in the workers, see --help reward_model",
    "reward_model.launch_reward_fn_async": "scoring always runs in its own processes",
    "reward_model.max_length": "the reward model reads whole conversations",
    "reward_model.model.fsdp_config.model_dtype": "the reward model is not trained",
    "reward_model.model.fsdp_config.optimizer_offload": "the reward model is not trained",
    "reward_model.model.input_tokenizer": "the reward model reads answers by its own tokenizer and chat template",
    "reward_model.overlong_buffer.log": "the penalty is always logged as reward/overlong/mean",
    "reward*.reward_kwargs*": "a function of your own takes custom_reward_function.reward_kwargs",
    "reward_model.strategy=fsdp2": "every model is sharded with FSDP2",
    "reward_model.ulysses_sequence_parallel_size=1": "the reward model reads each conversation on one device",
    "global_profiler.*": "there is no profiler in this version",
    "trainer.balance_batch=True": "samples are always spread over devices by length",
    "trainer.default_hdfs_dir": "mount remote storage and set default_local_dir",
    "trainer.del_local_ckpt_after_load": "see max_actor_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep": "a checkpoint holds all roles; see max_actor_ckpt_to_keep",
    "trainer.npu_profile.*": "there is no profiler in this version",
    "trainer.profile_steps": "there is no profiler in this version",
    "trainer.use_v1": "there is one trainer, and it is synchronous",
    "trainer.use_legacy_worker_impl": "there is one worker implementation",
    "trainer.esi_redundant_time": "send SIGTERM instead: the run saves after the step and ends",
    "trainer.ray_wait_register_center_timeout": "workers find each other without a register centre",
    "ray_kwargs.timeline_json_file": "use Ray's own timeline tools",
    "data.dataloader_num_workers=0": "there is no data loader to feed",
    "data.datagen.*": "there is no data generator",
    "data.filter_overlong_prompts_workers": "prompts are tokenised once, in batches, when they are read",
    "data.image_key": "rows with something in the columns images or videos are refused in this version",
    "data.image_patch_size": "the processor knows its patch size",
    "data.return_full_prompt": "the prompt is always kept",
    "data.return_multi_modal_inputs": "images are not in this version",
    "data.return_raw_chat=True": "messages are always kept",
    "data.return_raw_input_ids": "token ids are always kept",
    "data.trust_remote_code": "see actor_rollout_ref.model.trust_remote_code",
    "data.val_batch_size": "all validation prompts are handed to the engines at once",
    "data.validation_shuffle": "validation covers all prompts at once",
    "data.video_key": "videos are not supported",
    _A + "hybrid_engine=True": "roles always share the devices",
    _A + "rollout.agent.*": "answers are single-turn",
    _A + "rollout.calculate_log_probs=True": "the engine always returns log-probs",
    _A + "rollout.data_parallel_size=1": "the number of replicas follows from the devices",
    _A + "rollout.expert_parallel_size=1": "experts are not spread over devices in this version",
    _A + "rollout.layered_summon": "weights are always gathered bucket by bucket (update_weights_bucket_megabytes)",
    _A + "rollout.load_format": "the engine gets its weights from the trainer",
    _A + "rollout.logprobs_mode": "log-probs are always those of the sampling temperature",
    _A + "rollout.mode=sync": "every step generates with the current weights",
    _A + "rollout.multi_stage_wake_up": "the engine is always woken in stages",
    _A + "rollout.multi_turn.*": "answers are single-turn",
    _A + "rollout.over_sample_rate": "exactly rollout.n answers are made for each prompt",
    _A + "rollout.prompt_length": "it follows data.max_prompt_length",
    _A + "rollout.response_length": "it follows data.max_response_length",
    _A + "rollout.trace.*": "there is no trace in this version",
    _A + "actor.calculate_entropy": "entropy is always measured",
    _A + "actor.checkpoint.load_contents": "see trainer.resume_weights_only",
    _A + "actor.data_loader_seed": "the order of mini-batches follows data.seed",
    _A + "actor.entropy_checkpointing": "logits are always recomputed in the backward pass",
    _A + "actor.entropy_from_logits_with_chunking": "entropy is always computed in chunks",
    _A + "actor.use_prefix_grouper": "answers share the tokens of their prompt wherever that pays",
    _A + "actor.policy_loss.dro_beta": "only the loss dro uses it, which is not here",
    _A + "actor.freeze_vision_tower": "images are not in this version",
    _A + "actor.optim.override_optimizer_config.*": "use actor.optim.* and actor.fsdp_config.optimizer_offload",
    _A + "actor.optim.lr_scheduler": "use actor.optim.lr_scheduler_type",
    _A + "model.enable_activation_offload": "it is not in this version",
    _A + "model.fused_kernel_options.*": "logits are always computed in chunks",
    _A + "model.mtp.*": "multi-token prediction heads are not trained",
    _A + "model.use_liger": "there are no Liger kernels here",
    _A + "nccl_timeout": "a lost worker is noticed at once, one that hangs by trainer.hang_floor_s",
    _A + "ref.fsdp_config.*": "the reference is sharded and computed like the actor (actor.fsdp_config)",
    _A + "ref.model.*": "the reference is the model that training starts from",
    _A + "ref.strategy=fsdp2": "every model is sharded with FSDP2",
    "*.external_lib": "import it in your own entry point",
    "*.fsdp_config.forward_prefetch": "FSDP2 prefetches by itself",
    "*.fsdp_config.mixed_precision*": "see compute_dtype",
    "*.fsdp_config.offload_policy": "use param_offload and optimizer_offload",
    "*.fsdp_config.wrap_policy*": "the model's own decoder layers are wrapped",
    "*.optim.total_training_steps": "the plan knows the number of steps",
    "*.use_fused_kernels": "logits are always computed in chunks",
    "*.use_remove_padding=True": "sequences are always packed",
    "*.use_shm": "weights are read once, by rank 0",
    "*.use_torch_compile": "nothing is compiled in this version",
}

_FSDP = "the training backend here is FSDP2: "
# Part of the key (or of key=value) of a backend or tool that is not here -> what to use.
REFUSED = {
    "strategy=megatron": _FSDP + "leave this key out",
    "multi_turn.enable=True": "answers are single-turn: leave it out",
    "megatron.tensor_model_parallel_size": _FSDP
    + "weights are sharded over all devices by themselves; for long sequences use "
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "megatron.context_parallel_size": _FSDP + "use actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "megatron.param_offload": _FSDP + "use actor_rollout_ref.actor.fsdp_config.param_offload",
    "megatron.optimizer_offload": _FSDP + "use actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "megatron.grad_offload": _FSDP + "leave it out, gradients live only during the update",
    "megatron.override_transformer_config.recompute": _FSDP
    + "use actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "megatron.dist_checkpointing_path": _FSDP
    + "use trainer.resume_mode=resume_path trainer.resume_from_path=…/global_step_N",
    "megatron.": _FSDP + "leave Megatron's keys out, or see --help actor_rollout_ref.actor.fsdp_config",
    "veomni.": _FSDP + "leave this key out",
    "torchtitan.": _FSDP + "leave this key out",
    "automodel.": _FSDP + "leave this key out",
    "tis_imp_ratio_cap": "use rollout_is=token and rollout_is_threshold=… of algorithm.rollout_correction",
    "algorithm.use_pf_ppo": "PF-PPO is not in this version: leave it out",
    "algorithm.pf_ppo.": "PF-PPO is not in this version: leave it out",
    "data.sampler.class_": "use data.sampler.name=FILE.py:NAME",
    "hydra.": "there is no Hydra here: put settings in a YAML file and give --config FILE (repeatable)",
    "multi_turn.tool_config_path": "tools are not supported: answers are single-turn",
    "agent_loop_config_path": "agent loops are not supported: answers are single-turn",
    "sandbox_fusion": "use custom_reward_function.path with a function that calls your sandbox",
    "data.custom_cls": "write your data as parquet in verl's schema (python -m rltrain.data_preprocess.jsonl does)",
    "tool_config_path": "tools are not supported: answers are single-turn",
}


def rename(key: str) -> str:
    """Our spelling of ``key`` (itself when it has no other)."""
    for old, new in RENAMED.items():
        if key == old:
            return new
        if old.endswith(".") and key.startswith(old):
            return new + key[len(old) :]
    return key


def ignored_because(key: str, value: Any) -> str | None:
    """Why an accepted key has no effect ("" where ``value`` is what happens anyway), or None for keys that are not in
    the table."""
    # The first row that fits decides, so a special row must stand above its general one.
    for row, why in IGNORED.items():
        pattern, equals, anyway = row.partition("=")
        if fnmatchcase(key, pattern):
            needs_no_note = shown(value) == anyway if equals else value in (None, False)
            return "" if needs_no_note else why
    return None


def refused_because(key: str, value: Any) -> str | None:
    """What to use instead of a key of a backend that is not here, or None."""
    text = f"{key}={shown(value)}"
    # A row with "=" is about a value: strategy=fsdp2 is fine, strategy=megatron is not.
    return next((advice for part, advice in REFUSED.items() if part in (text if "=" in part else key)), None)


def shown(value: Any) -> str:
    """A value as a user types it."""
    return "null" if value is None else str(value)
