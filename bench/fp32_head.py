"""How far engine and trainer are apart in half precision, with the head's product in it and in float32.

    python -m bench.fp32_head [--engines hf,vllm] [--dtypes bfloat16,float16]

Engine and trainer are those of a run, in one process, with a random model over 32,000 tokens. Each row samples the same
number of answers and has the trainer compute their log-probs. Writes bench/results/fp32_head_cpu.md.
"""

import argparse
import os
import platform
import sys
import tempfile
from datetime import date
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from bench.engine_gap import ANSWERS, COLUMNS, PROMPTS, TOKENS, cells, each_in_a_process, measured
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


def row(engine: str, dtype: str, head: str, folder: Path) -> str:
    """A line of the table."""
    save_model(folder / "model")
    gaps = measured(engine, dtype, folder, actor_rollout_ref__model__fp32_head=head == "float32")
    return f"| {engine} | {dtype} | {head} | {cells(gaps)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", default="hf,vllm")
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.one:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(f"ROW {row(*words.one.split(','), Path(folder))}\n")
        sys.stdout.flush()
        os._exit(0)  # an engine may have processes that an ordinary end waits for
    kinds = product(words.engines.split(","), words.dtypes.split(","))
    rows = [(engine, dtype, head) for engine, dtype in kinds for head in (dtype, "float32")]
    lines = each_in_a_process("bench.fp32_head", rows)
    text = (
        "# Head in float32\n\n"
        f"`python -m bench.fp32_head {' '.join(sys.argv[1:])}`, {date.today()}, {platform.machine()} CPU, a random "
        f"Qwen3 of 4 layers over 32,000 tokens, {PROMPTS * ANSWERS} answers of {TOKENS} tokens at temperature 1: "
        "|log π_engine − log π_trainer| of a sampled token.\n\n"
        f"| engine | weights and states | head's product | {' | '.join(COLUMNS)} |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    RESULT.write_text(text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
