"""Does the quickstart's model learn faster from a larger one of its family than from rewards? One table.

    python -m bench.distill [--out outputs/distill] [--steps 30] [--seeds 2] [--jobs 2] [--only grpo,reverse_kl]
        [--lrs 1e-4,5e-4]

The teacher is made as the student is, by scripts/make_small_model.py, with twice the layers, with answers without slips
and until it is right. What is best for rewards may be slow for a teacher, so there are learning rates to choose
from. A run that is complete is not made again. Writes bench/results/distill_cpu.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.learning import COMMON, ROOT, A, call, curve, prepare
from rltrain.run.report.table import read_metrics

LOSS = "distillation.distillation_loss."
ALONE = ["distillation.enabled=True", f"{LOSS}use_task_rewards=False"]
EVERY, GOAL, SAMPLES = 5, 0.7, 32 * 8
WAYS = {
    "grpo": ["algorithm.adv_estimator=grpo"],
    "reverse_kl": [*ALONE, f"{LOSS}loss_mode=reverse_kl"],
    "forward_kl": [*ALONE, f"{LOSS}loss_mode=forward_kl"],
    "k1": [*ALONE, f"{LOSS}loss_mode=k1", f"{LOSS}use_policy_gradient=True"],
    "grpo + reverse_kl": ["algorithm.adv_estimator=grpo", "distillation.enabled=True", f"{LOSS}loss_mode=reverse_kl"],
}
NAMES = {
    "grpo": "rewards alone (grpo)",
    "reverse_kl": "teacher alone, reverse_kl",
    "forward_kl": "teacher alone, forward_kl",
    "k1": "teacher alone, k1 as a cost (verl's use_policy_gradient)",
    "grpo + reverse_kl": "grpo and reverse_kl",
}


def make_teacher(out: Path) -> Path:
    """A model of four layers that is right nine times in ten."""
    teacher = out / "teacher"
    if not (teacher / "config.json").exists():
        means = ["--layers", 4, "--slip-rate", 0, "--target-accuracy", 0.9, "--steps", 3000, "--seed", 2]
        call("scripts/make_small_model.py", "--output", teacher, "--train", out / "data/train.parquet", *means)
    return teacher


def train(run: Path, keys: list[str], way: str, lr: str, seed: int, steps: int) -> None:
    if (run / "done").exists():
        return
    settings = [f"data.seed={seed}", f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={run}"]
    common = [word for word in COMMON if not word.startswith(("trainer.test_freq=", f"{A}optim.lr="))]
    call(
        "-m",
        "rltrain.main_ppo",
        *common,
        f"trainer.test_freq={EVERY}",
        *keys,
        *WAYS[way],
        f"{A}optim.lr={lr}",
        *settings,
    )
    (run / "done").touch()


def row(way: str, lr: str, runs: list[Path], steps: int) -> str:
    # A run that was asked for more steps is the same up to here: the learning rate is constant.
    curves = [{step: value for step, value in curve(run).items() if step <= steps} for run in runs]
    reached = [next((step for step, value in each.items() if value >= GOAL), None) for each in curves]
    samples = ", ".join("not reached" if step is None else f"{step * SAMPLES:,}" for step in reached)
    lines = [line for run in runs for line in read_metrics(run) if "timing_s/step" in line and line["step"] <= steps]
    seconds = sum(line["timing_s/step"] for line in lines) / len(lines)
    half = ", ".join(f"{each[2 * EVERY]:.2f}" for each in curves)
    last = ", ".join(f"{list(each.values())[-1]:.2f}" for each in curves)
    return f"| {NAMES[way]} | {lr} | {curves[0][0]:.2f} | {half} | {last} | {samples} | {seconds:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("outputs/distill"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--lrs", default="1e-4,5e-4", help="learning rates of the student")
    options = parser.parse_args()
    out, ways = options.out.resolve(), options.only.split(",")
    os.environ["OMP_NUM_THREADS"] = "1"
    keys = prepare(out)
    teacher = make_teacher(out)
    accuracy = json.loads((teacher / "warm_up.json").read_text())["sampled"]
    cases, seeds = [(way, lr) for lr in options.lrs.split(",") for way in ways], range(1, options.seeds + 1)
    runs = {(way, lr): [out / f"{way.replace(' ', '')}_{lr}_{seed}" for seed in seeds] for way, lr in cases}
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = []
        for seed in seeds:
            for way, lr in cases:
                taught = [] if way == "grpo" else [f"distillation.teacher.model.path={teacher}"]
                run = runs[way, lr][seed - 1]
                jobs.append(pool.submit(train, run, [*keys, *taught], way, lr, seed, options.steps))
        for job in jobs:
            job.result()
    command = f"python -m bench.distill --steps {options.steps} --seeds {options.seeds} --jobs {options.jobs}"
    command += f" --lrs {options.lrs}" + ("" if ways == list(WAYS) else f" --only '{options.only}'")
    lines = [
        "# Distillation, CPU",
        "",
        f"`{command}`, {datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores. Task, student and step "
        "of scripts/quickstart.sh (32 prompts x 8 answers);",
        f"the teacher has twice the layers, and {accuracy:.2f} of its sampled answers are right. Held-out accuracy",
        f"(128 prompts, 4 sampled answers each) every {EVERY} steps, of each seed. Seconds a step with other jobs on "
        "the same cores: an upper bound.",
        "",
        f"| learnt from | learning rate | before | after {2 * EVERY} steps | after {options.steps} "
        f"| samples until {GOAL} | s/step |",
        "|---|---|---|---|---|---|---|",
        *(row(way, lr, of_seeds, options.steps) for (way, lr), of_seeds in runs.items()),
        "",
    ]
    (ROOT / "bench/results/distill_cpu.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
