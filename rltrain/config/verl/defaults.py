"""Extraction of the user's settings from a configuration saved by a run of verl.

A saved tree has 300 to 900 keys, but the user wrote about thirty. All other keys would be reported as without effect
or would count as chosen. So values equal to verl's defaults count as not written. The tables hold the defaults of verl
0.5 to main that differ from rltrain's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from rltrain.config.schema.keys import all_keys, followed, is_known
from rltrain.config.verl.keys import leaves_of, rename

# A tree with this many keys that rltrain lacks was written by a program.
_WHOLE = 50
# Known keys whose default differs here, with verl's default, which in a saved tree counts as not chosen.
_NOT_CHOSEN = {
    "*.use_dynamic_bsz": (False,),
    "*.log_prob_use_dynamic_bsz": (False,),
    "*.loss_agg_mode": ("token-mean",),
    "*.model_dtype": ("fp32",),
    "*.compute_dtype": ("bfloat16",),
    "*.trust_remote_code": (False,),
    "actor_rollout_ref.actor.checkpoint.save_contents": (["model", "optimizer", "extra"],),
    "actor_rollout_ref.rollout.enforce_eager": (False,),
    "actor_rollout_ref.rollout.val_kwargs.do_sample": (False,),
    "actor_rollout_ref.rollout.seed": (42,),
    "actor_rollout_ref.rollout.dtype": ("bfloat16",),
    "actor_rollout_ref.rollout.max_num_seqs": (256, 1024),
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": (512, 2048),
    "algorithm.rollout_correction.rollout_is_threshold": (2.0,),
    "critic.model.path": ("~/models/deepseek-llm-7b-chat",),
    "critic.*_max_token_len_per_gpu": (32768,),
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": (1,),
    "reward.num_workers": (1, 8),
    "reward_model.model.path": ("~/models/FsfairX-LLaMA3-RM-v0.1",),
    "reward_model.forward_max_token_len_per_gpu": (32768,),
    "reward_model.rollout.temperature": (1.0,),
    "reward_model.rollout.*_length": (2048,),
    "reward_model.rollout.max_num_seqs": (1024,),
    "trainer.device": ("cuda",),
    "*.engine_kwargs": ({"vllm": {"disable_mm_preprocessor_cache": False}},),
    "*.model.override_config": ({"moe_config": {"freeze_moe_router": False}},),
}
# Defaults of verl 0.5 to main for keys that rltrain lacks, by the last part of the key.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "attention_backend": ("flash",), "audio_key": ("audios",), "backend": ("naive",), "balance_batch": (True,),
    "calculate_log_probs": (True,), "context_parallel_size": (1,), "data_loader_seed": (42,), "nccl_timeout": (600,),
    "data_parallel_size": (1,), "dataloader_num_workers": (8,), "default_agent_loop": ("single_turn_agent",),
    "dtype": ("bfloat16",), "entropy_from_logits_chunk_size": (2048,), "exp_avg_dtype": ("fp32",),
    "exp_avg_sq_dtype": ("fp32",), "expert_model_parallel_size": (1,), "expert_parallel_size": (1,),
    "filter_overlong_prompts_workers": (1,), "format": ("hermes",), "forward_only": (True,), "fsdp_size": (-1,),
    "hybrid_engine": (True,), "image_key": ("images",), "image_patch_size": (14,), "impl_backend": ("torch",),
    "load_format": ("dummy", "dummy_dtensor", "dummy_megatron"), "load_weight": (True,), "name": ("???", "naive",
    "custom_reward_manager", "compute_score"), "logprobs_mode": ("processed_logprobs",), "model_engine": ("dp",),
    "lr_decay_style": ("linear", "constant"), "lr_wsd_decay_style": ("exponential",), "main_grads_dtype": ("fp32",),
    "max_concurrent": (64,), "max_inflight_gen_batches": (1,), "max_parallel_calls": (1,), "metric": ("acc",),
    "max_tool_response_length": (256,), "memory_limit_mb": (1024,), "mode": ("sync", "async", "disabled"),
    "model_dtype": ("fp32",), "model_family": ("auto",), "n_gpus_per_node": (8,), "num_workers": (1, 8),
    "optimizer": ("adam", "AdamW"), "optimizer_impl": ("torch.optim",), "pad_bshd_to_minibatch_max": (True,),
    "pad_to_length_bucket": (512, 1024), "pipeline_model_parallel_size": (1,), "vanilla_mbridge": (True,),
    "ray_wait_register_center_timeout": (300,), "recompute_modules": (["core_attn"],), "reshard_after_forward": (True,),
    "return_multi_modal_inputs": (True,), "return_raw_chat": (True,), "reward_loop_source": ("register",),
    "reweight_method": ("pow",), "save_contents": (["model", "optimizer", "extra"],), "scheduling_policy": ("fcfs",),
    "load_contents": (["model", "optimizer", "extra"],), "seed": (42,), "sequence_parallel": (True,),
    "skip_dump_dir": ("/tmp/rollout_dump",), "skip_tokenizer_init": (True,), "source": ("register",),
    "strategy": ("fsdp", "megatron"), "strict": (True,), "tensor_model_parallel_size": (1,), "video_key": ("videos",),
    "tokenization_sanity_check_mode": ("strict",), "tool_response_truncate_side": ("middle",), "use_v1": (True,),
    "total_training_steps": (-1,), "ulysses_sequence_parallel_size": (1,), "use_distributed_optimizer": (True,),
    "trainer_mode": ("sync",), "use_legacy_worker_impl": ("auto",), "use_mbridge": (True,),
    "use_remove_padding": (True,), "step_start": (-1,), "use_reward_loop": (True,), "use_torch_compile": (True,),
    "weight_decay_incr_style": ("constant",),
    "weight_pow": (2.0,), "zero_indexed_step": (True,), "step_end": (-1,),
}  # fmt: skip
# Keys that follow another key in verl's files. A saved tree has the value of that key.
_FOLLOWERS = {
    "rollout_n": "actor_rollout_ref.rollout.n", "prompt_length": "data.max_prompt_length",
    "response_length": "data.max_response_length", "tokenizer_path": "actor_rollout_ref.model.path",
    "input_tokenizer": "actor_rollout_ref.model.path",
    "load_contents": "actor_rollout_ref.actor.checkpoint.save_contents",
    "loss_scale_factor": "actor_rollout_ref.actor.loss_scale_factor", "n_gpus_per_node": "trainer.n_gpus_per_node",
    "external_lib": "actor_rollout_ref.model.external_lib", "strategy": "actor_rollout_ref.actor.strategy",
    "use_fused_kernels": "actor_rollout_ref.model.use_fused_kernels", "save_contents":
    "actor_rollout_ref.actor.checkpoint.save_contents",
    "use_torch_compile": "actor_rollout_ref.actor.use_torch_compile",
    "log_prob_max_token_len_per_gpu": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu",
    "forward_micro_batch_size_per_gpu": "critic.ppo_micro_batch_size_per_gpu",
}  # fmt: skip
# Sections with a switch that is off by default: their other keys then have no meaning.
_INERT = [
    *("*profil*", "*nsight_options*", "*transfer_queue.*", "distillation.*", "skip.*", "*.mtp.*", "*.qat.*", "*.v1.*"),
    *("*reward_model.rollout.*", "*.disaggregation.*", "*.prometheus.*", "*.tiled_mlp.*", "*.model.lora.*"),
    *("*.layer_name_map.*", "*.muon_*", "*.trace.*", "*continuous_token*", "*.sandbox_fusion.*"),
]
_SWITCHES = ("enable", "enabled", "trainer_mode", "rank", "url")
# A single interpolation, whose default may contain another one.
_FOLLOWS = re.compile(r"\$\{(oc\.select:)?[\w.]+(,([^{}]|\$\{[^{}]*\})*)?\}")


def chosen_settings(tree: Mapping[str, Any], asked: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings by dotted key, without values that the user did not choose.

    These are class names, missing values, and in a tree written by a program also verl's defaults. asked: keys that are
    always returned.
    """
    tree = {key: value for key, value in tree.items() if key not in ("_wandb", "wandb_version")}
    if tree and all(isinstance(entry, Mapping) and "value" in entry for entry in tree.values()):
        tree = {key: entry["value"] for key, entry in tree.items()}  # the format of W&B
    leaves = {key: value for key, value in leaves_of(tree) if value not in ("???", {})}
    if sum(not is_known(rename(key)) for key in leaves) < _WHOLE:
        return leaves
    return {key: value for key, value in leaves.items() if key in asked or not _a_default(key, value, leaves)}


