"""Log-probs that begin while other devices still generate (`trainer.overlap`), on the long tail with two workers.

    python -m bench.overlap [--shape tiny] [--steps 6] [--rounds 3]

Each worker holds all weights (fsdp_size=1), has one torch thread and serves an engine of its own. Off and on take
turns, as processes of their own; both draw the same prompts and, but for rounding, the same answers. The first step of
a process warms up and is not counted. The first row is the default, weights spread over both workers, where there is
nothing to switch on. Writes bench/results/overlap_cpu.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.step import run_ours
from bench.table import write
from bench.workload import ANSWERS, LIMITS, PROMPTS, make
from rltrain.report import read_metrics

PHASES = ("gen", "old_log_prob", "ref", "update_actor", "step")
A = "actor_rollout_ref.actor."
SETTINGS = {
    "weights over both workers": [],
    "weights in each worker": [f"{A}fsdp_config.fsdp_size=1"],
    "weights in each worker, overlap": [f"{A}fsdp_config.fsdp_size=1", "trainer.overlap=True"],
}
Steps = list[dict[str, float]]


def run(folder: Path, keys: Sequence[str], options: argparse.Namespace) -> Steps:
    """The metrics of each step but the first."""
    options.set = ["trainer.n_gpus_per_node=2", f"{A}recompute_old_log_prob=always", *keys]
    run_ours(folder, "long_tail", LIMITS["long_tail"], options)
    return [line for line in read_metrics(folder / "run") if "timing_s/step" in line][1:]


def row(name: str, steps: Steps) -> str:
    """Of each step the round in which its log-probs were there soonest, as that was disturbed least; means of these."""
    for one in steps:
        one["until"] = sum(one[f"timing_s/{phase}"] for phase in PHASES[:3])
    best = [min((one for one in steps if one["step"] == step), key=lambda one: one["until"]) for step in numbers(steps)]

    def mean(key: str) -> float:
        return statistics.mean(one.get(key, 0.0) for one in best)

    timed = [*(f"timing_s/{phase}" for phase in PHASES[:3]), "until", *(f"timing_s/{phase}" for phase in PHASES[3:])]
    shares = [f"{mean(key):.1%}" for key in ("perf/rollout_idle_share", "perf/overlap_share")]
    return f"| {name} | {' | '.join([*(f'{mean(key):.2f}' for key in timed), *shares])} |"


def numbers(steps: Steps) -> list[float]:
    return sorted({one["step"] for one in steps})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("outputs/bench_overlap"))
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--note", default="")
    parser.add_argument("--out", default="overlap_cpu.md")
    options = parser.parse_args(argv)
    folder = options.work.absolute()
    make(folder, "long_tail", options.shape, options.steps + 1)
    measured: dict[str, Steps] = {}
    for _ in range(options.rounds):
        for name, keys in SETTINGS.items():
            measured.setdefault(name, []).extend(run(folder, keys, options))
    titles = [*PHASES[:3], "until log-probs are there", *PHASES[3:], "engines idle", "log-probs made meanwhile"]
    write(
        options.out,
        f"python -m bench.overlap --shape {options.shape} --steps {options.steps} --rounds {options.rounds}",
        f"GRPO, {PROMPTS} prompts x {ANSWERS} answers with a long tail, two workers of one thread, KL in the loss, "
        "old log-probs of every sample. Seconds: of each step those of the round in which log-probs were there "
        "soonest; means over steps.",
        ["setting", *titles],
        [row(name, steps) for name, steps in measured.items()],
        options.note,
    )


if __name__ == "__main__":
    main()
