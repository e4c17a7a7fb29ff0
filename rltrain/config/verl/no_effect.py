"""verl's keys that have no effect here, each with the reason. The form of a row is told in `keys`.

At the start of a row "*" stands for a section of verl's that has such keys (`OWNERS`), at its end for names that are no
keys of verl's, such as arguments.
"""

from __future__ import annotations

from dataclasses import fields

from rltrain.config.schema.model import JudgeRolloutConfig
from rltrain.config.verl.spellings import SHARDING

_A = "actor_rollout_ref."
_R = _A + "rollout."
# What the "*" at the start of a row of NO_EFFECT stands for.
OWNERS = frozenset(
    {
        *("actor_rollout_ref", *(_A + role for role in ("actor", "ref", "rollout", "model", "ref.model"))),
        *("critic", "critic.model", "reward_model", "reward_model.model", *(key[:-1] for key in SHARDING)),
        *("critic.model.fsdp_config", _A + "ref.fsdp_config"),
    }
)

# Keys of rollout.multi_turn in verl 0.3 to main that decide nothing there, or nothing that is decided here.
_OF_TURNS = {
    **dict.fromkeys(("max_turns", "num_repeat_rollouts"), "verl does not read it either"),
    "use_inference_chat_template": "an answer keeps the tokens that were sampled, those of reasoning too",
    "*continuous_token*": "an answer's tokens are always only appended",
    **dict.fromkeys(
        ("tokenization_sanity_check_mode", "enable_tokenization_sanity_check"),
        "what stands between two turns is always compared with the chat template",
    ),
}
_PROFILE = "trainer.profile_steps, profile_phases and profile_ranks say what is profiled"
_OF_PROFILER = ("all_ranks", "discrete", "enable", "ranks", "save_path", "tool", "tool_config*")
_OF_GLOBAL_PROFILER = ("tool", "profile_continuous_steps", "save_path", "global_tool_config*")
# Keys of the server of a reward model, in verl 0.6 to main.
_OF_SERVER = (
    *("name", "mode", "n", "seed", "dtype", "do_sample", "temperature", "top_k", "top_p", "ignore_eos"),
    *("prompt_length", "response_length", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "limit_images"),
    *("tensor_model_parallel_size", "data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size"),
    *("gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes", "free_cache_engine", "engine_kwargs*"),
    *("enable_chunked_prefill", "enable_prefix_caching", "disable_log_stats", "skip_tokenizer_init", "load_format"),
    *("layered_summon", "multi_stage_wake_up", "scheduling_policy", "full_determinism"),
    *("quantization", "quantization_config_file"),
)
_OF_JUDGE = tuple(row.name for row in fields(JudgeRolloutConfig))
# Megatron's adapters.
_OF_LORA = (
    *("type", "alpha", "dropout", "dropout_position", "dtype", "target_modules", "exclude_modules", "adapter_path"),
    *("lora_A_init_method", "lora_B_init_method", "a2a_experimental"),
    *("freeze_language_model", "freeze_vision_model", "freeze_vision_projection"),
)
_AS_ACTOR = "the reference is sharded and computed like the actor (actor.fsdp_config)"
_AS_MODEL = "the reference is built as the actor's model is, from the weights of ref.model.path"
_OF_REFERENCE = (
    *("fsdp_size", "expert_parallel_size", "reshard_after_forward", "optimizer_offload", "seed"),
    *("model_dtype", "dtype", "compute_dtype"),
    *("mixed_precision", "mixed_precision.param_dtype", "mixed_precision.reduce_dtype", "mixed_precision.buffer_dtype"),
    *("use_torch_compile", "use_no_sync_for_gradient_accumulation"),
)
_OF_ITS_MODEL = (
    *("override_config*", "external_lib", "trust_remote_code", "tokenizer_path", "hf_config_path"),
    *("custom_chat_template", "enable_gradient_checkpointing", "use_remove_padding"),
    *("lora_rank", "lora_alpha", "lora_adapter_path", "target_modules", "exclude_modules"),
)
_SYNC = "there is one trainer, and it is synchronous"
# It goes by this constant where a function of the user's would ask that server.
NO_SERVER = "the reward model runs in the workers, by keys of its own, and not behind a server"

