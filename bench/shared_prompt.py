"""Responses with a shared prompt against responses with separate prompts: same model, samples, process, one thread.

    python -m bench.shared_prompt            prints the table and writes it to bench/results/

Both ways are packed and run in turns. The seconds are CPU seconds of the process, which other work on the machine
disturbs less than wall-clock time; the minimum of the repeats counts.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.table import parse, table, write
from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.common.device import get_device
from rltrain.models.attention.packing import pack
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec

CPU = torch.device("cpu")
# (prompt, responses, tokens per response)
CASES = [(512, 8, 128), (64, 8, 128), (512, 8, 512)]
# hidden size, layers, heads, vocabulary
MODELS = {"3 M parameters": (256, 4, 4, 1024), "29 M parameters": (512, 8, 8, 4096)}


def make_policy(folder: Path, hidden: int, layers: int, heads: int, vocabulary: int) -> PolicyModel:
    """Return a random Qwen3."""
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        vocab_size=vocabulary, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
        tie_word_embeddings=True, eos_token_id=1, bos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return sharded_model(PolicyModel, ModelSpec(str(folder)), get_device("cpu"))


def group(prompt: int, num_answers: int, answer: int) -> Batch:
    """Return one prompt with its responses."""
    head = torch.randint(2, 1000, (prompt,), dtype=torch.int32)
    answers = Ragged.from_rows([torch.randint(2, 1000, (answer,), dtype=torch.int32) for _ in range(num_answers)])
    mask = answers.like(torch.ones(len(answers.values), dtype=torch.bool))
    prompts = DictionaryColumn(Ragged.from_rows([head]), torch.zeros(num_answers, dtype=torch.long))
    return Batch({"prompt": prompts, "response": answers, "response_mask": mask})


def in_turns(first: Callable[[], None], second: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Return the CPU seconds of each: the minimum of the repeats, after a warm-up run."""
    times: list[list[float]] = [[], []]
    for _ in range(repeats + 1):
        for action, seconds in zip((first, second), times, strict=True):
            started = time.process_time()
            action()
            seconds.append(time.process_time() - started)
    return min(times[0][1:]), min(times[1][1:])


def rows_of(name: str, policy: PolicyModel, cases: list[tuple[int, int, int]], repeats: int) -> list[str]:
    """Return the table rows of one model."""
    rows = []
    for case in cases:
        batch = group(*case)

        def work(share: bool, backward: bool, batch: Batch = batch) -> None:
            with torch.set_grad_enabled(backward):
                log_probs, *_ = policy(pack(batch, CPU, share=share), 1.0, True)
                if backward:
                    log_probs.sum().backward()
                    policy.zero_grad()

        for label, backward in (("log-prob pass", False), ("update (forward + backward)", True)):
            alone, shared = in_turns(lambda b=backward: work(False, b), lambda b=backward: work(True, b), repeats)
            prompt, num_answers, answer = case
            shape = f"{prompt} + {num_answers} x {answer}"
            rows.append(f"| {name} | {shape} | {label} | {alone:.2f} | {shared:.2f} | {alone / shared:.2f} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.set_defaults(cases=CASES, models=MODELS, repeats=3)
    options = parse(
        parser, out="shared_prompt_cpu.md", work="outputs/bench_shared_prompt", cases=[(16, 2, 8)],
        models={"tiny": (128, 1, 2, 1024)}, repeats=1,
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = [
        row
        for name, sizes in options.models.items()
        for row in rows_of(name, make_policy(options.work, *sizes), options.cases, options.repeats)
    ]
    write(
        options,
        "Qwen3 with random weights, fp32, one thread, with entropy; CPU seconds, least of "
        f"{options.repeats}, both ways in turns.",
        table(["model", "prompt + answers", "work", "packed, s", "prompt shared, s", "times as fast"], rows),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
