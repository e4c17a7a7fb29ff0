"""Keys that users bring along: other spellings of ours, keys without a meaning here, keys of other backends."""

from __future__ import annotations

_A = "actor_rollout_ref."

# Spelling of another verl version -> ours. A prefix ends in a dot.
RENAMED = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_manager": "reward_model.reward_manager",
    "reward.reward_kwargs.overlong_buffer_cfg.": "reward_model.overlong_buffer.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.": "reward_model.overlong_buffer.",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
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

# Accepted without effect -> why.
IGNORED = {
    "critic.enable": "there is a critic with algorithm.adv_estimator=gae",
    "reward.reward_model.": "the reward model runs in the workers, see --help reward_model",
    "reward_model.max_length": "the reward model reads whole conversations",
    "reward_model.strategy": "every model is sharded with FSDP2",
    "reward_model.ulysses_sequence_parallel_size": "the reward model reads each conversation on one device",
    "global_profiler.": "there is no profiler in this version",
    "trainer.npu_profile.": "there is no profiler in this version",
    "trainer.profile_steps": "there is no profiler in this version",
    "trainer.use_v1": "there is one trainer, and it is synchronous",
    "trainer.use_legacy_worker_impl": "there is one worker implementation",
    "trainer.esi_redundant_time": "send SIGTERM instead: the run saves after the step and ends",
    "trainer.ray_wait_register_center_timeout": "workers find each other without a register centre",
    "ray_kwargs.ray_init.runtime_env.py_executable": "workers run in the driver's environment",
    "ray_kwargs.timeline_json_file": "use Ray's own timeline tools",
    "data.datagen.": "there is no data generator",
    "data.return_raw_input_ids": "token ids are always kept",
    "data.return_full_prompt": "the prompt is always kept",
    "data.return_multi_modal_inputs": "images are not in this version",
    "data.video_key": "videos are not supported",
    "data.validation_shuffle": "validation covers all prompts at once",
    "data.image_patch_size": "the processor knows its patch size",
    _A + "rollout.prompt_length": "it follows data.max_prompt_length",
    _A + "rollout.response_length": "it follows data.max_response_length",
    _A + "rollout.agent.": "answers are single-turn",
    _A + "rollout.trace.": "there is no trace in this version",
    _A + "rollout.multi_turn.": "answers are single-turn",
    _A + "rollout.expert_parallel_size": "experts are not spread over devices in this version",
    _A + "rollout.logprobs_mode": "log-probs are always those of the sampling temperature",
    _A + "rollout.over_sample_rate": "exactly rollout.n answers are made for each prompt",
    _A + "actor.data_loader_seed": "the order of mini-batches follows data.seed",
    _A + "actor.use_prefix_grouper": "answers share the tokens of their prompt wherever that pays",
    _A + "actor.policy_loss.dro_beta": "only the loss dro uses it, which is not here",
    _A + "actor.freeze_vision_tower": "images are not in this version",
    _A + "actor.optim.override_optimizer_config.": "use actor.optim.* and actor.fsdp_config.optimizer_offload",
    _A + "actor.optim.lr_scheduler": "use actor.optim.lr_scheduler_type",
    _A + "model.fused_kernel_options.": "logits are always computed in chunks",
    _A + "model.mtp.": "multi-token prediction heads are not trained",
    _A + "nccl_timeout": "a lost worker is noticed at once, one that hangs by trainer.hang_floor_s",
    _A + "ref.model.": "the reference is the model that training starts from",
}

_FSDP = "the training backend here is FSDP2: "
# Of a backend or tool that is not here -> what to use.
REFUSED = {
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
    "tis_imp_ratio_cap": "use algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=…",
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


def ignored_because(key: str) -> str | None:
    """Why an accepted key has no effect, or None for keys that are not in the list."""
    return next(
        (why for prefix, why in IGNORED.items() if key == prefix or (prefix.endswith(".") and key.startswith(prefix))),
        None,
    )


def refused_because(key: str) -> str | None:
    """What to use instead of a key of a backend that is not here, or None."""
    return next((advice for part, advice in REFUSED.items() if part in key), None)
