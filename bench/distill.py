"""Distillation from a larger model against learning from rewards, with the quickstart's model: one table.

    python -m bench.distill [--samples 5120] [--seeds 2] [--jobs 2] [--only grpo,reverse_kl]

The teacher is trained like the student by scripts/make_small_model.py, with twice the layers, on error-free responses
and until it is right. Every method gets the same number of responses; pure distillation needs one per prompt, so it
does more steps. Complete runs in the folder `--work` are reused.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path

from bench.learning import COMMON, A, R, at_once, call, curve, prepare, seconds_a_step, train
from bench.table import parse, table, write

LOSS = "distillation.distillation_loss."
ALONE = ["distillation.enabled=True", f"{LOSS}use_task_rewards=False", f"{R}n=1"]
BATCH = "data.train_batch_size="
GOAL = 0.7
WAYS = {
    "grpo": ["algorithm.adv_estimator=grpo", f"{R}n=8"],
    # Steps with as few responses as pure distillation.
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
    "grpo": "rewards only (grpo)",
    "grpo_small": "rewards only (grpo)",
    "reverse_kl": "teacher only, reverse_kl",
    "forward_kl": "teacher only, forward_kl",
    "k1": "teacher only, k1 as a cost (verl's use_policy_gradient)",
    "reverse_kl_8": "teacher only, reverse_kl",
    "grpo+reverse_kl": "grpo and reverse_kl",
}


def make_teacher(out: Path, steps: int) -> Path:
    """Create a model of four layers that is right nine times in ten."""
    teacher = out / "teacher"
    if not (teacher / "config.json").exists():
        means = ["--layers", 4, "--slip-rate", 0, "--target-accuracy", 0.9, "--steps", steps, "--seed", 2]
        call("scripts/make_small_model.py", "--output", teacher, "--train", out / "data/train.parquet", *means)
    return teacher


def sizes(way: str) -> tuple[int, int]:
    """Return (prompts per step, responses per prompt)."""
    words = [f"{BATCH}32", *WAYS[way]]
    prompts, answers = ([int(w.partition("=")[2]) for w in words if w.startswith(key)] for key in (BATCH, f"{R}n="))
    return prompts[-1], answers[-1]


def settings(way: str, seed: int, samples: int, every: int) -> list[str]:
    """Return the keys of a run that validates after ``every`` responses."""
    of_step = math.prod(sizes(way))
    own = {word.partition("=")[0] for word in WAYS[way]} | {"trainer.test_freq"}
    common = [word for word in COMMON if word.partition("=")[0] not in own]
    steps = [f"trainer.total_training_steps={samples // of_step}", f"trainer.test_freq={every // of_step}"]
    return [*common, *WAYS[way], f"data.seed={seed}", *steps]


def row(way: str, runs: list[Path], samples: int, every: int) -> str:
    prompts, answers = sizes(way)
    of_step = prompts * answers
    # A longer run is identical up to here, because the learning rate is constant.
    curves = [
        {step * of_step: value for step, value in curve(run).items() if step * of_step <= samples} for run in runs
    ]
    reached = [next((number for number, value in each.items() if value >= GOAL), None) for each in curves]
    goals = ", ".join("not reached" if number is None else f"{number:,}" for number in reached)
    values = [", ".join(f"{each[number]:.2f}" for each in curves) for number in range(0, samples + 1, every)]
    return f"| {NAMES[way]} | {prompts} x {answers} | {' | '.join(values)} | {goals} | {seconds_a_step(runs):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=5120, help="responses that every method gets")
    parser.add_argument("--every", type=int, default=1280, help="responses between two validations")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default=",".join(WAYS))
    parser.set_defaults(warm_up=400, teacher_steps=3000)
    smoke = {"samples": 64, "every": 64, "seeds": 1, "only": "reverse_kl", "warm_up": 1, "teacher_steps": 1}
    options = parse(parser, out="distill_cpu.md", work="outputs/distill", **smoke)
    out, ways, samples, every = options.work, options.only.split(","), options.samples, options.every
    keys = prepare(out, warm_up=options.warm_up)
    teacher = make_teacher(out, options.teacher_steps)
    accuracy = json.loads((teacher / "warm_up.json").read_text())["sampled"]
    seeds = range(1, options.seeds + 1)
    runs = {way: [out / f"{way}_{seed}" for seed in seeds] for way in ways}
    taught = {way: [f"distillation.teacher.model.path={teacher}"] * ("kl" in way or way == "k1") for way in ways}
    at_once(
        options.jobs,
        [
            partial(
                train, runs[way][seed - 1], "-m", "rltrain.main_ppo", *keys, *settings(way, seed, samples, every),
                *taught[way],
            )
            for seed in seeds
            for way in ways
        ],
    )  # fmt: skip
    counts = [f"{number:,}" for number in range(0, samples + 1, every)]
    titles = ["learnt from", "prompts x answers of a step", *counts, f"answers until {GOAL}", "s/step"]
    write(
        options,
        "Task and student of scripts/quickstart.sh, and its learning rate; the teacher has twice the layers, and "
        f"{accuracy:.2f} of its sampled answers are right. Held-out accuracy (128 prompts, 4 sampled answers each) "
        "after so many answers of the policy, of each seed. Seconds a step with other jobs on the same cores: an upper "
        "bound.",
        table(titles, [row(way, of_seeds, samples, every) for way, of_seeds in runs.items()]),
    )


if __name__ == "__main__":
    main()