def _a_default(written: str, value: Any, leaves: Mapping[str, Any]) -> bool:
    key = rename(written)
    if value is None or (isinstance(value, str) and _FOLLOWS.fullmatch(value)):
        return True
    last = key.rpartition(".")[2]
    source = _FOLLOWERS.get(last, written)
    follows = source != written and value == leaves.get(source)
    if not is_known(key):
        inert = last not in _SWITCHES and any(fnmatchcase(written, pattern) for pattern in _INERT)
        return inert or follows or value in (False, 0, "", "None", [], {}) or value in _DEFAULTS.get(last, ())
    inert_values = next((values for pattern, values in _NOT_CHOSEN.items() if fnmatchcase(key, pattern)), ())
    if follows or ((followed_key := followed(key)) and value == leaves.get(followed_key)):
        return True
    if isinstance(value, dict):
        return not (without_nulls := _without_nulls(value)) or without_nulls in inert_values
    # For a key whose defaults differ, a value is a choice unless it is verl's default, even if it is rltrain's.
    return value in inert_values if inert_values else key in all_keys() and value == all_keys()[key].default


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    pruned = {name: _without_nulls(item) if isinstance(item, dict) else item for name, item in value.items()}
    return {name: item for name, item in pruned.items() if item is not None and item != {}}
