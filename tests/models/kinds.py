"""Tiny models whose attention is more than causal, and plain transformers beside them, one sample at a time."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    GraniteSWAConfig,
    Llama4TextConfig,
    MiMoV2FlashConfig,
)

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
BOTH = ["sliding_attention", "full_attention"]
KINDS = {
    "gemma2, capped": Gemma2Config(
        **SIZES, attn_logit_softcapping=1.5, query_pre_attn_scalar=8, sliding_window=5, layer_types=BOTH
    ),
    "gpt_oss, sinks": GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=5, layer_types=BOTH
    ),
    "mimo_v2_flash, sinks in windows": MiMoV2FlashConfig(
        **SIZES, v_head_dim=6, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, sliding_window=5,
        layer_types=BOTH, mlp_layer_types=["dense", "sparse"],
    ),
    "granite_swa, sinks": GraniteSWAConfig(**SIZES, sliding_window=5, layer_types=BOTH),
    "llama4, chunks and temperature": Llama4TextConfig(
        **SIZES, intermediate_size_mlp=48, num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=5,
        no_rope_layers=[1, 0], floor_scale=3, attn_scale=0.8,
    ),
}  # fmt: skip


def plain_model(name):
    """By transformers' own attention; sinks of trained models are no zeros."""
    torch.manual_seed(0)
    config = KINDS[name].__class__(**KINDS[name].to_dict())
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.endswith("sinks"):
                weight.normal_()
    return model
