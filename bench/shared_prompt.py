"""Answers that share their prompt against answers that bring it along: same model, samples, process, one thread.

    python -m bench.shared_prompt            prints the table and writes it to bench/results/

Both ways are packed and run in turns. The seconds are CPU seconds of the process, which other work on the machine
disturbs less than the wall clock; the least of the repeats counts.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import platform
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from rltrain.base.columns.batch import Batch, DictionaryColumn
from rltrain.base.columns.ragged import Ragged
from rltrain.base.device import get_device
from rltrain.models.attention.packing import pack
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec

REPEATS = 3
CPU = torch.device("cpu")
# (prompt, answers, tokens of an answer)
CASES = [(512, 8, 128), (64, 8, 128), (512, 8, 512)]
# hidden size, layers, heads, vocabulary
MODELS = {"3 M parameters": (256, 4, 4, 1024), "29 M parameters": (512, 8, 8, 4096)}


def make_policy(hidden: int, layers: int, heads: int, vocabulary: int) -> PolicyModel:
    """A random Qwen3."""
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        vocab_size=vocabulary, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
        tie_word_embeddings=True, eos_token_id=1, bos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    folder = Path("outputs/bench_shared_prompt")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return sharded_model(PolicyModel, ModelSpec(str(folder)), get_device("cpu"))


def group(prompt: int, num_answers: int, answer: int) -> Batch:
    """One prompt with its answers."""
    head = torch.randint(2, 1000, (prompt,), dtype=torch.int32)
    answers = Ragged.from_rows([torch.randint(2, 1000, (answer,), dtype=torch.int32) for _ in range(num_answers)])
    mask = answers.like(torch.ones(len(answers.values), dtype=torch.bool))
    prompts = DictionaryColumn(Ragged.from_rows([head]), torch.zeros(num_answers, dtype=torch.long))
    return Batch({"prompt": prompts, "response": answers, "response_mask": mask})


def in_turns(first: Callable[[], None], second: Callable[[], None]) -> tuple[float, float]:
    """CPU seconds of each: the least of the repeats, after a warm run."""
    times: list[list[float]] = [[], []]
    for _ in range(REPEATS + 1):
        for action, seconds in zip((first, second), times, strict=True):
            started = time.process_time()
            action()
            seconds.append(time.process_time() - started)
    return min(times[0][1:]), min(times[1][1:])


def rows_of(name: str, policy: PolicyModel) -> list[str]:
    """Table rows of one model."""
    rows = []
    for case in CASES:
        batch = group(*case)

        def work(share: bool, backward: bool, batch: Batch = batch) -> None:
            with torch.set_grad_enabled(backward):
                log_probs, *_ = policy(pack(batch, CPU, share=share), 1.0, True)
                if backward:
                    log_probs.sum().backward()
                    policy.zero_grad()

        for label, backward in (("log-prob pass", False), ("update (forward + backward)", True)):
            alone, shared = in_turns(lambda b=backward: work(False, b), lambda b=backward: work(True, b))
            prompt, num_answers, answer = case
            shape = f"{prompt} + {num_answers} x {answer}"
            rows.append(f"| {name} | {shape} | {label} | {alone:.2f} | {shared:.2f} | {alone / shared:.2f} |")
    return rows


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = [row for name, sizes in MODELS.items() for row in rows_of(name, make_policy(*sizes))]
    load = os.getloadavg()[0]
    lines = [
        f"`python -m bench.shared_prompt`, {date.today()}, {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores (load {load:.0f}), one thread, torch {torch.__version__}",
        "",
        f"Qwen3 with random weights, fp32, entropy too; CPU seconds, least of {REPEATS}, both ways in turns.",
        "",
        "| model | prompt + answers | work | packed, s | prompt shared, s | times as fast |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    text = "\n".join(lines) + "\n"
    (Path(__file__).parent / "results" / "shared_prompt_cpu.md").write_text(text)
    sys.stdout.write(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
