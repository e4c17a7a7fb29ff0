"""Each phase of a step against a lower bound in plain torch (bench/floor.py), packed and with shared prompts.

Also compares the trainer's passes over long-tailed lengths with equal ones, per token: with the equal lengths of the
floor, and with as many responses of equal length and the same number of tokens, so that only the lengths differ.

    python -m bench.phases [--dtype bfloat16] [--shape tiny] [--steps 3] [--rounds 2]

rltrain's side is a real run (`python -m rltrain.main_ppo`, phases as in its metrics); the floor is a process with the
same environment and one thread. 32 prompts x 8 responses x 128 tokens, two optimizer steps, KL in the loss. Writes
bench/results/phases_cpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.step import Steps, Work, run_ours
from bench.table import ROOT, parse, table, write
from bench.workload import ANSWERS, LIMITS, PROMPTS, make
from rltrain.common.env import worker_environment

PHASES = ("generate_sequences", "old_log_prob", "ref", "update_actor")
PASSES = ("old_log_prob", "ref", "update_actor")
# Half of the old log-probs come from the update itself (actor.recompute_old_log_prob=auto), here as in the run.
OLD_LOG_PROB_SHARE = 0.5
MICRO_GROUPS, MINI_BATCHES = 4, 2


def floors(folder: Path, dtype: str, limit: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return the seconds of each phase, packed and shared. Runs in this process."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    from bench.floor import Floor, Group
    from bench.workload import prompts

    torch.set_num_threads(1)
    torch.manual_seed(0)
    floor = Floor(Qwen3ForCausalLM.from_pretrained(folder / "model"), getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    chats = [[{"role": "user", "content": text}] for text in prompts(PROMPTS)]
    ids = torch.tensor(tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False))
    optimizer = torch.optim.AdamW(floor.weights.values(), lr=1e-6, weight_decay=0.01)
    results: dict[str, Any] = {}

    def generate() -> None:
        results["batch"] = Group(ids, floor.generate(ids, ANSWERS, limit)[0])

    @torch.no_grad()
    def score(shared: bool) -> None:
        parts = [
            floor.log_probs(results["batch"][at : at + MICRO_GROUPS], shared) for at in range(0, PROMPTS, MICRO_GROUPS)
        ]
        results["reference"] = torch.cat(parts)

    def update(shared: bool) -> None:
        floor.update(results["batch"], results["reference"], optimizer, shared, MICRO_GROUPS, MINI_BATCHES)

    seconds_of = {}
    generating = seconds(generate, repeats)
    for name, shared in (("packed", False), ("prompt shared", True)):
        scoring = seconds(lambda shared=shared: score(shared), repeats)
        updating = seconds(lambda shared=shared: update(shared), repeats)
        seconds_of[name] = dict(zip(PHASES, (generating, OLD_LOG_PROB_SHARE * scoring, scoring, updating), strict=True))
    return seconds_of


def seconds(action: Callable[[], object], repeats: int) -> float:
    """Return the median wall-clock seconds after a warm-up run."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def run_floors(folder: Path, options: argparse.Namespace, limit: int) -> dict[str, dict[str, float]]:
    """Run `floors` in a process with the environment of rltrain's workers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | worker_environment("cpu", 1)
    command = [
        sys.executable,
        "-m",
        "bench.phases",
        "--floor",
        json.dumps([str(folder), options.dtype, limit, options.steps]),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the floor failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def lengths_table(equal: dict[int, Steps], long_tail: Steps) -> str:
    """Return microseconds per computed token of each pass for each equal length, and long_tail's as ratios of them."""
    mean = statistics.mean(step["response_length"] for step in long_tail)
    titles = [title for length in equal for title in (f"all of {length} tokens, us/token", "ratio")]
    rows = []
    for name in PASSES:
        share = OLD_LOG_PROB_SHARE if name == "old_log_prob" else 1.0
        tail, *of_equal = (
            1e6 * statistics.median(step[name] / (share * step["tokens"]) for step in steps)
            for steps in (long_tail, *equal.values())
        )
        cells = [f"{microseconds:.1f} | {tail / microseconds:.2f}" for microseconds in of_equal]
        rows.append(f"| {name} | {tail:.1f} | {' | '.join(cells)} |")
    return table(["pass, lengths that vary", f"long tail, {mean:.0f} tokens on average, us/token", *titles], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--floor", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--limit", type=int, default=LIMITS["equal"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of rltrain")
    smoke = {"shape": "test", "dtype": "float32", "limit": 4, "limit_of_tail": 4, "steps": 1, "rounds": 1}
    parser.set_defaults(limit_of_tail=LIMITS["long_tail"])
    options = parse(parser, argv, out="phases_cpu.md", work="outputs/bench_phases", **smoke)
    if options.floor:
        folder, dtype, limit, repeats = options.floor
        sys.stdout.write(json.dumps(floors(Path(folder), dtype, limit, repeats)) + "\n")
        return
    folder, tail_folder = options.work, options.work / "long_tail"
    for kind, place in (("equal", folder), ("long_tail", tail_folder)):
        make(place, kind, options.shape, options.steps + 1)
    equal: dict[int, Steps] = {}
    long_tail: Steps = []
    bare: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        long_tail += run_ours(Work(tail_folder, options.limit_of_tail), options)[1:]
        mean = statistics.mean(step["response_length"] for step in long_tail)
        # The second length is fixed by the first round, so that later rounds add to it.
        for limit in equal or dict.fromkeys((options.limit, round(mean))):
            equal.setdefault(limit, []).extend(run_ours(Work(folder, limit), options)[1:])
        for name, floor in run_floors(folder, options, options.limit).items():
            bare.setdefault(name, []).append(floor)
    rows = []
    steps = equal[options.limit]
    for phase in PHASES:
        middle = statistics.median(step[phase] for step in steps)
        cells = [f"{middle:.3f}"]
        for floor in bare.values():
            least = statistics.median(step[phase] for step in floor)
            cells += [f"{least:.3f}", f"{middle / least:.2f}"]
        rows.append(f"| {phase} | {' | '.join(cells)} |")
    titles = [title for name in bare for title in (f"floor, {name}, s", "ours is times that")]
    write(
        options,
        f"{PROMPTS} prompts x {ANSWERS} answers x {options.limit} tokens, Qwen3 of shape {options.shape}, "
        f"{options.dtype}, one thread; medians. The floor shares prompts when generating in both columns; "
        "update: forward, backward, clip and AdamW of two optimizer steps.",
        table(["phase", "rltrain, s", *titles], rows),
        lengths_table(equal, long_tail),
    )


if __name__ == "__main__":
    main()
