"""Cost of saving for a step: a blocking save, a save in the background during the step, and none.

    OMP_NUM_THREADS=1 python -m bench.save [--hidden 768] [--layers 8] [--rounds 8] [--mib-per-s 100] [--steps 3]

They take turns in one run, so that all see the same machine: in each round once in one order and once in the reverse
order, so that a machine that slows down or speeds up within a round favours none. The remaining noise is rare large
differences, which dominate a mean of few rounds. So the table also has the mean of the middle 60 %. A save in the
background costs the time until the step begins (the copy to the host) and the slow-down of the step; a blocking save
costs its whole time.

One thread computes, as on a host of accelerators: with all cores computing, a save in the background takes the
processor from the step. The machine's limit is a step during which another process only digests and writes as many
bytes. Writes bench/results/save_cpu.md.

The processes keep the memory that they have allocated. On a host of accelerators gradients are on a device. Here,
depending on the memory that malloc had returned before, new pages for them took from none to 0.4 s of a step
(/proc/PID/task/*/stat): more than a save costs.

--steps: number of steps during each save, enough for the save to finish; the column at the right shows whether it did.

--mib-per-s: the run folder is on storage of this speed, like shared storage, and the table is save_slow_disk_cpu.md.
That storage is created for the benchmark (a file on a loop device, with the kernel's limit for it), so it needs root
and the blkio controller of the first version of control groups.
"""

from __future__ import annotations

import argparse
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.table import parse, table, write
from rltrain.config.load import load_config
from rltrain.run.build import build
from rltrain.run.fit import Trainer
from tests.slow_disk import slow_disk
from tests.tiny import save_tiny_tokenizer, small_run, write_arithmetic

_KEEPS_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 34), "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_ARENA_MAX": "1"
}  # for glibc, whose arenas of threads would give back memory all the same  # fmt: skip
WAYS = ("no save", "waits", "in the background", "another process writes")
# The cost of saving is the small difference of these two ways, so the others run only in every fourth round.
PAIR = (WAYS[0], WAYS[2])
_OTHER = """
import os, sys, xxhash
folder, count = sys.argv[1], int(sys.argv[2])
data = os.urandom(1 << 24)
for line in sys.stdin:
    digest = xxhash.xxh3_128()
    with open(os.path.join(folder, "other"), "wb") as file:
        for _ in range(count):
            file.write(data)
            digest.update(data)
        os.fsync(file.fileno())
    os.unlink(file.name)
    print("done", flush=True)
"""


def make_model(folder: Path, hidden: int, layers: int) -> Path:
    """Create a random Qwen3 with the tests' tokenizer."""
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


