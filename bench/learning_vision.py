"""Do images teach? examples/vlm_cpu.sh for each family, with the images and with white ones: one table.

    python -m bench.learning_vision [--out outputs/learning_vision] [--steps 150] [--seeds 3] [--jobs 1] [--only …]

A seed decides the weights, the order of the data and the answers that are drawn; both arms of a seed share them. A run
that is complete is not made again. Writes bench/results/learning_vision_cpu.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rltrain.run.report.table import read_metrics

ROOT = Path(__file__).parent.parent
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen2_vl", "internvl")
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
    if (run / "done").exists():
        return
    # Runs at the same time must not write the same file.
    shared = {"FAMILY": family, "BLANK": ARMS[arm], "OUT": str(run / "made"), "SEED": str(seed), "RUN": str(run)}
    settings = [f"data.seed={seed}", f"trainer.total_training_steps={steps}", f"trainer.test_freq={EVERY}"]
    settings += ["trainer.save_at_end=False", "trainer.logger=[]"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | shared
    subprocess.run(
        ["bash", "examples/vlm_cpu.sh", *settings], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL
    )
    (run / "done").touch()


def curve(run: Path) -> dict[int, float]:
    """Held-out accuracy by step."""
    return {line["step"]: line[KEY] for line in read_metrics(run) if KEY in line}


def row(out: Path, family: str, arm: str, seeds: int, shown: list[int]) -> str:
    runs = [folder(out, family, arm, seed) for seed in range(1, seeds + 1)]
    curves = [curve(run) for run in runs]
    cells = [" ".join(f"{curve_of_seed[step]:.2f}" for curve_of_seed in curves) for step in shown]
    seconds = [line["timing_s/step"] for run in runs for line in read_metrics(run) if "timing_s/step" in line]
    return f"| {family} | {arm} | {' | '.join(cells)} | {sum(seconds) / len(seconds):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("outputs/learning_vision"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default=",".join(FAMILIES))
    options = parser.parse_args()
    out, families = options.out.resolve(), options.only.split(",")
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [
            pool.submit(train, out, family, arm, seed, options.steps)
            for seed in range(1, options.seeds + 1)
            for family in families
            for arm in ARMS
        ]
        for job in jobs:
            job.result()
    steps = sorted({*range(0, options.steps, SHOWN), options.steps})
    seeds = ", ".join(map(str, range(1, options.seeds + 1)))
    command = f"python -m bench.learning_vision --steps {options.steps} --seeds {options.seeds} --jobs {options.jobs}"
    lines = [
        "# Learning from images, CPU",
        "",
        f"`{command} --only {options.only}`, {datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores.",
        "examples/vlm_cpu.sh: GRPO from random weights, the area of a rectangle on squared paper. Held-out accuracy "
        "(128 images that are not in train, 4 sampled answers each)",
        f"at each step, of seeds {seeds}. `white`: the same rows with white images in train and test. Areas are "
        f"balanced, so an answer without an image is right once in six times ({CHANCE:.2f}).",
        "Seconds a step with other jobs on the same cores: an upper bound.",
        "",
        f"| family | images | {' | '.join(f'step {step}' for step in steps)} | s/step |",
        f"|{'---|' * (len(steps) + 3)}",
    ]
    lines += [row(out, family, arm, options.seeds, steps) for family in families for arm in ARMS]
    (ROOT / "bench/results/learning_vision_cpu.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