# Keys that change nothing here -> why.
NO_EFFECT = {
    # Ours, until 0.2.0. It stays in saved configurations.
    "trainer.overlap": "it was removed (it saved 6 % on a small test): leave it out",
    "algorithm.filter_groups.max_inflight_gen_batches": "rounds of generation follow each other",
    "algorithm.pf_ppo.reweight_method": "it counts only with algorithm.use_pf_ppo, which is not here",
    "algorithm.pf_ppo.weight_pow": "it counts only with algorithm.use_pf_ppo, which is not here",
    **{
        f"critic.checkpoint.{name}": "a checkpoint always holds the whole critic"
        for name in ("contents", "save_contents", "load_contents", "async_save", "strict")
    },
    "critic.data_loader_seed": "the order of mini-batches follows data.seed",
    "critic.enable": "there is a critic with algorithm.adv_estimator=gae",
    "critic.loss_scale_factor": "it follows actor_rollout_ref.actor.loss_scale_factor",
    "critic.model.tokenizer_path": "the critic reads the actor's tokens",
    "critic.model.hf_config_path": "the configuration is read from critic.model.path",
    "critic.model.custom_chat_template": "the critic reads the actor's tokens",
    **dict.fromkeys(
        ("distillation.n_gpus_per_node", "distillation.nnodes", "distillation.teacher_models.*.num_replicas"),
        "the teacher shares the devices of the run",
    ),
    "distillation.teacher_key": "one teacher judges all prompts",
    "distillation.teacher_models.*.key": "one teacher judges all prompts",
    "distillation.teacher_models.*.inference.*": "the teacher reads answers as the reference does, without an engine",
    **dict.fromkeys(
        ("distillation.distillation_loss.topk", "distillation.distillation_loss.tail_mass_eps"),
        "all tokens of the vocabulary are compared, or the one that was drawn",
    ),
    "reward.reward_manager.module.path": "see custom_reward_function",
    "reward.reward_manager.module.name!=custom_reward_manager": "see custom_reward_function",
    "reward_manager.module.path": "see custom_reward_function",
    "reward_manager.module.name!=custom_reward_manager": "see custom_reward_function",
    **{f"reward_model.rollout.{name}": NO_SERVER for name in _OF_SERVER if name not in _OF_JUDGE},
    **{f"reward_model.inference.{name}": NO_SERVER for name in _OF_SERVER},
    "reward.reward_model.enable_resource_pool": "the reward model shares the devices",
    "reward.reward_model.n_gpus_per_node": "the reward model shares the devices",
    "reward.reward_model.nnodes": "the reward model shares the devices",
    "reward_model.use_reward_loop": "scoring always runs in its own processes",
    "reward_model.enable_resource_pool": "the reward model shares the devices",
    "reward_model.n_gpus_per_node": "the reward model shares the devices",
    "reward_model.nnodes": "the reward model shares the devices",
    "reward_model.launch_reward_fn_async": "scoring always runs in its own processes",
    "reward_model.max_length": "the reward model reads whole conversations",
    "reward_model.model.fsdp_config.model_dtype": "the reward model is not trained",
    "reward_model.model.fsdp_config.optimizer_offload": "the reward model is not trained",
    "reward_model.model.input_tokenizer": "the reward model reads answers by its own tokenizer and chat template",
    "reward_model.overlong_buffer.log": "the penalty is always logged as reward/overlong/mean",
    "reward_model.reward_kwargs*": "a function of your own takes custom_reward_function.reward_kwargs",
    "reward.reward_kwargs*": "a function of your own takes custom_reward_function.reward_kwargs",
    "reward_model.ulysses_sequence_parallel_size!=1": "the reward model reads each conversation on one device",
    **{f"global_profiler.{name}": _PROFILE for name in _OF_GLOBAL_PROFILER},
    "profile.*": _PROFILE,
    "*.profiler": _PROFILE,
    **{f"*.profiler.{name}": _PROFILE for name in _OF_PROFILER},
    "trainer.balance_batch=False": "samples are always spread over devices by length",
    "trainer.default_hdfs_dir": "mount remote storage and set default_local_dir",
    "trainer.del_local_ckpt_after_load": "see max_actor_ckpt_to_keep",
    "trainer.dump_high_diff_*": "answers of every step are kept in RUN/samples, see trainer.samples_freq",
    "trainer.max_critic_ckpt_to_keep": "a checkpoint holds all roles; see max_actor_ckpt_to_keep",
    "trainer.npu_profile.*": _PROFILE,
    "trainer.use_v1": _SYNC,
    "trainer.debug": "a run is the same whether somebody looks for a fault or not",
    _R + "moe_tensor_parallel_size": "an engine cuts experts as all weights, by tensor_model_parallel_size",
    "trainer.remove_previous_ckpt_in_save": "see trainer.max_actor_ckpt_to_keep",
    "trainer.v1.sync": _SYNC,
    "trainer.v1.colocate_async.num_warmup_batches": _SYNC,
    "trainer.v1.separate_async.num_warmup_batches": _SYNC,
    "trainer.v1.separate_async.parameter_sync_step": _SYNC,
    "trainer.v1.sampler.max_off_policy_strategy": _SYNC,
    "trainer.v1.sampler.max_off_policy_threshold": _SYNC,
    "trainer.v1.sampler.sampler_kwargs*": "it is for verl's custom_sampler; see data.sampler.name",
    "trainer.v1.sampler.sync_refill_failed_groups": "an answer that could not be scored counts as reward.on_error",
    "trainer.use_legacy_worker_impl": "there is one worker implementation",
    "trainer.esi_redundant_time": "send SIGTERM instead: the run saves after the step and ends",
    "trainer.ray_wait_register_center_timeout": "workers find each other without a register centre",
    "ray_kwargs.timeline_json_file": "use Ray's own timeline tools",
    "transfer_queue.*": "samples go from process to process through Ray",
    "data.audio_key": "audio is not supported",
    "data.dataloader_num_workers": "there is no data loader to feed",
    "data.filter_overlong_prompts_workers": "prompts are tokenised once, in batches, when they are read",
    "data.image_patch_size": "the processor knows its patch size",
    "data.return_full_prompt": "the prompt is always kept",
    "data.return_multi_modal_inputs": "images are read and processed where they are needed",
    "data.need_tools_kwargs": "a row says so itself, by need_tools_kwargs in its extra_info",
    "data.return_raw_chat=False": "messages are always kept",
    "data.return_raw_input_ids": "token ids are always kept",
    "data.trust_remote_code": "see actor_rollout_ref.model.trust_remote_code",
    "data.val_batch_size": "all validation prompts are handed to the engines at once",
    "data.validation_shuffle": "validation covers all prompts at once",
    "data.video_key": "rows with something in the column videos are refused in this version",
    _A + "hybrid_engine!=True": "roles always share the devices",
    _R + "agent.num_workers": "the engines are asked by their own workers; tools have multi_turn.num_tool_processes",
    _R + "calculate_log_probs=False": "the engine always returns log-probs",
    **{
        f"{_R}checkpoint_engine.{name}": "weights are handed to the engines on their own devices, bucket by bucket"
        for name in ("backend", "custom_backend_module", "engine_kwargs*")
    },
    _R + "disable_log_stats=False": "vLLM logs them with VLLM_LOGGING_LEVEL=INFO and an engine_kwargs of this name",
    _R + "full_determinism": "there is no switch for deterministic kernels",
    _R + "layered_summon": "weights are always gathered bucket by bucket (update_weights_bucket_megabytes)",
    _R + "load_format": "the engine gets its weights from the trainer",
    _R + "logprobs_mode": "log-probs are always those of the sampling temperature",
    _R + "micro_batch_size": "see max_num_seqs, how many answers are generated at once",
    _R + "mode!=sync": "every step generates with the current weights",
    _R + "moe_load_balance_metrics_interval": "moe/max_vio/* measure the load of experts in every update",
    _R + "multi_stage_wake_up": "the engine is always woken in stages",
    **{f"{_R}multi_turn.{name}": why for name, why in _OF_TURNS.items()},
    _R + "n_gpus_per_node": "engines share the devices of the trainer",
    _R + "over_sample_rate": "exactly rollout.n answers are made for each prompt",
    **{
        f"{_R}prometheus.{name}": "metrics go to metrics.jsonl and to trainer.logger"
        for name in ("enable", "file", "port", "served_model_name")
    },
    _R + "prompt_length": "it follows data.max_prompt_length",
    _R + "response_length": "it follows data.max_response_length",
    _R + "scheduling_policy!=fcfs": "an engine answers prompts in the order in which it takes them",
    _R + "skip_dump_dir": "it counts only with skip_rollout, which is not here",
    _R + "skip_tokenizer_init": "the engine is always given token ids, and gives token ids",
    **{
        f"{_R}trace.{name}": "there is no trace in this version"
        for name in ("backend", "token2text", "max_samples_per_step_per_worker", "project_name", "experiment_name")
    },
    _A + "actor.calculate_entropy": "entropy is always measured",
    _A + "actor.adaptive_entropy.enabled": "adaptive_entropy.target_entropy turns it on",
    _A + "actor.calculate_sum_pi_squared": "it follows from the estimator",
    **{
        f"{_A}actor.router_replay.{name}": "what was chosen goes with the samples, in memory"
        for name in ("record_file", "replay_file")
    },
    _R + "enable_rollout_routing_replay": "the engine tells where tokens went under actor.router_replay.mode=R3",
    _A + "actor.checkpoint.async_save=False": "see trainer.async_save, which is on",
    _A + "actor.checkpoint.load_contents": "see trainer.resume_weights_only",
    _A + "actor.checkpoint.strict=False": "a checkpoint is always read as a whole",
    _A + "actor.data_loader_seed": "the order of mini-batches follows data.seed",
    _A + "actor.use_prefix_grouper": "answers share the tokens of their prompt wherever that pays",
    "*.optim.override_optimizer_config*": "use optim.* and fsdp_config.optimizer_offload",
    "*.optim.lr_scheduler": "use optim.lr_scheduler_type",
    "*.optim.optimizer_impl": "every model is trained by torch's AdamW",
    "*.optim.zero_indexed_step": "the first of w warm-up steps learns with 1/(w+1) of optim.lr",
    "*.optim.total_training_steps": "the plan knows the number of steps",
    "*.model.fused_kernel_options.impl_backend": "logits are always computed in chunks",
    "critic.model.lora.merge": "a critic generates nothing",
    **{f"*.model.lora.{name}": "it counts only with Megatron's lora.rank" for name in _OF_LORA},
    **{
        f"*.model.tiled_mlp.{name}": "layers are computed whole; use enable_gradient_checkpointing to save memory"
        for name in ("enabled", "num_shards")
    },
    "*.model.torch_dtype": "see fsdp_config.model_dtype and compute_dtype",
    "*.use_liger": "it follows actor_rollout_ref.model.use_liger",
    "*.nccl_timeout": "a lost worker is noticed at once, one that hangs by trainer.hang_floor_s",
    **{f"{_A}ref.fsdp_config.{name}": _AS_ACTOR for name in _OF_REFERENCE},
    **{f"{_A}ref.model.{name}": _AS_MODEL for name in _OF_ITS_MODEL},
    "*.rollout_n": "it follows actor_rollout_ref.rollout.n",
    "*.entropy_checkpointing": "logits are always recomputed in the backward pass",
    "*.entropy_from_logits_with_chunking": "entropy is always computed in chunks",
    "*.entropy_from_logits_chunk_size": "entropy is always computed in chunks",
    "*.pad_to_length": "sequences are always packed, without padding",
    "*.pad_to_length_bucket": "sequences are always packed, without padding",
    "*.fsdp_config.forward_only": "a model has an optimizer exactly where it is trained",
    "*.fsdp_config.forward_prefetch": "FSDP2 prefetches by itself, as the host never waits between layers",
    "*.fsdp_config.full_determinism": "there is no switch for deterministic kernels",
    "*.fsdp_config.mixed_precision.reduce_dtype!=fp32|float32": "gradients are always reduced in float32",
    "*.fsdp_config.grad_offload": "gradients live only during the update",
    "*.fsdp_config.mixed_precision": "see compute_dtype",
    "*.fsdp_config.mixed_precision.buffer_dtype": "see compute_dtype",
    "*.fsdp_config.offload_policy": "see param_offload and optimizer_offload",
    "*.fsdp_config.seed": "see data.seed",
    "*.fsdp_config.use_orig_params": "FSDP2 always keeps the original parameters",
    **{
        f"*.fsdp_config.wrap_policy{name}": "the model's own decoder layers are wrapped"
        for name in ("", ".min_num_params", ".transformer_layer_cls_to_wrap", ".disable")
    },
    "*.fsdp_config.turbo_config.*": "it counts only with strategy=fsdp_turbo, which is not here",
    "*.use_fused_kernels": "logits are always computed in chunks",
    "*.use_remove_padding=False": "sequences are always packed",
    "*.use_shm": "weights are read once, by rank 0",
    "*.use_torch_compile": "it compiles verl's entropy; layers are compiled with {fsdp}.use_torch_compile=True",
}
