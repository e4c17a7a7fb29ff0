"""What saving costs a step: one that follows a save in the background, one that waits for it, and one without any.

    OMP_NUM_THREADS=1 python -m bench.save [--hidden 768] [--layers 8] [--rounds 7]

The three take turns in one run, so that all see the same machine. A save in the background costs the time until the
step begins (the copy to the host) and what the step is slowed down by; one that waits costs the time that it takes.
One thread computes, as on a host of accelerators: with all cores computing, a save in the background has to take the
processor from the step. Writes bench/results/save_cpu.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.table import write
from rltrain.config.load import load_config
from rltrain.trainer.build import build
from rltrain.trainer.run import Trainer
from tests.tiny import save_tiny_tokenizer, small_run, write_arithmetic

WAYS = ("no save", "waits", "in the background")


def make_model(folder: Path, hidden: int, layers: int) -> Path:
    """A random Qwen3 over the tests' tokenizer."""
    folder.mkdir()
    save_tiny_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=64, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, head_dim=64, tie_word_embeddings=True,
        eos_token_id=1, pad_token_id=0, bos_token_id=None, initializer_range=0.02,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def turn(trainer: Trainer, way: str) -> dict[str, float]:
    """Seconds of a save and of the step behind it."""
    saver, ppo = trainer._saver, trainer.ppo
    assert saver
    trainer.config.trainer.async_save = way == WAYS[2]
    started = time.perf_counter()
    if way != WAYS[0]:
        saver.save(trainer.num_steps, ppo.progress)
    saved = time.perf_counter()
    trainer.step()
    stepped = time.perf_counter()
    under_way = saver._pending is not None
    saver.finish()
    return {
        "save": saved - started,
        "step": stepped - saved,
        "both": stepped - started,
        "after": time.perf_counter() - stepped if under_way else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--name", default="save_cpu.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = make_model(folder / "model", options.hidden, options.layers)
        files = [write_arithmetic(folder / f"{each}.parquet", range(24)) for each in ("train", "test")]
        changes = {"trainer__total_training_steps": 10_000, "trainer__max_actor_ckpt_to_keep": 1}
        args = small_run(model, (files[0], files[1]), folder / "run", **changes)
        with build(load_config([*args, "trainer.val_before_train=False"])) as trainer:
            for way in (*WAYS, *WAYS):  # the first of each has memory and files to make
                turn(trainer, way)
            rounds = [{way: turn(trainer, way) for way in WAYS} for _ in range(options.rounds)]
            newest = max((folder / "run").glob("global_step_*"), key=lambda each: int(each.name.rpartition("_")[2]))
            size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    titles = ["a step", "save s", "step s", "both s", "still writing when it ends s"]
    rows = []
    for way in WAYS:
        cells = [statistics.median(each[way][name] for each in rounds) for name in ("save", "step", "both", "after")]
        rows.append(f"| {way} | {' | '.join(f'{cell:.3f}' for cell in cells)} |")
    costs = [each[WAYS[2]]["both"] - each[WAYS[0]]["both"] for each in rounds]
    waits = statistics.median(each["waits"]["save"] for each in rounds)
    cost = statistics.median(costs)
    write(
        options.name,
        " ".join(
            ["OMP_NUM_THREADS=1 python -m bench.save", *(f"--{name} {each}" for name, each in vars(options).items())]
        ),
        f"Medians of {options.rounds} rounds, a checkpoint of {size / 2**20:.0f} MiB; 1 worker on the CPU.",
        titles,
        rows,
        f"In the background a save costs a step {cost:.3f} s (median of the rounds' differences; "
        f"{min(costs):.3f} to {max(costs):.3f}), which is {100 * cost / waits:.1f} % of the {waits:.2f} s that it "
        "takes when the step waits.",
    )


if __name__ == "__main__":
    main()