@contextmanager
def other_writer(folder: Path, size: int) -> Iterator[subprocess.Popen[str]]:
    """Start a process that digests and writes ``size`` bytes for every line of input."""
    command = [sys.executable, "-c", _OTHER, str(folder), str(round(size / 2**24))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        yield process
        process.stdin.close()  # type: ignore[union-attr]


def turn(trainer: Trainer, way: str, other: subprocess.Popen[str], steps: int) -> dict[str, float]:
    """Return the seconds of a save and of the steps after it."""
    saver, ppo = trainer._saver, trainer.ppo
    assert saver
    assert other.stdin
    assert other.stdout
    trainer.config.trainer.async_save = way == WAYS[2]
    started = time.perf_counter()
    if way in WAYS[1:3]:
        saver.save(trainer.num_steps, ppo.progress)
    elif way == WAYS[3]:
        other.stdin.write("go\n")
    saved = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    stepped = time.perf_counter()
    under_way = saver._pending is not None
    saver.finish()
    if way == WAYS[3]:
        under_way = not select.select([other.stdout], [], [], 0)[0]
        other.stdout.readline()
    return {
        "save": saved - started,
        "steps": stepped - saved,
        "both": stepped - started,
        "after": time.perf_counter() - stepped if under_way else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--mib-per-s", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1)
    smoke = {"hidden": 64, "layers": 1, "rounds": 1, "mib_per_s": 0, "steps": 1}
    options = parse(parser, out="save_cpu.md", **smoke)
    os.environ |= _KEEPS_MEMORY  # workers inherit these variables at their start
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", options.hidden, options.layers)
        size = sum(parameter.nbytes for parameter in AutoModelForCausalLM.from_pretrained(model).parameters()) * 4
        with storage(Path(scratch), options.mib_per_s, size) as folder:
            measure(options, Path(scratch), model, folder, size)


@contextmanager
def storage(made: Path, mib_per_s: int, size: int) -> Iterator[Path]:
    """Yield ``made``, or a folder on storage of that speed, with space for checkpoints of ``size`` bytes."""
    if not mib_per_s:
        yield made
        return
    with ExitStack() as stack:
        try:
            # The newest checkpoint, the one before it, the next one, and the other process's files.
            disk = stack.enter_context(slow_disk(made, 256 + 5 * (size >> 20)))
            disk.limit(mib_per_s << 20)
        except OSError as error:
            sys.exit(f"--mib-per-s needs root, loop devices and the blkio controller: {error}")
        yield disk.path


def measure(options: argparse.Namespace, made: Path, model: Path, folder: Path, size: int) -> None:
    """Run the rounds with the run in ``folder``, and write the table. size: about that of a checkpoint, in bytes."""
    files = [write_arithmetic(made / f"{split}.parquet", range(24)) for split in ("train", "test")]
    changes = {"trainer__total_training_steps": 10_000, "trainer__max_actor_ckpt_to_keep": 1}
    args = small_run(model, (files[0], files[1]), folder / "run", **changes)
    with build(load_config([*args, "trainer.val_before_train=False"])) as trainer:
        with other_writer(folder, size) as writer:
            for way in WAYS * 3:  # the first turn of each allocates memory and creates files
                turn(trainer, way, writer, options.steps)
            rounds = []
            for number in range(options.rounds):
                ways = (WAYS if number % 4 == 0 else PAIR)[:: 1 if number % 2 else -1]
                turns = [(way, turn(trainer, way, writer, options.steps)) for way in (*ways, *ways[::-1])]
                rounds.append({way: mean_of([seconds for its, seconds in turns if its == way]) for way in ways})
        newest = max((folder / "run").glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
        size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    made_beside = "the step" if options.steps == 1 else f"{options.steps} steps"
    titles = ["way", "save s", f"{made_beside} s", "both s", "still written afterwards s"]
    rows = []
    for way in WAYS:
        of_way = [one_round[way] for one_round in rounds if way in one_round]
        cells = [statistics.median(seconds[name] for seconds in of_way) for name in ("save", "steps", "both", "after")]
        rows.append(f"| {way} | {' | '.join(f'{cell:.3f}' for cell in cells)} |")
    waits = statistics.median(one_round["waits"]["save"] for one_round in rounds if "waits" in one_round)
    took = f"a save that is waited for writes {size / 2**20 / waits:.0f} MiB/s"
    disk = f"storage of {options.mib_per_s} MiB/s ({took})" if options.mib_per_s else "its own disk"
    write(
        options,
        f"Medians of {options.rounds} rounds of two turns each, in every fourth of which all take part; a checkpoint "
        f"of {size / 2**20:.0f} MiB; 1 worker on the CPU, {disk}.",
        table(titles, rows),
        f"Of the {waits:.2f} s that a save takes when the step waits, {cost(rounds, WAYS[2], waits)} is left in the "
        f"background; another process that writes as much costs {made_beside} {cost(rounds, WAYS[3], waits)}.\n\n"
        f"The rounds' differences in the background, s: "
        f"{' '.join(f'{seconds:.2f}' for seconds in differences(rounds, WAYS[2]))}",
    )


def mean_of(turns: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.mean(one_turn[name] for one_turn in turns) for name in turns[0]}


def differences(rounds: list[dict[str, dict[str, float]]], way: str) -> list[float]:
    """Return the seconds by which ``way`` takes longer than no save, for each round that has it."""
    return [one_round[way]["both"] - one_round[WAYS[0]]["both"] for one_round in rounds if way in one_round]


def cost(rounds: list[dict[str, dict[str, float]]], way: str, waits: float) -> str:
    """Return the cost of ``way``: the mean of its rounds' differences and that of their middle 60 %.

    Each has its standard error (of the second by Tukey and McLaughlin, from the deviation of the winsorized
    differences).
    """
    seconds = sorted(differences(rounds, way))
    cut = len(seconds) // 5
    middle = seconds[cut : len(seconds) - cut]
    winsorized = [min(max(second, middle[0]), middle[-1]) for second in seconds]
    root = len(seconds) ** 0.5
    cells = [
        (statistics.mean(seconds), deviation(seconds) / root),
        (statistics.mean(middle), deviation(winsorized) / root * len(seconds) / len(middle)),
    ]
    mean, trimmed = (
        f"{100 * it / waits:.1f} % (standard error {100 * err / waits:.1f}, {it:.3f} s)" for it, err in cells
    )
    return f"{mean}, of the middle 60 % of the rounds {trimmed}"


def deviation(numbers: list[float]) -> float:
    """Return the standard deviation; NaN for a single number."""
    return statistics.stdev(numbers) if len(numbers) > 1 else math.nan


if __name__ == "__main__":
    main()
