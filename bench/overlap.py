"""Log-probs that begin while other devices still generate (`trainer.overlap`), on the long tail with two workers.

    python -m bench.overlap [--shape tiny] [--steps 4] [--rounds 5]

Each worker holds all weights (fsdp_size=1), has one torch thread and serves an engine of its own. A round is one
process off and one on, right after each other, in turns first; both have the same seeds, so they draw the same prompts
and, but for rounding, the same answers. What is compared is on and off of a round. The first step of a process warms up
and is not counted. The first row is the default, weights spread over both workers, where there is nothing to switch on.
Writes bench/results/overlap_cpu.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.step import run_ours
from bench.table import write
from bench.workload import ANSWERS, LIMITS, PROMPTS, make
from rltrain.run.report.table import read_metrics

PHASES = ("gen", "old_log_prob", "ref", "update_actor", "step")
A = "actor_rollout_ref.actor."
OFF, ON = "weights in each worker", "weights in each worker, overlap"
SETTINGS = {
    "weights over both workers": [],
    OFF: [f"{A}fsdp_config.fsdp_size=1"],
    ON: [f"{A}fsdp_config.fsdp_size=1", "trainer.overlap=True"],
}
UNTIL = "until log-probs are there"
TIMED = (*PHASES[:3], UNTIL, *PHASES[3:])
SHARES = {"perf/rollout_idle_share": "engines idle", "perf/overlap_share": "log-probs made meanwhile"}
Steps = list[dict[str, float]]


def run(folder: Path, keys: Sequence[str], options: argparse.Namespace) -> Steps:
    """The metrics of each step but the first."""
    options.set = ["trainer.n_gpus_per_node=2", f"{A}recompute_old_log_prob=always", *keys]
    run_ours(folder, "long_tail", LIMITS["long_tail"], options)
    return [line for line in read_metrics(folder / "run") if "timing_s/step" in line][1:]


def means(steps: Steps) -> dict[str, float]:
    """Of one process: seconds of a step by phase, until its log-probs are there, and the shares."""
    numbers = {phase: statistics.mean(step[f"timing_s/{phase}"] for step in steps) for phase in PHASES}
    numbers[UNTIL] = sum(numbers[phase] for phase in PHASES[:3])
    return numbers | {key: statistics.mean(step.get(key, 0.0) for step in steps) for key in SHARES}


def rows(rounds: Sequence[dict[str, Steps]]) -> list[str]:
    """Medians over rounds of each setting; then, round by round, on divided by off: median and range."""
    measured = [{name: means(steps) for name, steps in one_round.items()} for one_round in rounds]
    lines = []
    for name in SETTINGS:
        middle = {key: statistics.median(one_round[name][key] for one_round in measured) for key in measured[0][name]}
        cells = [*(f"{middle[key]:.2f}" for key in TIMED), *(f"{middle[key]:.1%}" for key in SHARES)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    ratios = {key: [one_round[ON][key] / one_round[OFF][key] for one_round in measured] for key in TIMED}
    spread = [f"{statistics.median(of):.2f} ({min(of):.2f} to {max(of):.2f})" for of in ratios.values()]
    return [*lines, f"| overlap : none, in pairs | {' | '.join([*spread, *['-'] * len(SHARES)])} |"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("outputs/bench_overlap"))
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="overlap_cpu.md")
    options = parser.parse_args(argv)
    folder = options.work.absolute()
    make(folder, "long_tail", options.shape, options.steps + 1)
    rounds = []
    for number in range(options.rounds):
        # What else runs on the machine comes and goes: neither is always the later one.
        names = list(SETTINGS)[:: -1 if number % 2 else 1]
        rounds.append({name: run(folder, SETTINGS[name], options) for name in names})
    write(
        options.out,
        " ".join(["python -m bench.overlap", *(sys.argv[1:] if argv is None else argv)]),
        f"GRPO, {PROMPTS} prompts x {ANSWERS} answers with a long tail, two workers of one thread, KL in the loss, "
        f"old log-probs of every sample. Seconds a step, mean of {options.steps} steps of a process; medians of "
        f"{options.rounds} rounds. Last row: on divided by off of the same round, median and range of the rounds.",
        ["setting", *TIMED, *SHARES.values()],
        rows(rounds),
        "One worker computes at most the half of the log-probs that are of its own answers. How long engines idle "
        "depends on what else runs, which lets one worker run ahead: compare the idle shares of off and on first.",
    )


if __name__ == "__main__":
    main()
