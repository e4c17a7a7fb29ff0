"""How far engine and trainer are apart in half precision, with the head's product in it and in float32.

    python -m bench.fp32_head [--engines hf,vllm]

Engine and trainer are those of a run, in one process, with a random model over 32,000 tokens. Each row samples the same
number of answers and has the trainer compute their log-probs. Writes bench/results/fp32_head_cpu.md.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from bench.engine_gap import cells, measured, table
from tests.tiny import save_tiny_tokenizer

RESULT = Path(__file__).parent / "results" / "fp32_head_cpu.md"


def save_model(folder: Path) -> None:
    """Its logits have a standard deviation of about 4, as those of a trained model have."""
    save_tiny_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=32_000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=False, eos_token_id=1, pad_token_id=0,
        bos_token_id=None, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(model.lm_head.weight, std=0.25)
    model.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 1


def row(folder: Path, engine: str, dtype: str, head: str) -> str:
    """A line of the table."""
    save_model(folder / "model")
    gaps = measured(engine, dtype, folder, actor_rollout_ref__model__fp32_head=head == "float32")
    return f"| {engine} | {dtype} | {head} | {cells(gaps)} |"


def rows(engine: str) -> list[tuple[str, ...]]:
    """Of each dtype, with the head in it and in float32."""
    return [(engine, dtype, head) for dtype in ("bfloat16", "float16") for head in (dtype, "float32")]


if __name__ == "__main__":
    about = "a random Qwen3 of 4 layers over 32,000 tokens"
    heads = "engine", "weights and states", "head's product"
    table("bench.fp32_head", "Head in float32", about, heads, row, rows, RESULT)
