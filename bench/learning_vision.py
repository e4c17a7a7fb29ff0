"""Learning from images: examples/vlm_cpu.sh for each family, with the images and with white ones: one table.

    python -m bench.learning_vision [--steps 150] [--seeds 3] [--jobs 1] [--only …] [--task moving_square]

With --task moving_square: learning from videos, with the frames in order and shuffled.

A seed determines the weights, the order of the data and the sampled responses; both arms of a seed share them. Complete
runs in the folder `--work` are reused.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import learning
from bench.table import parse, table, write
from rltrain.run.report.table import read_metrics

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen2_vl", "internvl", "qwen3_5", "glm4v")
EVERY = 10
SHOWN = 30


@dataclass(frozen=True)
class Task:
    """A generated data set, its families, and its two arms with their environment variable BLANK."""

    name: str
    families: tuple[str, ...]
    arms: dict[str, str]
    note: str

    @property
    def key(self) -> str:
        return f"val-core/rltrain/{self.name}/reward/mean@4"


RECTANGLES = Task(
    "rectangles",
    FAMILIES,
    {"image": "", "white": "1"},
    "the area of a rectangle on squared paper. Held-out accuracy (128 images that are not in train, 4 sampled answers "
    "each). `white`: the same rows with white images in train and test. Areas are balanced, so an answer without an "
    f"image is right once in six times ({1 / 6:.2f}).",
)
VIDEOS = Task(
    "moving_square",
    ("qwen2_5_vl", "qwen3_vl", "qwen2_vl", "qwen3_5"),
    {"video": "", "shuffled": "1"},
    "the direction of a moving square. Held-out accuracy (128 videos that are not in train, 4 sampled answers each). "
    "`shuffled`: the same rows with the frames of each video in random order, in train and test: only the axis of the "
    "direction is then visible, so an answer is right once in two times (0.50), and without a video once in four.",
)
TASKS = {task.name: task for task in (RECTANGLES, VIDEOS)}


def folder(out: Path, family: str, arm: str, seed: int) -> Path:
    return out / f"{family}_{arm}_{seed}"


def train(out: Path, task: Task, family: str, arm: str, seed: int, steps: int) -> None:
    run = folder(out, family, arm, seed)
    settings = [f"data.seed={seed}", f"trainer.total_training_steps={steps}", f"trainer.test_freq={EVERY}"]
    settings += ["trainer.save_at_end=False", "trainer.logger=[]"]
    # Concurrent runs must not write the same file.
    environment = {"FAMILY": family, "TASK": task.name, "BLANK": task.arms[arm], "SEED": str(seed), "RUN": str(run)}
    environment["OUT"] = str(run / "made")
    learning.train(run, "examples/vlm_cpu.sh", *settings, command=["bash"], **environment)


def curve(run: Path, key: str) -> dict[int, float]:
    """Return the held-out accuracy by step."""
    return {line["step"]: line[key] for line in read_metrics(run) if key in line}


def row(out: Path, task: Task, family: str, arm: str, seeds: int, shown: list[int]) -> str:
    runs = [folder(out, family, arm, seed) for seed in range(1, seeds + 1)]
    curves = [curve(run, task.key) for run in runs]
    cells = [" ".join(f"{curve_of_seed[step]:.2f}" for curve_of_seed in curves) for step in shown]
    return f"| {family} | {arm} | {' | '.join(cells)} | {learning.seconds_a_step(runs):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--task", choices=TASKS, default="rectangles")
    parser.add_argument("--only", help="families")
    parser.set_defaults(arms=None)
    smoke = {"steps": 1, "seeds": 1, "only": FAMILIES[0], "arms": 1}
    options = parse(parser, out="learning_vision_cpu.md", work="outputs/learning_vision", **smoke)
    task, seeds = TASKS[options.task], range(1, options.seeds + 1)
    out, families = options.work, options.only.split(",") if options.only else task.families
    arms = list(task.arms)[-(options.arms or 2) :]
    learning.at_once(
        options.jobs,
        [
            partial(train, out, task, family, arm, seed, options.steps)
            for seed in seeds
            for family in families
            for arm in arms
        ],
    )
    steps = sorted({*range(0, options.steps, SHOWN), options.steps})
    rows = [row(out, task, family, arm, options.seeds, steps) for family in families for arm in arms]
    write(
        options,
        f"examples/vlm_cpu.sh: GRPO from random weights, {task.note} At each step, of seeds "
        f"{', '.join(map(str, seeds))}. Seconds a step with other jobs on the same cores: an upper bound.",
        table(["family", "arm", *(f"step {step}" for step in steps), "s/step"], rows),
    )


if __name__ == "__main__":
    main()
