"""Cost of observing a step: two trackers, saved and dumped responses.

    python -m bench.watched [--groups 16]

One run on one CPU process, whose steps are alike, because responses do not end by themselves. Of every six steps, two
run without observers, two with all of them, and two without again as a control, in a mirrored order, so that other load
of the machine affects all of them. The page is written after the last step, and timed. Writes
bench/results/watched_cpu.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import rltrain
from bench.table import parse, table, write
from rltrain.run.callbacks.drift import Drift
from rltrain.run.report.page import write_page
from rltrain.run.report.sample_logger import SampleLogger
from rltrain.run.report.tracking import Sender
from tests.tiny import save_tiny_model, small_run, write_arithmetic

PROMPTS, ANSWERS, LENGTH = 16, 8, 24
KINDS = ("without", "with", "without, again")
ORDER = (*KINDS, *reversed(KINDS))
WARM_UP = 2


def seconds(root: Path, num_groups: int) -> np.ndarray:
    """Return [groups, kinds]: mean seconds of a step, from its beginning to that of the next."""
    begins: list[float] = []
    before, last = Drift.before_step, WARM_UP + num_groups * len(ORDER) + 1

    def begin(self: Drift, step: int) -> None:
        begins.append(time.perf_counter())
        before(self, step)

    def where_watched(method: Any, instead: Any = None) -> Any:
        def chosen(*arguments: Any, **named: Any) -> Any:
            number = len(begins) - 1 - WARM_UP
            watched = number < 0 or ORDER[number % len(ORDER)] == "with"
            return method(*arguments, **named) if watched else instead

        return chosen

    changes = {
        "data__train_batch_size": PROMPTS, "data__max_response_length": LENGTH, "trainer__total_training_steps": last,
        "actor_rollout_ref__rollout__n": ANSWERS, "actor_rollout_ref__actor__ppo_mini_batch_size": PROMPTS // 2,
        "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 8192, "actor_rollout_ref__rollout__ignore_eos": True,
        "trainer__save_freq": -1, "trainer__test_freq": -1, "trainer__logger": "[console,tensorboard,wandb]",
        "trainer__rollout_data_dir": root / "dumps",
    }  # fmt: skip
    model = save_tiny_model(root / "model", width=128)
    files = write_arithmetic(root / "train.parquet", range(200)), write_arithmetic(root / "val.parquet", range(6))
    with (
        mock.patch.object(Drift, "before_step", begin),
        mock.patch.object(SampleLogger, "on_step", where_watched(SampleLogger.on_step, {})),
        mock.patch.object(Sender, "put", where_watched(Sender.put)),
    ):
        rltrain.train(small_run(model, files, root / "run", **changes))
    steps = np.array([end - start for start, end in itertools.pairwise(begins)][WARM_UP:]).reshape(-1, len(ORDER))
    return (steps[:, : len(KINDS)] + steps[:, : len(KINDS) - 1 : -1]) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=16, help="number of groups of six steps")
    options = parse(parser, out="watched_cpu.md", groups=2)
    os.environ["WANDB_MODE"] = "offline"
    with tempfile.TemporaryDirectory() as name:
        found = seconds(Path(name), options.groups)
        started = time.perf_counter()
        write_page(Path(name) / "run")
        page_s = time.perf_counter() - started
    ratios = 100 * np.log(found / found[:, :1])
    errors = ratios.std(0, ddof=1) / len(ratios) ** 0.5
    rows = [
        f"| {kind} | {median:.3f} | {mean:+.1f} % | {error:.1f} % |"
        for kind, median, mean, error in zip(KINDS, np.median(found, 0), ratios.mean(0), errors, strict=True)
    ]
    write(
        options,
        f"Of {6 * len(ratios)} steps of {PROMPTS} prompts x {ANSWERS} answers of {LENGTH} tokens a third each: console "
        "and metrics.jsonl alone; TensorBoard, wandb (offline), samples and dumps beside them; and alone once "
        "more, which shows the noise. From the begin of a step to that of the next; differences are means over groups "
        "of six steps in mirrored order.",
        table(["steps", "median, s", "difference", "standard error"], rows),
        f"The page took {page_s:.1f} s behind the last step.",
    )


if __name__ == "__main__":
    main()
