"""Conversion of keys of verl's other training backends that have the same meaning under FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rltrain.config.verl import hydra


def parsed_or_text(text: str) -> Any:
    """Return the value of a text on the command line, or the text if it cannot be parsed."""
    try:
        return hydra.parsed(text)
    except (YAMLError, OmegaConfBaseException):
        return text


@dataclass(frozen=True)
class Rule:
    """The conversion of a key."""

    target: str = ""
    """rltrain's key, with {role}, {fsdp} and {model} for the paths of the key's model; empty if nothing need be set."""
    why: str = ""
    turn: Callable[[str], str | None] = str
    """Function that converts the value as typed. It returns None if the value cannot be carried over."""


def _only(*allowed: str) -> Callable[[str], str | None]:
    return lambda value: value if value in (*allowed, "null", "") else None


def _recompute(value: str) -> str:
    return str(value not in ("null", "None", ""))


def _offloaded(value: str) -> str:
    return str(value.lower() not in ("false", "0", "0.0", "null"))


def _modules(value: str) -> str | None:
    """Convert Megatron's names of a layer's matrices to Hugging Face's."""
    names = {"linear_qkv": "q_proj,k_proj,v_proj", "linear_proj": "o_proj", "linear_fc1": "gate_proj,up_proj"}
    names["linear_fc2"] = "down_proj"
    modules = parsed_or_text(value)
    modules = modules if isinstance(modules, list) else [modules]
    if set(names) <= set(modules):
        return "all-linear"
    return f"[{','.join(names.get(str(name), str(name)) for name in modules)}]"


