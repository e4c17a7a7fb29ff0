"""Effect of averaging checkpoints: three learning runs of the quickstart's task, and averages of their checkpoints.

    python -m bench.average [--steps 100] [--seeds 3]

The runs share their initial weights and differ in the order of the data and in the sampled responses. Each saves a
checkpoint every ten steps. `rltrain.average` averages the last three of each run, and the last ones of all runs;
`rltrain.evaluate` scores all. Complete models and runs in the folder `--work` are reused.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.learning import ALGORITHMS, COMMON, call
from bench.table import parse, table, write

AVERAGED = 3
ANSWERS = 8
SOURCE = "rltrain/arithmetic"
EVALUATED = [
    f"n={ANSWERS}", "temperature=1.0", "data.max_prompt_length=32", "data.max_response_length=8", "trainer.device=cpu",
    "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=hf",
]  # fmt: skip


def prepare(out: Path, num_test: int, warm_up: int) -> list[str]:
    """Create data and model; return the keys that name them."""
    data, model = out / "data", out / "model"
    if not (model / "config.json").exists():
        sizes = ["--num-train", 2048, "--num-test", num_test, "--max-operand", 49, "--seed", 0]
        call("-m", "rltrain.data_preprocess.arithmetic", "--output", data, *sizes)
        of_model = ["--train", data / "train.parquet", "--steps", warm_up, "--seed", 1]
        call("scripts/make_small_model.py", "--output", model, *of_model)
    files = [f"data.train_files={data}/train.parquet", f"data.val_files={data}/test.parquet"]
    return [*files, f"actor_rollout_ref.model.path={model}"]


def train(out: Path, keys: list[str], seed: int, steps: int, every: int) -> Path:
    """Return the folder of a run that has done its steps."""
    run = out / f"run_{seed}"
    if not (run / f"global_step_{steps}").is_dir():
        own = [f"data.seed={seed}", f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={run}"]
        saved = [f"trainer.save_freq={every}", f"trainer.max_actor_ckpt_to_keep={AVERAGED}", "trainer.test_freq=-1"]
        call("-m", "rltrain.main_ppo", *COMMON, *keys, *ALGORITHMS["grpo"], *own, *saved)
    return run


def averaged(folder: Path, models: list[Path]) -> Path:
    if not folder.is_dir():
        call("-m", "rltrain.average", folder, *models)
    return folder


def scores(out: Path, models: dict[str, Path]) -> list[str]:
    """Return a row for each model: mean over responses, and probability that one of them is right, with intervals."""
    folder = out / "scores"
    named = ",".join(map(str, models.values()))
    call("-m", "rltrain.evaluate", f"model={named}", f"data={out}/data/test.parquet", f"out={folder}", *EVALUATED)
    results = json.loads((folder / "evaluations.json").read_text(encoding="utf-8"))["evaluations"]
    return [
        f"| {name} | {cell(result, f'avg@{ANSWERS}')} | {cell(result, f'pass@{ANSWERS}')} |"
        for name, result in zip(models, results, strict=True)
    ]


def cell(result: dict[str, Any], figure: str) -> str:
    found = result["sources"][SOURCE]["figures"][figure]
    return "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * found[part] for part in ("value", "low", "high")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.set_defaults(every=10, num_test=352, warm_up=400)
    smoke = {"steps": 3, "seeds": 1, "every": 1, "num_test": 8, "warm_up": 1}
    options = parse(parser, out="average_cpu.md", work="outputs/average", **smoke)
    out, steps, every, seeds = options.work, options.steps, options.every, range(1, options.seeds + 1)
    keys = prepare(out, options.num_test, options.warm_up)
    runs = {seed: train(out, keys, seed, steps, every) for seed in seeds}
    last = range(steps - every * (AVERAGED - 1), steps + 1, every)
    models = {"before training": out / "model"}
    for seed, run in runs.items():
        models[f"run {seed}, last"] = run / f"global_step_{steps}"
        checkpoints = [run / f"global_step_{step}" for step in last]
        models[f"run {seed}, mean of its last {AVERAGED}"] = averaged(out / f"mean_{seed}", checkpoints)
    if len(runs) > 1:
        ends = [run / f"global_step_{steps}" for run in runs.values()]
        models[f"mean of the last of {options.seeds} runs"] = averaged(out / "mean_of_runs", ends)
    write(
        options,
        f"GRPO on sums of two numbers up to 49, the quickstart's model; a checkpoint every {every} steps, the last "
        f"{AVERAGED} are of steps {', '.join(map(str, last))}. In percent, on {options.num_test} held-out problems, "
        f"{ANSWERS} answers each at temperature 1; [ ]: 95 % of bootstrap draws over problems.",
        table(["model", f"avg@{ANSWERS}", f"pass@{ANSWERS}"], scores(out, models)),
    )


if __name__ == "__main__":
    main()
