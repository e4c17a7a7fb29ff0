"""Time of a multi-turn rollout against its lower bound, and against a barrier at every turn.

    python -m bench.waits [--engines hf,vllm] [--rounds 2]      prints the table, writes bench/results/waits_cpu.md

64 trajectories of up to 4 turns, whose environment sleeps a random time (exponential, of the given mean) before it
replies. Two things bound a rollout from below: the work of the engine, measured with an environment that replies at
once, and the longest chain, which is the time that one trajectory sleeps and decodes alone. The barrier is the same
rollout in which no trajectory begins its next turn before all have a reply. Sleep and tokens are a function of the
seed, so all rollouts of a row do the same.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch.distributed as dist

import rltrain.workers.rollout_worker as home
from bench.table import parse, table, write
from bench.workload import make
from rltrain.common.columns import names as c
from rltrain.config.load import load_config
from rltrain.config.step_passes import make_step_passes
from rltrain.data.chat import chat_encoder
from rltrain.data.prompts import encode_prompts
from rltrain.data.rows import read_rows
from rltrain.workers.hybrid import HybridWorker
from rltrain.workers.interface.tasks import GenerateTask
from rltrain.workers.rollout.contract import Job, Sampling
from rltrain.workers.rollout.conversations import Conversations

PROMPTS, SAMPLES, TURNS = 16, 4, 4
TITLES = ("engine", "mean sleep s", "turns", "work", "chain", "rollout", "/ bound", "barrier", "barrier / rollout")
ENVIRONMENT = '''
import asyncio, random


class Slow:
    """Sleeps before it answers; its reward is the seconds."""

    def __init__(self, mean, turns):
        self.mean, self.turns, self.turn = mean, turns, 0

    def reset(self, row, seed):
        self.seed = seed

    async def step(self, text):
        self.turn += 1
        seconds = random.Random(f"{self.seed} {self.turn} {text}").expovariate(1) * self.mean
        await asyncio.sleep(seconds)
        return "go on", seconds, self.turn == self.turns
'''


class Barrier(Conversations):
    """Conversations in which no trajectory continues before all have a reply."""

    def next_jobs(self, most: int) -> list[Job]:
        self._listen()
        if self._waiting and (self._running or len(self._ready) < len(self._waiting)):
            time.sleep(0.002)
            return self._take_new(most)
        return super().next_jobs(most)


class Rollout:
    """The rollouts of one engine."""

    def __init__(self, folder: Path, engine: str, tokens: int) -> None:
        self._folder, self._engine, self._call = folder, engine, 0
        prompts = np.arange(PROMPTS, dtype=np.int32)
        self._task = GenerateTask("train", prompts, SAMPLES, Sampling(tokens), seed=1, step=1)

    def worker(self, mean: float) -> HybridWorker:
        """Return a worker whose environment sleeps ``mean`` seconds on average."""
        rollout = "actor_rollout_ref.rollout."
        cfg = load_config(
            [
                f"data.train_files={self._folder}/train.parquet", f"data.val_files={self._folder}/train.parquet",
                "data.train_batch_size=16", "data.max_prompt_length=64",
                f"data.max_response_length={self._task.sampling.max_tokens}",
                f"actor_rollout_ref.model.path={self._folder}/model", f"{rollout}n={SAMPLES}",
                f"{rollout}name={self._engine}",
                f"{rollout}max_num_seqs=64", f"{rollout}gpu_memory_utilization=0.1", "trainer.device=cpu",
                f"{rollout}multi_turn.environment={self._folder}/slow.py:Slow",
                f"{rollout}multi_turn.environment_kwargs={{mean: {mean}, turns: {TURNS}}}",
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
                f"trainer.default_local_dir={self._folder}/run",
            ]
        ).config  # fmt: skip
        rows = read_rows(f"{self._folder}/train.parquet")
        prompts = encode_prompts(rows, chat_encoder(cfg), 64, True)
        worker = HybridWorker(cfg, {"train": prompts}, {"train": rows.select(prompts.row_index)})
        worker.init_models(make_step_passes(cfg))
        return worker

    def seconds(self, worker: HybridWorker, **changes: Any) -> tuple[float, list, dict]:
        """Return wall-clock seconds of a rollout, the texts, and the numbers of its trajectories."""
        self._call += 1
        _, texts, numbers = worker.rollout.generate(replace(self._task, call=self._call, **changes))
        return numbers.seconds["generate_sequences"], texts, numbers.per_sample


def measure(rollout: Rollout, mean: float, rounds: int) -> str:
    """Return a row of the table."""
    quick, slow = rollout.worker(0.0), rollout.worker(mean)
    for worker in (quick, slow):
        rollout.seconds(worker)  # from here on, processes and compiled code exist
    found = {"work": [], "rollout": [], "barrier": []}
    for _ in range(rounds):
        found["work"].append(rollout.seconds(quick)[0])
        seconds, texts, numbers = rollout.seconds(slow)
        found["rollout"].append(seconds)
        home.Conversations = Barrier
        barrier, *_ = rollout.seconds(slow)
        home.Conversations = Conversations
        found["barrier"].append(barrier)
    slept = np.array([sum(text.trajectory_info["tool_rewards"]) for text in texts])
    longest = int(slept.argmax())
    place, sample = divmod(longest, SAMPLES)
    pending = np.zeros((PROMPTS, SAMPLES), dtype=bool)
    pending[place, sample] = True
    alone = rollout.seconds(quick, pending_mask=pending)[0]
    work, whole, barrier = (float(np.median(found[name])) for name in ("work", "rollout", "barrier"))
    chain = slept.max() + alone
    bound = max(work, chain)
    turns = numbers[c.NUM_TURNS].mean()
    for worker in (quick, slow):
        worker.rollout._answering._executors.shutdown()
    figures = (turns, work, chain, whole, whole / bound, barrier, barrier / whole)
    return f"| {rollout._engine} | {mean:g} | {' | '.join(f'{figure:.2f}' for figure in figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default="hf,vllm")
    parser.add_argument("--means", default="0.5,2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.set_defaults(shape="tiny", tokens=512)
    given = parse(parser, out="waits_cpu.md", engines="hf", means="0.01", rounds=1, shape="test", tokens=16)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, "long_tail", given.shape, 1)
        (folder / "slow.py").write_text(ENVIRONMENT)
        for engine in given.engines.split(","):
            for mean in map(float, given.means.split(",")):
                rows.append(measure(Rollout(folder, engine, given.tokens), mean, given.rounds))
    write(
        given,
        f"{PROMPTS * SAMPLES} trajectories of up to {TURNS} turns and {given.tokens} tokens; seconds, the median of "
        f"{given.rounds} rounds. Work: an environment that answers at once. Chain: the most that a trajectory sleeps, "
        "and its decoding alone. The bound is the larger of the two.",
        table(TITLES, rows),
    )
    dist.destroy_process_group()
    if "vllm" in given.engines:
        os._exit(0)  # vLLM's threads would keep the process alive


if __name__ == "__main__":
    main()