SPREAD = (
    "FSDP2 shards weights, gradients and optimizer over all devices instead of PP; a device computes "
    "whole layers, so where memory runs out raise ulysses_sequence_parallel_size or lower *_max_token_len_per_gpu"
)
_SAME_MATHS = "it changes how the backend computes, not what"
# Keys of verl's backends that do not change results; the effect of other keys is unknown.
_HARMLESS = """
    sequence_parallel use_distributed_optimizer use_mbridge vanilla_mbridge use_dist_checkpointing
    dist_checkpointing_prefix dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient
    use_megatron_fsdp use_remove_padding load_weight forward_only seed full_determinism strategy *_fusion overlap_*
    bucket_size bucket_cap_mb average_in_collective grad_reduce_in_fp32 attention_backend attn_implementation
    attn_type moe_implementation use_flash_attn use_fused_* moe_grouped_gemm moe_token_dispatcher_type
    moe_enable_deepep moe_flex_dispatcher_backend moe_shared_expert_overlap deallocate_pipeline_outputs
    persist_layer_norm account_for_*_in_pipeline_split num_layers_in_*_pipeline_stage pipeline_model_parallel_layout
    variable_seq_lengths distribute_saved_activations cpu_offloading* fine_grained_activation_offloading
    offload_modules tp_comm_overlap* cuda_graph_* enable_cuda_graph swap_optimizer init_device enable_full_shard
    fsdp_size wrap_policy offload_policy reshard_after_forward forward_prefetch use_orig_params use_torch_compile
    data_parallel_mode gradient_checkpointing enable_reentrant use_precision_aware_optimizer pin_cpu_*
    use_torch_optimizer_for_cpu_offload foreach fused capturable
"""
_UNKNOWN = Rule(turn=_only())
# Keys of verl's other backends -> conversions. The first row that matches decides.
RULES: dict[str, Rule] = {
    "model_engine": Rule(why="the training backend is FSDP2"),
    "*.strategy": Rule(why="the training backend is FSDP2"),
    "*.megatron.context_parallel_size": Rule("{role}.ring_attention_size", "was context_parallel_size"),
    "*.ulysses_parallel_size": Rule("{role}.ulysses_sequence_parallel_size", "was ulysses_parallel_size"),
    "*.torchtitan.context_parallel_size": Rule("{role}.ring_attention_size", "was context_parallel_size"),
    "*.ref.*.expert_*parallel_size": Rule(why="the reference is sharded like the actor"),
    "*.megatron.expert_model_parallel_size": Rule("{fsdp}.expert_parallel_size", "was expert_model_parallel_size"),
    "*.veomni.expert_parallel_size": Rule("{fsdp}.expert_parallel_size", "was veomni.expert_parallel_size"),
    "*.torchtitan.expert_parallel_size": Rule("{fsdp}.expert_parallel_size", "was torchtitan.expert_parallel_size"),
    "*.megatron.tensor_model_parallel_size": Rule("{fsdp}.tensor_parallel_size", "was tensor_model_parallel_size"),
    "*.torchtitan.tensor_parallel_size": Rule("{fsdp}.tensor_parallel_size", "was torchtitan.tensor_parallel_size"),
    "*.megatron.*parallel_size": Rule(why=SPREAD),
    "*.torchtitan.*parallel*_size": Rule(why=SPREAD),
    "*.veomni.*parallel_size": Rule(why=SPREAD),
    "*.ref.megatron.optimizer_offload": Rule(why="the reference has no optimizer"),
    "*.megatron.grad_offload": Rule(why="gradients exist only during the update"),
    "*.megatron.*_offload": Rule("{fsdp}.{last}", "was megatron.{last}"),
    "*.veomni.*_offload": Rule("{fsdp}.{last}", "was veomni.{last}"),
    "*.torchtitan.*_offload": Rule("{fsdp}.{last}", "was torchtitan.{last}"),
    "*.override_transformer_config.recompute_granularity": Rule(
        "{model}.enable_gradient_checkpointing", "was recompute_granularity; layers are recomputed whole", _recompute
    ),
    "*.override_transformer_config.recompute_*": Rule(why="complete layers are recomputed, one by one"),
    "*.megatron.dist_checkpointing_path": Rule(
        why="weights are read from model.path, a Hugging Face folder. Convert a Megatron checkpoint: python -m "
        "verl.model_merger merge --backend megatron --local_dir …/global_step_N/actor --target_dir FOLDER"
    ),
    # Terms that Megatron adds to the loss or the model, unrelated to sharding.
    "*.override_transformer_config.moe_aux_loss_coeff": Rule(
        why="router_aux_loss_coef is such a loss, with another scale (docs/moe.md)", turn=_only("0", "0.0")
    ),
    "*.override_transformer_config.moe_z_loss_coeff": Rule(turn=_only("0", "0.0")),
    "*.actor.*.override_transformer_config.moe_router_bias_update_rate": Rule(
        "{role}.router_bias_update_rate", "was moe_router_bias_update_rate"
    ),
    "*.override_transformer_config.moe_router_load_balancing_type": Rule(turn=_only("none")),
    "*.override_transformer_config.*dropout": Rule(turn=_only("0", "0.0")),
    **{
        f"*.actor.{backend}.router_replay.mode": Rule(
            "{role}.router_replay.mode", f"was {backend}.router_replay.mode", _only("disabled", "R2", "R3")
        )
        for backend in ("megatron", "veomni")
    },
    "*.actor.*.router_replay.*_file": Rule(why="recorded experts are kept in memory with the samples"),
    "*.router_replay.mode": Rule(turn=_only("disabled")),
    "*.megatron.qat.enable": Rule(turn=_only("False", "false")),
    "*.megatron.override_transformer_config.fp8*": Rule(turn=_only("False", "false")),
    "*.megatron.override_transformer_config.mtp*": Rule(turn=_only("0")),
    "*.megatron.override_transformer_config.moe_router_dtype": Rule(
        why="the router computes in the dtypes of the Hugging Face model"
    ),
    "*.megatron.dtype": Rule(turn=_only("bfloat16")),
    "*.megatron.*": _UNKNOWN,
    "*.veomni.*": _UNKNOWN,
    "*.torchtitan.*": _UNKNOWN,
    "*.optim.lr_decay_style": Rule("{optim}.lr_scheduler_type", "was lr_decay_style", _only("constant", "cosine")),
    "*.optim.lr_decay_steps": Rule(why="the rate decays until the last step of the run"),
    "*.optim.lr_warmup_init": Rule(turn=_only("0", "0.0")),
    "*.optim.weight_decay_incr_style": Rule(turn=_only("constant")),
    "*.optim.override_optimizer_config.optimizer_cpu_offload": Rule(
        "{fsdp}.optimizer_offload", "was optimizer_cpu_offload", _offloaded
    ),
    "*.optim.override_optimizer_config.optimizer_offload_fraction": Rule(
        "{fsdp}.optimizer_offload", "was optimizer_offload_fraction; the whole state is moved", _offloaded
    ),
    "*.optim.override_optimizer_config.amsgrad": Rule(turn=_only("False", "false")),
    "*.optim.override_optimizer_config.*": _UNKNOWN,
    "*.optim.use_precision_aware_optimizer": Rule(why=_SAME_MATHS),
    "*.optim.lr_wsd_*": Rule(why="it has an effect only with lr_decay_style=WSD"),
    "*.optim.use_checkpoint_opt_param_scheduler": Rule(why="a resumed run continues its schedule"),
    "*.model.lora.rank": Rule("{model}.lora_rank", "was lora.rank"),
    "*.model.lora.alpha": Rule("{model}.lora_alpha", "was lora.alpha"),
    "*.model.lora.target_modules": Rule("{model}.target_modules", "was lora.target_modules", _modules),
    "*.model.lora.exclude_modules": Rule("{model}.exclude_modules", "was lora.exclude_modules", _modules),
    "*.model.lora.adapter_path": Rule("{model}.lora_adapter_path", "was lora.adapter_path"),
    "*.model.lora.type": Rule(turn=_only("lora", "canonical_lora")),
    "*.model.lora.dropout": Rule(turn=_only("0", "0.0")),
    "*.model.lora.*": Rule(why="it has an effect only in Megatron"),
}


def rule_of(key: str) -> Rule | None:
    """Return the conversion of a verl key, or None without a rule."""
    rule = next((rule for pattern, rule in RULES.items() if fnmatchcase(key, pattern)), None)
    name = key.rpartition(".")[2]
    if rule is _UNKNOWN and any(fnmatchcase(name, pattern) for pattern in _HARMLESS.split()):
        return Rule(why=_SAME_MATHS)
    return rule
