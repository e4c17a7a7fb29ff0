"""Learning from images: examples/vlm_cpu.sh for each family, with the images and with white ones: one table.

    python -m bench.learning_vision [--steps 150] [--seeds 3] [--jobs 1] [--only …]

A seed determines the weights, the order of the data and the sampled responses; both arms of a seed share them. Complete
runs in the folder `--work` are reused.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from bench import learning
from bench.table import parse, table, write
from rltrain.run.report.table import read_metrics

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen2_vl", "internvl", "qwen3_5", "glm4v")
ARMS = {"image": "", "white": "1"}
KEY = "val-core/rltrain/rectangles/reward/mean@4"
EVERY = 10
SHOWN = 30
# Six areas, equally likely.
CHANCE = 1 / 6


def folder(out: Path, family: str, arm: str, seed: int) -> Path:
    return out / f"{family}_{arm}_{seed}"


def train(out: Path, family: str, arm: str, seed: int, steps: int) -> None:
    run = folder(out, family, arm, seed)
    settings = [f"data.seed={seed}", f"trainer.total_training_steps={steps}", f"trainer.test_freq={EVERY}"]
    settings += ["trainer.save_at_end=False", "trainer.logger=[]"]
    # Concurrent runs must not write the same file.
    environment = {"FAMILY": family, "BLANK": ARMS[arm], "OUT": str(run / "made"), "SEED": str(seed), "RUN": str(run)}
    learning.train(run, "examples/vlm_cpu.sh", *settings, command=["bash"], **environment)


def curve(run: Path) -> dict[int, float]:
    """Return the held-out accuracy by step."""
    return {line["step"]: line[KEY] for line in read_metrics(run) if KEY in line}


def row(out: Path, family: str, arm: str, seeds: int, shown: list[int]) -> str:
    runs = [folder(out, family, arm, seed) for seed in range(1, seeds + 1)]
    curves = [curve(run) for run in runs]
    cells = [" ".join(f"{curve_of_seed[step]:.2f}" for curve_of_seed in curves) for step in shown]
    return f"| {family} | {arm} | {' | '.join(cells)} | {learning.seconds_a_step(runs):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.set_defaults(arms=list(ARMS))
    smoke = {"steps": 1, "seeds": 1, "only": FAMILIES[0], "arms": ["white"]}
    options = parse(parser, out="learning_vision_cpu.md", work="outputs/learning_vision", **smoke)
    out, families, seeds = options.work, options.only.split(","), range(1, options.seeds + 1)
    learning.at_once(
        options.jobs,
        [
            partial(train, out, family, arm, seed, options.steps)
            for seed in seeds
            for family in families
            for arm in options.arms
        ],
    )
    steps = sorted({*range(0, options.steps, SHOWN), options.steps})
    rows = [row(out, family, arm, options.seeds, steps) for family in families for arm in options.arms]
    write(
        options,
        "examples/vlm_cpu.sh: GRPO from random weights, the area of a rectangle on squared paper. Held-out accuracy "
        "(128 images that are not in train, 4 sampled answers each) at each step, of seeds "
        f"{', '.join(map(str, seeds))}. `white`: the same rows with white images in train and test. Areas are balanced,"
        f" so an answer without an image is right once in six times ({CHANCE:.2f}). Seconds a step with other jobs on "
        "the same cores: an upper bound.",
        table(["family", "images", *(f"step {step}" for step in steps), "s/step"], rows),
    )


if __name__ == "__main__":
    main()
