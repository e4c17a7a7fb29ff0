"""Tiny models whose attention is not plainly causal, and plain transformers models for comparison, one sample at a
time."""

import torch
import transformers
from transformers import AutoModelForCausalLM

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
CAPPED = {**WINDOWS, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
TABLE = {
    "gemma2, capped": ("Gemma2Config", CAPPED),
    "gpt_oss, sinks": ("GptOssConfig", {**WINDOWS, **EXPERTS}),
    "mimo_v2_flash, sinks in windows": ("MiMoV2FlashConfig", {
        **WINDOWS, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "mlp_layer_types": ["dense", "sparse"],
    }),
    "llama4, chunks and temperature": ("Llama4TextConfig", {
        **EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "attention_chunk_size": 5,
        "no_rope_layers": [1, 0], "floor_scale": 3, "attn_scale": 0.8,
    }),
    "qwen3_next, gated delta net": ("Qwen3NextConfig", {
        **DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }),
    "qwen3_5, gated delta net": ("Qwen3_5TextConfig", DELTA),
    "olmo_hybrid, gated delta net": ("OlmoHybridConfig", DELTA),
}  # fmt: skip
# Families that transformers 5.5 does not have, or builds otherwise.
LATER = ("MiMoV2FlashConfig", "OlmoHybridConfig")
OLD = transformers.__version__.startswith("5.5.")
KINDS = {
    name: getattr(transformers, kind)(**SIZES, **keys)
    for name, (kind, keys) in TABLE.items()
    if not (OLD and kind in LATER)
}


def plain_model(name):
    """Return a model with transformers' own attention; its sinks are not zero, as in trained models."""
    torch.manual_seed(0)
    config = KINDS[name].__class__(**KINDS[name].to_dict())
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.endswith("sinks"):
                weight.normal_()
    return model
