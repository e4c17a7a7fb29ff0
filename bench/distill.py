"""Does the quickstart's model learn faster from a larger one of its family than from rewards? One table.

    python -m bench.distill [--out outputs/distill] [--samples 5120] [--seeds 2] [--jobs 2] [--only grpo,reverse_kl]

The teacher is made as the student is, by scripts/make_small_model.py, with twice the layers, with answers without slips
and until it is right. Every way gets as many answers; a teacher alone needs one to a prompt, and so makes more steps of
them. A run that is complete is not made again. Writes bench/results/distill_cpu.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.learning import COMMON, ROOT, A, R, call, curve, prepare
from rltrain.run.report.table import read_metrics

LOSS = "distillation.distillation_loss."
ALONE = ["distillation.enabled=True", f"{LOSS}use_task_rewards=False", f"{R}n=1"]
BATCH = "data.train_batch_size="
EVERY, GOAL = 1280, 0.7  # answers between two validations
WAYS = {
    "grpo": ["algorithm.adv_estimator=grpo", f"{R}n=8"],
    # Steps of as few answers as a teacher's alone.
    "grpo_small": ["algorithm.adv_estimator=grpo", f"{R}n=8", f"{BATCH}4", f"{A}ppo_mini_batch_size=2"],
    "reverse_kl": [*ALONE, f"{LOSS}loss_mode=reverse_kl"],
    "forward_kl": [*ALONE, f"{LOSS}loss_mode=forward_kl"],
    "k1": [*ALONE, f"{LOSS}loss_mode=k1", f"{LOSS}use_policy_gradient=True"],
    "reverse_kl_8": [*ALONE[:2], f"{R}n=8", f"{LOSS}loss_mode=reverse_kl"],
    "grpo+reverse_kl": [
        "algorithm.adv_estimator=grpo", f"{R}n=8", "distillation.enabled=True", f"{LOSS}loss_mode=reverse_kl"
    ],
}  # fmt: skip
NAMES = {
    "grpo": "rewards alone (grpo)",
    "grpo_small": "rewards alone (grpo)",
    "reverse_kl": "teacher alone, reverse_kl",
    "forward_kl": "teacher alone, forward_kl",
    "k1": "teacher alone, k1 as a cost (verl's use_policy_gradient)",
    "reverse_kl_8": "teacher alone, reverse_kl",
    "grpo+reverse_kl": "grpo and reverse_kl",
}


def make_teacher(out: Path) -> Path:
    """A model of four layers that is right nine times in ten."""
    teacher = out / "teacher"
    if not (teacher / "config.json").exists():
        means = ["--layers", 4, "--slip-rate", 0, "--target-accuracy", 0.9, "--steps", 3000, "--seed", 2]
        call("scripts/make_small_model.py", "--output", teacher, "--train", out / "data/train.parquet", *means)
    return teacher


def sizes(way: str) -> tuple[int, int]:
    """(prompts of a step, answers to a prompt)."""
    words = [f"{BATCH}32", *WAYS[way]]
    prompts, answers = ([int(w.partition("=")[2]) for w in words if w.startswith(key)] for key in (BATCH, f"{R}n="))
    return prompts[-1], answers[-1]


def train(run: Path, keys: list[str], way: str, seed: int, samples: int) -> None:
    if (run / "done").exists():
        return
    of_step = math.prod(sizes(way))
    settings = [f"data.seed={seed}", f"trainer.total_training_steps={samples // of_step}"]
    settings += [f"trainer.default_local_dir={run}", f"trainer.test_freq={EVERY // of_step}"]
    own = {word.partition("=")[0] for word in WAYS[way]} | {"trainer.test_freq"}
    common = [word for word in COMMON if word.partition("=")[0] not in own]
    call("-m", "rltrain.main_ppo", *common, *keys, *WAYS[way], *settings)
    (run / "done").touch()


def row(way: str, runs: list[Path], samples: int) -> str:
    prompts, answers = sizes(way)
    of_step = prompts * answers
    # A run that was asked for more is the same up to here: the learning rate is constant.
    curves = [
        {step * of_step: value for step, value in curve(run).items() if step * of_step <= samples} for run in runs
    ]
    reached = [next((number for number, value in each.items() if value >= GOAL), None) for each in curves]
    goals = ", ".join("not reached" if number is None else f"{number:,}" for number in reached)
    lines = [line for run in runs for line in read_metrics(run) if "timing_s/step" in line]
    seconds = sum(line["timing_s/step"] for line in lines) / len(lines)
    values = [", ".join(f"{each[number]:.2f}" for each in curves) for number in range(0, samples + 1, EVERY)]
    return f"| {NAMES[way]} | {prompts} x {answers} | {' | '.join(values)} | {goals} | {seconds:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("outputs/distill"))
    parser.add_argument("--samples", type=int, default=5120, help="answers that every way gets")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default=",".join(WAYS))
    options = parser.parse_args()
    out, ways, samples = options.out.resolve(), options.only.split(","), options.samples
    os.environ["OMP_NUM_THREADS"] = "1"
    keys = prepare(out)
    teacher = make_teacher(out)
    accuracy = json.loads((teacher / "warm_up.json").read_text())["sampled"]
    seeds = range(1, options.seeds + 1)
    runs = {way: [out / f"{way}_{seed}" for seed in seeds] for way in ways}
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = []
        for seed in seeds:
            for way in ways:
                taught = (
                    [] if way.startswith("grpo") and "+" not in way else [f"distillation.teacher.model.path={teacher}"]
                )
                jobs.append(pool.submit(train, runs[way][seed - 1], [*keys, *taught], way, seed, samples))
        for job in jobs:
            job.result()
    command = f"python -m bench.distill --samples {samples} --seeds {options.seeds} --jobs {options.jobs}"
    command += "" if ways == list(WAYS) else f" --only {options.only}"
    counts = [f"{number:,}" for number in range(0, samples + 1, EVERY)]
    lines = [
        "# Distillation, CPU",
        "",
        f"`{command}`, {datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores. Task and student of "
        f"scripts/quickstart.sh, and its learning rate;",
        f"the teacher has twice the layers, and {accuracy:.2f} of its sampled answers are right. Held-out accuracy",
        "(128 prompts, 4 sampled answers each) after so many answers of the policy, of each seed. Seconds a step with "
        "other jobs on the same cores: an upper bound.",
        "",
        f"| learnt from | prompts x answers of a step | {' | '.join(counts)} | answers until {GOAL} | s/step |",
        "|" + "---|" * (4 + len(counts)),
        *(row(way, of_seeds, samples) for way, of_seeds in runs.items()),
        "",
    ]
    (ROOT / "bench/results/distill_cpu.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
