"""How far engine and trainer are apart in half precision, with the head's product in it and in float32.

    python -m bench.fp32_head [--engines hf,vllm] [--dtypes bfloat16,float16]

Engine and trainer are those of a run, in one process, with a random model over 32,000 tokens. Each row samples the same
number of answers and has the trainer compute their log-probs. Writes bench/results/fp32_head_cpu.md.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from rltrain.config.load import load_config
from rltrain.config.step_passes import make_step_passes
from rltrain.data.chat import chat_encoder
from rltrain.data.prompts import encode_prompts
from rltrain.data.rows import read_rows
from rltrain.workers.hybrid import HybridWorker
from rltrain.workers.rollout.contract import Sampling
from rltrain.workers.tasks import GenerateTask
from tests.tiny import save_tiny_tokenizer, small_run, write_arithmetic

RESULT = Path(__file__).parent / "results" / "fp32_head_cpu.md"
PROMPTS, ANSWERS, TOKENS = 8, 4, 64


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


def row(engine: str, dtype: str, in_fp32: bool, folder: Path) -> str:
    """A line of the table: mean, 99th percentile and largest of the gap over sampled tokens."""
    save_model(folder / "model")
    files = tuple(write_arithmetic(folder / f"{name}.parquet", range(PROMPTS)) for name in ("train", "test"))
    keys = {
        "data__max_response_length": TOKENS,
        "actor_rollout_ref__rollout__name": engine,
        "actor_rollout_ref__rollout__dtype": dtype,
        "actor_rollout_ref__rollout__gpu_memory_utilization": 0.1,
        "actor_rollout_ref__actor__fsdp_config__compute_dtype": dtype,
        "actor_rollout_ref__model__fp32_head": in_fp32,
    }
    cfg = load_config(small_run(folder / "model", files, folder / "run", **keys)).config
    store = encode_prompts(read_rows(str(files[0])), chat_encoder(cfg), 16, True)
    worker = HybridWorker(cfg, {"train": store, "val": store})
    worker.init_models(make_step_passes(cfg))
    rows = np.arange(PROMPTS, dtype=np.int32)
    task = GenerateTask("train", rows, ANSWERS, Sampling(TOKENS, ignore_eos=True), seed=1, step=1, call=1)
    batch, _, _ = worker.rollout.generate(task)
    own, _ = worker.actor.log_probs(batch, [len(batch)])
    gaps = (own.ragged("old_log_probs").values - batch.ragged("rollout_log_probs").values).abs().double()
    numbers = gaps.mean(), gaps.quantile(0.99), gaps.max()
    cells = " | ".join(f"{float(number):.2e}" for number in numbers)
    return f"| {engine} | {dtype} | {'float32' if in_fp32 else dtype} | {len(gaps)} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", default="hf,vllm")
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.one:
        engine, dtype, wide = words.one.split(",")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(f"ROW {row(engine, dtype, wide == 'True', Path(folder))}\n")
        sys.stdout.flush()
        os._exit(0)  # an engine may have processes that an ordinary end waits for
    lines = []
    for engine in words.engines.split(","):
        for dtype in words.dtypes.split(","):
            for wide in (False, True):
                # Each in a process of its own, as vLLM has one engine a process.
                command = [sys.executable, "-m", "bench.fp32_head", "--one", f"{engine},{dtype},{wide}"]
                done = subprocess.run(command, capture_output=True, text=True)
                told = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
                reason = (done.stderr.strip().splitlines() or ["no word"])[-1]
                lines += told or [f"| {engine} | {dtype} | {'float32' if wide else dtype} | failed: {reason} ||||"]
                sys.stdout.write(lines[-1] + "\n")
                sys.stdout.flush()
    text = (
        "# Head in float32\n\n"
        f"`python -m bench.fp32_head {' '.join(sys.argv[1:])}`, {date.today()}, {platform.machine()} CPU, a random "
        f"Qwen3 of 4 layers over 32,000 tokens, {PROMPTS * ANSWERS} answers of {TOKENS} tokens at temperature 1: "
        "|log π_engine − log π_trainer| of a sampled token.\n\n"
        "| engine | weights and states | head's product | tokens | mean | 99 % | largest |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    RESULT.write_text(text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
