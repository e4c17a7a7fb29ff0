"""The gap between engine and trainer of a run, in one process: |log pi_engine - log pi_trainer| of sampled tokens."""

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from subprocess import run

import numpy as np
import torch.distributed as dist
from torch import Tensor

from rltrain.config.load import load_config
from rltrain.config.step_passes import make_step_passes
from rltrain.data.chat import chat_encoder
from rltrain.data.prompts import encode_prompts
from rltrain.data.rows import read_rows
from rltrain.workers.hybrid import HybridWorker
from rltrain.workers.rollout.contract import Sampling
from rltrain.workers.tasks import GenerateTask
from tests.tiny import small_run, write_arithmetic

PROMPTS, ANSWERS, TOKENS = 8, 4, 64
Row = Callable[..., str]
Rows = Callable[[str], Iterable[tuple[str, ...]]]
COLUMNS = ("tokens", "mean", "99 %", "largest")


def measured(engine: str, dtype: str, folder: Path, **changes: object) -> Tensor:
    """[tokens]. folder: with the model in ``model``. changes: to the keys of the run."""
    files = tuple(write_arithmetic(folder / f"{name}.parquet", range(PROMPTS)) for name in ("train", "test"))
    keys = {
        "data__max_response_length": TOKENS,
        "actor_rollout_ref__rollout__name": engine,
        "actor_rollout_ref__rollout__dtype": dtype,
        "actor_rollout_ref__rollout__gpu_memory_utilization": 0.1,
        "actor_rollout_ref__actor__fsdp_config__compute_dtype": dtype,
    }
    cfg = load_config(small_run(folder / "model", files, folder / "run", **keys | changes)).config
    store = encode_prompts(read_rows(str(files[0])), chat_encoder(cfg), 16, True)
    worker = HybridWorker(cfg, {"train": store, "val": store})
    worker.init_models(make_step_passes(cfg))
    rows = np.arange(PROMPTS, dtype=np.int32)
    task = GenerateTask("train", rows, ANSWERS, Sampling(TOKENS, ignore_eos=True), seed=1, step=1, call=1)
    batch, _, _ = worker.rollout.generate(task)
    own, _ = worker.actor.log_probs(batch, [len(batch)])
    return (own.ragged("old_log_probs").values - batch.ragged("rollout_log_probs").values).abs().double()


def cells(gaps: Tensor) -> str:
    """Of `COLUMNS`, as a part of a line of a table."""
    numbers = gaps.mean(), gaps.quantile(0.99), gaps.max()
    return f"{len(gaps)} | " + " | ".join(f"{float(number):.2e}" for number in numbers)


def table(module: str, title: str, about: str, head: Sequence[str], row: Row, rows: Rows, result: Path) -> None:
    """The command of a bench: a table of `COLUMNS` behind those of ``head``, whose rows ``--engines`` limits.

    row: a line of the table, from what tells it apart and an empty folder. rows: these of an engine. about: what was
    measured, behind the command and the date.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", default="hf,vllm")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.one:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(f"ROW {row(Path(folder), *words.one.split(','))}\n")
        sys.stdout.flush()
        os._exit(0)  # an engine may have processes that an ordinary end waits for
    lines = []
    for which in (each for engine in words.engines.split(",") for each in rows(engine)):
        # Each in a process of its own, as vLLM has one engine a process.
        done = run([sys.executable, "-m", module, "--one", ",".join(which)], capture_output=True, text=True)
        told = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
        reason = (done.stderr.strip().splitlines() or ["no word"])[-1]
        lines += told or [f"| {' | '.join(which)} | failed: {reason} ||||"]
        sys.stdout.write(lines[-1] + "\n")
        sys.stdout.flush()
    columns = [*head, *COLUMNS]
    command = " ".join(["python -m", module, *sys.argv[1:]])
    text = (
        f"# {title}\n\n`{command}`, {date.today()}, {platform.machine()} CPU, {about}, "
        f"{PROMPTS * ANSWERS} answers of {TOKENS} tokens at temperature 1: |log π_engine − log π_trainer| of a sampled "
        f"token.\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    )
    result.write_text(text + "\n".join(lines) + "\n")
