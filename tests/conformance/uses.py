"""The uses of packages that cannot run here by our adapters, with their places in those packages."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Package:
    """One package and its uses by several adapters."""

    files: tuple[str, ...]
    foreign: tuple[str, ...]
    versions: tuple[tuple[str, ...], ...]
    attributes: dict[str, str]
    texts: dict[str, str] = field(default_factory=dict)
    ours: str = ""
    replaced: dict[str, str] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)
    optional: str = ""
    only: str = r"[A-Za-z][\w.]+"


# fmt: off
_IMAGES = "vllm.multimodal"
VLLM = Package(
    files=("workers/rollout/vllm/*.py",),
    foreign=("vllm", "vllm_ascend"),
    versions=(
        ("vllm 0.20.0",),
        ("vllm 0.23.0",),
        ("vllm 0.32.0",),
        ("vllm 0.33.0",),
        ("vllm-ascend 0.23.0", "vllm 0.23.0"),
        ("vllm-ascend 0.26.0rc1", "vllm 0.26.0"),
    ),
    attributes={
        "vllm.entrypoints.llm:LLM": "collective_rpc llm_engine reset_prefix_cache sleep wake_up",
        "vllm.v1.engine.llm_engine:LLMEngine": "abort_request add_request model_config step",
        # The worker of vllm-ascend 0.23 has no reload: models that need one are refused there.
        "vllm.v1.worker.gpu_worker:Worker": "model_runner reload_weights?",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner":
            "get_model input_batch lora_config lora_manager query_start_loc rejection_sampler requests sampler",
        "vllm.v1.utils:CpuGpuBuffer": "np",
        "vllm.v1.worker.gpu_input_batch:InputBatch":
            "num_computed_tokens_cpu num_prompt_tokens num_tokens_no_spec req_ids",
        # Separate adapters need these; versions without them are refused if they are requested.
        "vllm.lora.layers.base:BaseLayerWithLoRA": "load_weights?",
        "vllm.model_executor.models.utils:WeightsMapper": "get_rename_mapper?",
        "vllm.lora.worker_manager:WorkerLoRAManager": "_adapter_manager",
        "vllm.lora.model_manager:LoRAModelManager": "activate_adapter add_adapter remove_adapter",
        "vllm.lora.lora_model:LoRAModel": "from_lora_tensors loras",
        "vllm.config.lora:LoRAConfig": "lora_dtype",
        "vllm.model_executor.layers.fused_moe.routed_experts_capturer:": "bind_routed_experts_capturer?",
        "vllm.v1.worker.gpu_input_batch:CachedRequestState": "sampling_params",
        "vllm.v1.sample.sampler:Sampler": "apply_penalties compute_logprobs greedy_sample topk_topp_sampler",
        "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": "draft_token_ids num_draft_tokens target_logits_indices",
        "vllm.sampling_params:SamplingParams": "extra_args",
        "vllm.sampling_params:RequestOutputKind": "DELTA FINAL_ONLY",
        "vllm.outputs:RequestOutput": "finished num_cached_tokens outputs prompt_logprobs request_id",
        "vllm.outputs:CompletionOutput": "finish_reason token_ids",
        "vllm.logprobs:FlatLogprobs": "logprobs",
        "vllm.model_executor.models.qwen2:Qwen2ForCausalLM": "load_weights",
        "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed": "make_group_name",
        "vllm.distributed.device_communicators.cpu_communicator:": "_CPUSHMDistributed",
        # Versions without it are refused if it is requested.
        "vllm.model_executor.layers.logits_processor:LogitsProcessor": "head_dtype?",
        # Only on the CPU.
        "vllm.model_executor.custom_op:CustomOp": "_forward_method forward_native",
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding": "rotary_dim",
        "vllm.model_executor.layers.linear:LinearBase": "quant_method",
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase": "moe_kernel",
        f"{_IMAGES}.registry:MultiModalRegistry": "create_processor",
        f"{_IMAGES}.processing:BaseMultiModalProcessor": "_get_mm_fields_config",
        f"{_IMAGES}.inputs:MultiModalKwargsItems": "from_hf_inputs",
    },
    texts={
        "vllm.engine.arg_utils:EngineArgs":
            "disable_custom_all_reduce disable_log_stats distributed_executor_backend dtype enable_chunked_prefill "
            "enable_expert_parallel enable_lora enable_prefix_caching enable_sleep_mode enforce_eager "
            "gpu_memory_utilization hf_overrides limit_mm_per_prompt load_format logprobs_mode lora_target_modules "
            "max_lora_rank max_loras max_model_len max_num_batched_tokens "
            "max_num_seqs mm_processor_cache_gb mm_processor_kwargs model seed skip_tokenizer_init speculative_config "
            "distributed_timeout_seconds tensor_parallel_size trust_remote_code attention_backend "
            "mm_device_do_normalize?",
        "vllm.v1.engine.llm_engine:LLMEngine": "reset_encoder_cache reset_mm_cache",
        "vllm.v1.worker.gpu_worker": "kv_cache weights",
        "vllm.config.model": "float32 head_dtype processed_logprobs",
        "vllm.config.parallel": "external_launcher",
        "vllm.v1.attention.backends.registry:AttentionBackendEnum": "CPU_MLA?",
        "vllm.model_executor.model_loader": "dummy",
        "vllm.inputs.engine": "mm_hashes mm_kwargs mm_placeholders multimodal prompt_token_ids type",
        "vllm.model_executor.models.qwen2_vl:Qwen2VLForConditionalGeneration": "hf_to_vllm_mapper",
        "vllm.model_executor.models.qwen2_vl": "image_grid_thw pixel_values pixel_values_videos video_grid_thw",
        "vllm.model_executor.models.qwen2_5_vl": "second_per_grid_ts",
        "vllm.config.multimodal": "count",
        "vllm.config.multimodal:VideoDummyOptions": "num_frames",
        "vllm.model_executor.models.internvl": "image_num_patches image_token_id",
    },
    # Names of weights, of the model's configuration, of arguments of its image processor, of Python's own and of ours.
    ours="A.weight __dataclass_fields__ _make_filename cpu cuda embed_tokens.weight experts get_text_config image "
         "kv_lora_rank lm_head.weight max_pixels npu policy rltrain stop "
         "tie_word_embeddings to_dict torch. video vllm vllm.distributed.device_communicators.cpu_communicator "
         "vllm.model_executor.layers.fused_moe.routed_experts_capturer",
    replaced={
        "vllm.v1.worker.gpu_worker:Worker": "vllm_ascend.worker.worker:NPUWorker",
        "vllm.v1.worker.gpu_worker": "vllm_ascend.worker.worker",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "vllm_ascend.worker.model_runner_v1:NPUModelRunner",
        "vllm.v1.worker.gpu_input_batch:InputBatch": "vllm_ascend.worker.npu_input_batch:NPUInputBatch",
        "vllm.v1.sample.sampler:Sampler": "vllm_ascend.sample.sampler:AscendSampler",
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler": "vllm_ascend.sample.sampler:AscendTopKTopPSampler",
        "vllm.v1.sample.rejection_sampler:RejectionSampler":
            "vllm_ascend.sample.rejection_sampler:AscendRejectionSampler",
    },
    called={
        "workers/rollout/vllm/sampler.py:CountedSampler.forward":
            "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_native",
        "workers/rollout/vllm/sampler.py:CountedSampler.verify":
            "vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
    },
)

SGLANG = Package(
    files=("workers/rollout/sglang/*.py",),
    foreign=("sglang",),
    versions=(("sglang 0.5.23",),),
    attributes={
        "sglang.srt.entrypoints.engine:Engine":
            "async_generate begin_weight_update end_weight_update flush_cache generate loop "
            "release_memory_occupation "
            "resume_memory_occupation shutdown tokenizer_manager update_weights_from_tensor",
        "sglang.srt.managers.tokenizer_manager:TokenizerManager": "abort_request",
        "sglang.srt.managers.io_struct:FlushCacheReqOutput": "success",
        "sglang.srt.utils:MultiprocessingSerializer": "serialize",
        "sglang.srt.models.qwen2:Qwen2ForCausalLM": "load_weights",
    },
    texts={
        "sglang.srt.server_args:*":
            "attention_backend chunked_prefill_size context_length custom_weight_loader device disable_cuda_graph "
            "disable_radix_cache dtype enable_deterministic_inference enable_memory_saver json_model_override_args "
            "load_format log_level max_prefill_tokens max_running_requests max_total_tokens mem_fraction_static "
            "model_path random_seed sampling_backend skip_tokenizer_init sleep_on_idle tp_size trust_remote_code",
        "sglang.srt.sampling.sampling_params:SamplingParams":
            "ignore_eos logit_bias max_new_tokens min_p sampling_seed temperature top_k top_p",
        "sglang.srt.constants": "kv_cache weights",
        "sglang.srt.managers.tokenizer_manager": "cached_tokens finish_reason input_token_logprobs meta_info "
        "output_token_logprobs",
        "sglang.srt.managers.schedule_batch": "type",
        "sglang.srt.arg_groups.choices": "pytorch torch_native",
        "sglang.srt.configs.load_config": "dummy",
        "sglang.srt.multimodal.processors.base_processor": "format image_grid_thw pixel_values processor_output",
    },
    ours="eos_token_id error model refused run_until_complete sglang torch.",
)

TORCH_NPU = Package(
    files=("common/device.py", "models/attention/varlen.py"),
    foreign=("torch_npu",),
    versions=(("torch-npu 2.10.0.post4",), ("torch-npu 2.13.0",)),
    attributes={
        "torch_npu.npu:":
            "Stream current_stream device_count empty_cache get_device_name max_memory_allocated max_memory_reserved "
            "memory_allocated memory_reserved mem_get_info reset_peak_memory_stats set_device stream synchronize",
        "torch_npu.npu.memory:": "_dump_snapshot _record_memory_history _set_allocator_settings",
        "torch_npu.profiler:": "profile tensorboard_trace_handler",
        "torch_npu:": "npu_fusion_attention",
    },
    # The modules of those, and the compiled part of the wheel, by torch_npu's documentation only.
    ours="CPU NPU ProfilerActivity memory profiler",
    only=r"(?!)",
)

KERNELS = Package(
    files=("models/kernels.py",),
    foreign=("liger_kernel",),
    versions=(("torch-npu 2.10.0.post4", "liger-kernel 0.5.10"), ("torch-npu 2.13.0", "liger-kernel 0.8.5")),
    attributes={
        "torch_npu:": "npu_rms_norm npu_rotary_mul npu_swiglu",
        "liger_kernel.transformers.functional:": "liger_rms_norm liger_rope liger_swiglu",
    },
    only=r"(?!)",
)

TORCH = Package(
    files=("models/attention/varlen.py",),
    foreign=("torch.nn.attention.varlen",),
    versions=(("torch 2.11.0",), ("torch 2.13.0",), ("torch 2.14.0",), ("torch 2.15.0",)),
    attributes={},
    optional="enable_gqa",
    only=r"(?!)",
)

ENVIRONMENT = Package(
    files=("common/env.py",),
    foreign=(),
    versions=(
        ("vllm 0.20.0",),
        ("vllm 0.33.0",),
        ("vllm-ascend 0.23.0", "vllm 0.23.0"),
        ("sglang 0.5.23",),
        ("torch-npu 2.10.0.post4",),
    ),
    attributes={},
    texts={
        "vllm.envs":
            "VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_ENABLE_V1_MULTIPROCESSING VLLM_LOGGING_LEVEL "
            "VLLM_NO_USAGE_STATS VLLM_USE_V2_MODEL_RUNNER",
        "vllm_ascend.envs": "VLLM_ASCEND_ENABLE_NZ",
        "sglang.srt.environ:Envs":
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK",
        "sglang.srt.utils.numa_utils": "SGLANG_CPU_OMP_THREADS_BIND",
        "torch_npu.npu": "ASCEND_RT_VISIBLE_DEVICES",
        "torch_npu._init.core.optional_features": "TASK_QUEUE_ENABLE",
    },
    # Read by CANN, which is not a Python package, and by torch's C++ code.
    ours="HCCL_CONNECT_TIMEOUT HCCL_EXEC_TIMEOUT HCCL_HOST_SOCKET_PORT_RANGE HCCL_NPU_SOCKET_PORT_RANGE "
    "PYTORCH_ALLOC_CONF",
    only=r"(VLLM|SGLANG|ASCEND|HCCL|TASK|PYTORCH)_[A-Z0-9_]+[A-Z0-9]",
)

PACKAGES = {
    "vllm": VLLM, "sglang": SGLANG, "torch-npu": TORCH_NPU, "kernels": KERNELS, "torch": TORCH,
    "environment": ENVIRONMENT,
}
