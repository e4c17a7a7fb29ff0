"""How far engine and trainer are apart in bfloat16 where a model has experts, with the engine's choice and without.

    python -m bench.router_replay [--engines hf,vllm]

Engine and trainer are those of a run, in one process, with random models of four layers. A dense model of the same
width is the control: what rounding alone makes. Writes bench/results/router_replay_cpu.md.
"""

from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from bench.engine_gap import cells, measured, table
from tests.tiny import save_tiny_tokenizer

RESULT = Path(__file__).parent / "results" / "router_replay_cpu.md"
SIZES = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "eos_token_id": 1, "pad_token_id": 0,
    "bos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "qwen3 (dense)": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", {
        "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True,
    }),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "glm4_moe": ("Glm4MoeConfig", {
        "n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    }),
}  # fmt: skip


def save_model(name: str, folder: Path) -> None:
    """Its logits have a standard deviation of about 4, as those of a trained model have."""
    save_tiny_tokenizer(folder)
    kind, keys = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SIZES | keys))
    with torch.no_grad():
        for path, weight in model.named_parameters():
            # As apart as those of trained routers: at their first size all experts would be nearly alike.
            if path.endswith((".gate.weight", ".router.weight")):
                weight.normal_(std=0.1)
            elif ".experts." in path:
                weight.normal_(std=0.06)
        model.lm_head.weight.normal_(std=0.25)
    model.save_pretrained(folder)


def row(folder: Path, engine: str, name: str, mode: str) -> str:
    """A line of the table."""
    save_model(name, folder / "model")
    keys: dict[str, object] = {"actor_rollout_ref__actor__router_replay__mode": mode}
    # The canary goes by both routers, and would end the run over the very gap that is measured.
    keys |= {"actor_rollout_ref__rollout__log_prob_gap_limit": 10.0}
    if engine == "vllm":
        keys |= {"actor_rollout_ref__rollout__enable_prefix_caching": False}
        keys |= {"actor_rollout_ref__rollout__enforce_eager": True}
    return f"| {engine} | {name} | {mode} | {cells(measured(engine, 'bfloat16', folder, **keys))} |"


def rows(engine: str) -> list[tuple[str, ...]]:
    """A dense model has nothing to replay."""
    return [(engine, name, mode) for name in MODELS for mode in ("disabled", "R3")[: 1 if "dense" in name else 2]]


if __name__ == "__main__":
    about = "random models of 4 layers, trainer and engine in bfloat16"
    heads = "engine", "model", "`router_replay.mode`"
    table("bench.router_replay", "Routing replay", about, heads, row, rows, RESULT)
