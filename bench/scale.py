"""Overhead of the driver: the real trainer with real Ray workers that compute nothing.

    python -m bench.scale [--workers 1,8,32,64] [--samples 512,2048,4096] [--tokens 100,10000]

Controller, requests, references and metrics are those of a run. The workers assemble the requested data and return
empty columns of the right size, and responses are not scored. So the whole step is overhead: the driver's CPU time, and
(on this machine, where they share the cores) the workers' unpacking. If memory does not suffice for so many processes,
each stands for several ranks: the driver has the same calls, references and results, but fewer connections. Writes
bench/results/scale_cpu.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.table import finished_row, parse, table, write
from rltrain.common.device import get_device
from rltrain.config.load import load_config
from rltrain.data.batch_sampler import BatchOrder
from rltrain.runtime.cluster import reserve, start_ray
from rltrain.runtime.group import WorkerGroup
from rltrain.runtime.ray_watchdog import stop_ray
from rltrain.trainer.experience import Experience
from rltrain.trainer.plan import make_plan
from rltrain.trainer.ppo import PPOTrainer
from rltrain.trainer.rewards import Rewards
from rltrain.trainer.roles import InferenceModels, Policy, StepModels

TITLES = (
    "workers", "processes", "samples", "answer tokens", "driver CPU, s", "step, s", "timing_s/other", "bytes a sample",
    "driver share",
)  # fmt: skip
ANSWERS, PROMPT_TOKENS, STEPS = 8, 100, 3
DEVICES_PER_NODE = 8
# The table of a published run (DeepSeek-R1-Distill-Qwen-7B, 64 devices, 2048 samples of 10,426 tokens): s per step.
PUBLISHED_STEP_S, PUBLISHED = 447.4, (64, 2048)


class FreeScores:
    """`RewardPool` and `Scoring` in one, with a score for every response at no cost."""

    seconds = 0.0

    def begin_scoring(self, split: str, total: int) -> FreeScores:
        self.num_scored = 0
        return self

    def add(self, texts: Any, rows: np.ndarray, positions: np.ndarray) -> None:
        self.num_scored += len(rows)

    def advance(self) -> None:
        pass

    def collect(self) -> dict[str, np.ndarray]:
        nothing = np.zeros(self.num_scored)
        return {"score": np.arange(self.num_scored) % 3 / 2, "reward_failed": nothing, "reward_timeout": nothing}


def make_trainer(group: WorkerGroup, workers: int, samples: int, tokens: int) -> PPOTrainer:
    """Return the real trainer: GRPO with a reference and two optimizer steps per batch."""
    prompts = samples // ANSWERS
    cfg = load_config(
        [
            "algorithm.adv_estimator=grpo", f"data.train_batch_size={prompts}", f"data.max_response_length={tokens}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // 2}", f"actor_rollout_ref.rollout.n={ANSWERS}",
            "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768",
            "trainer.device=cpu", f"trainer.n_gpus_per_node={workers}", "trainer.total_training_steps=100",
        ]
    ).config  # fmt: skip
    plan = make_plan(cfg, prompts * 4)
    sizes = {"log_prob_gap_limit": 1.0, "attention_width": 1, "matmul_parameters": 1, "trained_parameters": 1}
    models = StepModels(Policy(group, plan.passes), None, InferenceModels(group), sizes)
    sampler = BatchOrder(prompts * 4, prompts, 0, True)
    rows = SimpleNamespace(sources=lambda: ["arithmetic"] * prompts * 4)
    rewards = Rewards(cfg.scoring, tokens, {"train": rows}, FreeScores(), None)  # type: ignore[dict-item]
    return PPOTrainer(cfg, plan, models, rewards, Experience(cfg, plan, models.policy, rewards, sampler))


def start_group(processes: int, ranks: int = 1) -> WorkerGroup:
    """Start one idle worker per device, spawned and connected as in a run; each stands for ``ranks`` ranks.

    The driver treats every eight ranks as a node, so that rows are transferred as between nodes.
    """
    cfg = load_config(["trainer.device=cpu", f"trainer.n_gpus_per_node={processes}"]).config
    device = get_device("cpu")
    start_ray(cfg.cluster)
    group = WorkerGroup("hybrid", reserve(cfg.cluster, device), device, threads=1)
    group.start("bench.idle_worker:IdleWorker", {"prompt_tokens": PROMPT_TOKENS, "ranks": ranks})
    group.workers = [worker for worker in group.workers for _ in range(ranks)]
    group.world = len(group.workers)
    group.nodes = [rank // DEVICES_PER_NODE for rank in range(group.world)]
    return group


def measure(trainer: PPOTrainer) -> dict[str, float]:
    """Return the medians over a few steps after a warm-up step."""
    trainer.step(1)
    steps = []
    for step in range(2, 2 + STEPS):
        started, busy = time.perf_counter(), time.process_time()
        metrics = trainer.step(step).metrics
        steps.append(metrics | {"wall": time.perf_counter() - started, "driver": time.process_time() - busy})
    names = ("wall", "driver", "timing_s/other", "perf/driver_bytes_per_sample")
    return {name: statistics.median(figures[name] for figures in steps) for name in names}


def share_of_published(workers: int, samples: int, seconds: float) -> str:
    """Return the driver's seconds as a share of the published step; "-" for a step of other devices or samples."""
    return f"{100 * seconds / PUBLISHED_STEP_S:.3f} %" if (workers, samples) == PUBLISHED else "-"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("workers", "1,8,32,64"), ("samples", "512,2048,4096"), ("tokens", "100,10000")):
        parser.add_argument(f"--{name}", type=numbers, default=numbers(default))
    parser.add_argument("--processes", type=int, default=64, help="maximum number; workers share them")
    options = parse(parser, argv, out="scale_cpu.md", workers=[2], processes=1, samples=[64], tokens=[10])
    rows = []
    for workers in options.workers:
        ranks = -(-workers // options.processes)
        processes = workers // ranks
        group = start_group(processes, ranks)
        try:
            for samples in options.samples:
                for tokens in options.tokens:
                    one = measure(make_trainer(group, workers, samples, tokens))
                    share = share_of_published(workers, samples, one["driver"])
                    finished_row(
                        rows,
                        f"| {workers} | {processes} | {samples} | {tokens} | {one['driver']:.3f} | {one['wall']:.2f} "
                        f"| {one['timing_s/other']:.4f} | {one['perf/driver_bytes_per_sample']:.0f} "
                        f"| {share} |",
                    )
        finally:
            group.kill()
            stop_ray()
    write(
        options,
        f"GRPO with a reference, two optimizer steps, {ANSWERS} answers a prompt; workers compute nothing; median of "
        f"{STEPS} steps. `driver CPU`: processor seconds of the driver process a step, all threads. `step`: wall clock "
        "with all workers on this machine's cores. The last column compares rows of 64 workers and 2048 samples with "
        f"the published step of that shape, {PUBLISHED_STEP_S} s (7B model, 10,426 tokens a sample).",
        table(TITLES, rows),
    )


if __name__ == "__main__":
    main()
