"""Measure the gap between engine and trainer in half precision: |log pi_engine - log pi_trainer| of sampled tokens.

    python -m bench.engine_gap routing [--engines hf,vllm]     bfloat16, models with experts, with routing replay and
                                                               without; a dense model is the control
    python -m bench.engine_gap head [--engines hf,vllm]        the head's product in half precision and in float32

Engine and trainer are those of a run, in one process for each row, with random models of four layers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.table import finished_row, parse, table, write
from rltrain.config.load import load_config
from rltrain.config.step_passes import make_step_passes
from rltrain.data.chat import chat_encoder
from rltrain.data.prompts import encode_prompts
from rltrain.data.rows import read_rows
from rltrain.workers.hybrid import HybridWorker
from rltrain.workers.interface.tasks import GenerateTask
from rltrain.workers.rollout.contract import Sampling
from tests.tiny import save_tiny_tokenizer, small_run, write_arithmetic

PROMPTS, ANSWERS, TOKENS = 8, 4, 64
SIZES = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "eos_token_id": 1, "pad_token_id": 0,
    "bos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "qwen3": ("Qwen3Config", {"vocab_size": 32_000, "intermediate_size": 768}),
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
DENSE = ("qwen3", "qwen3 (dense)")
# Columns and rows of each table. Rows: model, dtype, routing replay, dtype of the head's product.
TITLES = ("engine", "model", "weights and states", "`router_replay.mode`", "head's product", "tokens", "mean", "99 %",
          "largest")  # fmt: skip
Row = tuple[str, str, str, str]
ROWS: dict[str, list[Row]] = {
    "routing": [("qwen3 (dense)", "bfloat16", "disabled", "bfloat16")] + [
        (name, "bfloat16", mode, "bfloat16") for name in MODELS if name not in DENSE for mode in ("disabled", "R3")
    ],
    "head": [("qwen3", dtype, "disabled", head) for dtype in ("bfloat16", "float16") for head in (dtype, "float32")],
}  # fmt: skip


def save_model(name: str, folder: Path) -> None:
    """Save a random model whose logits have a standard deviation of about 4, like those of a trained model."""
    save_tiny_tokenizer(folder)
    kind, keys = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SIZES | keys))
    with torch.no_grad():
        for path, weight in model.named_parameters():
            # With their initial size all experts would be nearly equal, unlike in trained models.
            if path.endswith((".gate.weight", ".router.weight")):
                weight.normal_(std=0.1)
            elif ".experts." in path:
                weight.normal_(std=0.06)
        model.lm_head.weight.normal_(std=0.25)
    model.save_pretrained(folder)


def gaps(folder: Path, engine: str, name: str, dtype: str, mode: str, head: str) -> Tensor:
    """Return the gap of each sampled token [tokens]."""
    save_model(name, folder / "model")
    files = tuple(write_arithmetic(folder / f"{split}.parquet", range(PROMPTS)) for split in ("train", "test"))
    actor, rollout = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__"
    keys: dict[str, Any] = {
        "data__max_response_length": TOKENS, f"{rollout}name": engine, f"{rollout}dtype": dtype,
        f"{rollout}gpu_memory_utilization": 0.1, f"{actor}fsdp_config__compute_dtype": dtype,
        "actor_rollout_ref__model__fp32_head": head == "float32", f"{actor}router_replay__mode": mode,
        # Disable the check after a weight sync. In it both routers choose, and it would end the run because of the gap
        # that is measured here.
        f"{rollout}log_prob_gap_limit": 10.0,
    }  # fmt: skip
    if engine == "vllm" and name not in DENSE:
        keys |= {f"{rollout}enable_prefix_caching": False, f"{rollout}enforce_eager": True}
    cfg = load_config(small_run(folder / "model", files, folder / "run", **keys)).config
    store = encode_prompts(read_rows(str(files[0])), chat_encoder(cfg), 16, True)
    worker = HybridWorker(cfg, {"train": store, "val": store})
    worker.init_models(make_step_passes(cfg))
    rows = np.arange(PROMPTS, dtype=np.int32)
    task = GenerateTask("train", rows, ANSWERS, Sampling(TOKENS, ignore_eos=True), seed=1, step=1, call=1)
    batch, _, _ = worker.rollout.generate(task)
    own, _ = worker.actor.log_probs(batch, [len(batch)])
    return (own.ragged("old_log_probs").values - batch.ragged("rollout_log_probs").values).abs().double()


def print_row(engine: str, row: Row) -> None:
    """Print a line of the table, and end this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        found = gaps(Path(folder), engine, *row)
    numbers = " | ".join(f"{float(number):.2e}" for number in (found.mean(), found.quantile(0.99), found.max()))
    sys.stdout.write(f"| {' | '.join([engine, *row])} | {len(found)} | {numbers} |\n")
    sys.stdout.flush()
    os._exit(0)  # an ordinary exit may wait for processes of the engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("of", choices=ROWS)
    parser.add_argument("--engines", default="hf,vllm")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parse(parser, out="engine_gap_cpu.md", engines="hf")
    chosen = ROWS[options.of][-1:] if options.smoke else ROWS[options.of]
    if options.row:
        print_row(options.row[0], ROWS[options.of][int(options.row[1])])
    rows: list[str] = []
    for engine in options.engines.split(","):
        for row in chosen:
            # Each row runs in a separate process, because vLLM has one engine per process.
            words = [options.of, "--row", engine, str(ROWS[options.of].index(row))]
            done = subprocess.run([sys.executable, "-m", "bench.engine_gap", *words], capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith(f"| {engine} | ")]
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            finished_row(rows, (lines or [f"| {' | '.join([engine, *row])} | failed: {reason} ||||"])[0])
    write(
        options,
        f"Random models of 4 layers, {PROMPTS * ANSWERS} responses of {TOKENS} tokens at temperature 1: "
        "|log π_engine − log π_trainer| of a sampled token.",
        table(TITLES, rows),
    )


if __name__ == "__main__":
    main()
