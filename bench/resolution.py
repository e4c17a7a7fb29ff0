"""Result of a resolution search: a small model trained on rectangles of 84 x 84 pixels, and an averaged one.

    python -m bench.resolution [--steps 150] [--sizes 84x84,168x168] [--models last,mean]

The run is examples/vlm_cpu.sh with a checkpoint every ten steps. `rltrain.resolution` searches for its last checkpoint,
and for the mean of its last three, on images of the training size and on the same images at twice the width and height.
Complete models and runs in the folder `--work` are reused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.learning import A, R, call
from bench.table import parse, table, write
from rltrain.data.images import open_image
from rltrain.data_preprocess.rectangles import png

SEED, EVERY, AVERAGED = 3, 10, 3
TRAINED = [
    "algorithm.adv_estimator=grpo", "data.image_key=images", "data.train_batch_size=32", "data.max_prompt_length=32",
    "data.max_response_length=2", f"data.seed={SEED}", "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    f"{A}optim.lr=5e-4", f"{A}optim.lr_warmup_steps=5", f"{A}optim.lr_scheduler_type=cosine",
    f"{A}optim.weight_decay=0.0", f"{A}ppo_mini_batch_size=16", f"{A}entropy_coeff=0.03", f"{R}name=hf", f"{R}n=8",
    f"{R}temperature=1.0", "trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.test_freq=-1",
    f"trainer.save_freq={EVERY}", f"trainer.max_actor_ckpt_to_keep={AVERAGED}", "trainer.logger=[]",
]  # fmt: skip
SEARCHED = [
    "data.image_key=images", "data.max_prompt_length=128", "data.max_response_length=2", "trainer.device=cpu",
    "trainer.n_gpus_per_node=1", f"{R}name=hf",
]  # fmt: skip
# Size of the images -> the folder of their rows.
SIZES = {"84x84": "held", "168x168": "held_twice"}


def prepare(out: Path, num_dev: int, num_test: int) -> None:
    """Create rows to train on, rows to search and test on in two sizes, and a model."""
    rectangles = ("-m", "rltrain.data_preprocess.rectangles", "--output")
    if not (out / "model" / "config.json").exists():
        call(*rectangles, out / "data", "--num-train", 2 * num_dev, "--num-test", 128, "--seed", 0)
        call(*rectangles, out / "held", "--num-train", num_dev, "--num-test", num_test, "--seed", 7)
        call("scripts/make_small_vlm.py", "--family", "qwen2_5_vl", "--output", out / "model", "--seed", SEED)
    (out / "held_twice").mkdir(exist_ok=True)
    for name in ("train.parquet", "test.parquet"):
        pq.write_table(enlarged(pq.read_table(out / "held" / name)), out / "held_twice" / name)


def enlarged(small: pa.Table) -> pa.Table:
    """Return the same rows with every pixel of their images doubled in width and height."""
    rows = small.to_pylist()
    for row in rows:
        pixels = [np.asarray(open_image(image)) for image in row["images"]]
        row["images"] = [{"bytes": png(image.repeat(2, 0).repeat(2, 1)), "path": None} for image in pixels]
    return pa.Table.from_pylist(rows, schema=small.schema)


def train(out: Path, steps: int, names: list[str]) -> dict[str, str]:
    """Return the models to search for: the last checkpoint, and the mean of the last ones if ``names`` has it."""
    run = out / "run"
    if not (run / f"global_step_{steps}").is_dir():
        files = [f"data.train_files={out}/data/train.parquet", f"actor_rollout_ref.model.path={out}/model"]
        own = [f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={run}"]
        call("-m", "rltrain.main_ppo", *TRAINED, *files, *own)
    last = [str(run / f"global_step_{step}") for step in range(steps - EVERY * (AVERAGED - 1), steps + 1, EVERY)]
    if "mean" in names and not (out / "mean").is_dir():
        call("-m", "rltrain.average", out / "mean", *last)
    return {"last": f"model={last[-1]}", "mean": f"model={out}/mean"}


def search(out: Path, name: str, model: str, size: str) -> Iterator[str]:
    """Yield the rows of a search: one for each setting."""
    folder, data = out / "search" / f"{name} {size}".replace(" ", "_"), out / SIZES[size]
    words = [model, f"dev={data}/train.parquet", f"test={data}/test.parquet", f"out={folder}"]
    call("-m", "rltrain.resolution", *words, *SEARCHED)
    result = json.loads((folder / "resolution.json").read_text(encoding="utf-8"))
    chosen, difference = result["chosen"]["name"], next(iter(result["differences"]), None)
    for part in result["settings"]:
        tests = [kind for kind, holds in (("default", part["default"]), ("chosen", part["name"] == chosen)) if holds]
        tested = next((result["tests"][kind] for kind in tests if kind in result["tests"]), None)
        on_test = interval(tested["average"]["avg@1"]) if tested else ""
        gain = interval(next(iter(difference["sources"].values()))) if difference and "chosen" in tests else ""
        marks = ", ".join([*tests, *(["stopped"] if part["stopped"] else [])])
        yield (
            f"| {name} | {size} | {part['name']} | {part['image_tokens']:.0f} | {part['prompts']} | "
            f"{interval(part)} | {on_test} | {gain} | {marks} |"
        )


def interval(figure: dict[str, Any]) -> str:
    return "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * figure[part] for part in ("value", "low", "high")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--models", default="last,mean")
    parser.set_defaults(num_dev=1024, num_test=512)
    smoke = {"steps": 1, "sizes": "84x84", "models": "last", "num_dev": 32, "num_test": 24}
    options = parse(parser, out="resolution_cpu.md", work="outputs/resolution", **smoke)
    out = options.work
    out.mkdir(parents=True, exist_ok=True)
    prepare(out, options.num_dev, options.num_test)
    names = options.models.split(",")
    models = train(out, options.steps, names)
    rows = [row for size in options.sizes.split(",") for name in names for row in search(out, name, models[name], size)]
    titles = ["model", "images", "bounds", "image tokens", "prompts", "dev", "test", "gain", ""]
    write(
        options,
        f"A Qwen2.5-VL of 0.3 million weights that learnt for {options.steps} steps the area of rectangles of 84 x 84 "
        "pixels (examples/vlm_cpu.sh). `last`: its last checkpoint; `mean`: that of its last three. Searched on "
        f"{options.num_dev} rectangles, tested on {options.num_test} others, one greedy answer each, in percent; [ ]: "
        "95 % of bootstrap draws over rectangles. `gain`: chosen minus default on test, same rectangles. `168x168`: "
        "the same rectangles, drawn twice as wide and high.",
        table(titles, rows),
    )


if __name__ == "__main__":
    main()
