"""What one accelerator reaches: tokens a second, share of peak (MFU) in log-probs and update, of bandwidth in decode.

    python -m bench.gpu [--shape 0.5b] [--prompts 16] [--answers 8] [--prompt-tokens 512]
                        [--response-tokens 1024] [--set KEY=VALUE ...]
    python -m bench.gpu --shape tiny          the same on a CPU in seconds, to see that it runs

Real steps of the real trainer in this process (one device, no Ray cluster), over a Qwen2.5 of the given shape with
random weights and answers of fixed length. FLOPs are those of the model without recompute and with every prompt
computed for each answer, so shared prompts show as a higher share. Writes bench/results/gpu.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

from bench.scale import FreeScores
from bench.table import write
from bench.workload import write_prompts
from rltrain.device import get_device
from scripts.make_small_model import build_tokenizer
from tests.local import local_trainer

# hidden, layers, heads, key heads, intermediate, vocabulary, tied
SHAPES = {
    "0.5b": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5b": (1536, 28, 12, 2, 8960, 151_936, True),
    "tiny": (64, 2, 4, 2, 128, 1024, True),
}
# Memory bandwidth in bytes/s, from the vendors' data sheets.
BANDWIDTH = {
    "H200": 4.8e12,
    "H100": 3.35e12,
    "H800": 3.35e12,
    "H20": 4.0e12,
    "A100": 2.04e12,
    "A800": 2.04e12,
    "B200": 8e12,
}
Metrics = dict[str, float]


def make_model(folder: Path, shape: str, dtype: torch.dtype) -> None:
    """A Hugging Face folder with random weights and a tokenizer of bytes."""
    hidden, layers, heads, key_heads, intermediate, vocabulary, tied = SHAPES[shape]
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, intermediate_size=intermediate, max_position_embeddings=32_768,
        tie_word_embeddings=tied, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(options: argparse.Namespace) -> tuple[list[Metrics], Any]:
    """Metrics of the steps after the first, and the trainer."""
    folder: Path = options.work / options.shape
    if not (folder / "config.json").exists():
        make_model(folder, options.shape, torch.float32 if options.shape == "tiny" else torch.bfloat16)
    write_prompts(
        folder / "train.parquet", options.prompts * (options.steps + 1), max((options.prompt_tokens - 25) // 7, 1)
    )
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    trainer: Any = local_trainer(
        [
            "algorithm.adv_estimator=grpo", f"data.train_files={folder}/train.parquet",
            f"data.train_batch_size={options.prompts}", f"data.max_prompt_length={options.prompt_tokens + 32}",
            f"data.max_response_length={options.response_tokens}", f"actor_rollout_ref.model.path={folder}",
            f"{actor}.ppo_mini_batch_size={options.prompts}", f"{actor}.use_kl_loss=True",
            f"{actor}.recompute_old_log_prob=always", f"{actor}.optim.lr=1e-6", f"{rollout}.n={options.answers}",
            f"{rollout}.ignore_eos=True", f"{rollout}.max_num_seqs={options.prompts * options.answers}",
            f"trainer.device={options.device}", "trainer.n_gpus_per_node=1",
            f"trainer.total_training_steps={options.steps + 1}", f"trainer.default_local_dir={folder}/run",
            *options.set,
        ]
    )  # fmt: skip
    trainer.rewards._pool = FreeScores()
    return [trainer.step(step) for step in range(1, options.steps + 2)][1:], trainer


def work(options: argparse.Namespace, sizes: Metrics, prompt: float) -> dict[str, float]:
    """FLOPs of a forward over all samples; bytes that decoding must read: weights every step, all keys and values."""
    _, layers, heads, key_heads, *_ = SHAPES[options.shape]
    samples, answer = options.prompts * options.answers, options.response_tokens
    forward = samples * (
        2 * sizes["matmul_parameters"] * (prompt + answer) + 2 * sizes["attention_width"] * (prompt + answer) ** 2
    )
    element = 4 if get_device(options.device).is_cpu else 2
    kept = 2 * key_heads * layers * (sizes["attention_width"] / (layers * heads)) * element
    read = answer * sizes["matmul_parameters"] * element + samples * kept * (answer * prompt + answer**2 / 2)
    return {"forward": forward, "read": read}


def table(options: argparse.Namespace, steps: list[Metrics], sizes: Metrics) -> list[str]:
    """One row a phase."""

    def median(name: str) -> float:
        return statistics.median(step[name] for step in steps)

    prompt, answer = median("prompt_length/mean"), options.response_tokens
    samples = options.prompts * options.answers
    todo, total = work(options, sizes, prompt), samples * (prompt + answer)
    device = get_device(options.device)
    bandwidth = options.bandwidth
    if not bandwidth and not device.is_cpu:
        name = torch.get_device_module(device.kind).get_device_name(0)
        bandwidth = next((value for key, value in BANDWIDTH.items() if key in name), None)
    rows = []
    for phase, tokens, flops in (
        ("generate_sequences", samples * answer, 0.0),
        ("old_log_prob", total, todo["forward"]),
        ("ref", total, todo["forward"]),
        ("update_actor", total, 3 * todo["forward"]),
        ("reshard", 0.0, 0.0),
        ("step", total, 0.0),
    ):
        took = median(f"timing_s/{phase}")
        share = (
            f"{100 * flops / took / sizes['peak_flops']:.1f} % of FLOP/s" if flops and sizes.get("peak_flops") else "-"
        )
        if phase == "generate_sequences" and bandwidth:
            share = f"{100 * todo['read'] / took / bandwidth:.1f} % of bandwidth"
        rows.append(f"| {phase} | {took:.3f} | {tokens / took:,.0f} | {share} |")
    memory = [name for name in steps[-1] if name.startswith("perf/") and "memory" in name]
    return rows + [f"| {name} | {steps[-1][name]:.2f} GiB | | |" for name in memory]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="0.5b", choices=SHAPES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--response-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2, help="measured steps, after one that warms up")
    parser.add_argument(
        "--bandwidth", type=float, help="peak memory bandwidth in bytes/s, where the device is not known"
    )
    parser.add_argument("--work", type=Path, default=Path("outputs/bench_gpu"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of the run")
    parser.add_argument("--out", default="gpu.md")
    options = parser.parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group(get_device(options.device).backend, store=dist.HashStore(), rank=0, world_size=1)
    steps, trainer = measure(options)
    device = get_device(options.device)
    name = "CPU" if device.is_cpu else torch.get_device_module(device.kind).get_device_name(0)
    extra = f" with {' '.join(options.set)}" if options.set else ""
    write(
        options.out,
        f"python -m bench.gpu --shape {options.shape}{extra}",
        f"{name}, {os.cpu_count()} host cores. Qwen2.5 of shape {options.shape}, random weights; {options.prompts} "
        f"prompts of {statistics.median(step['prompt_length/mean'] for step in steps):.0f} tokens x {options.answers} "
        f"answers of {options.response_tokens}; tokens: response tokens when generating, else prompt and response.",
        ["phase", "seconds", "tokens/s", "share of peak"],
        table(options, steps, trainer.model_sizes),
    )


if __name__ == "__main__":
    main()
