"""Reward pool: cost of an ordinary response, and the cost of a response that hangs for the others.

    python -m bench.rewards            prints the table and writes it to bench/results/

2,048 responses on two workers, scored by the MATH scorer inside a custom reward function; every hundredth response
hangs and is killed at its deadline.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from bench.table import parse, table, write
from rltrain.common.env import prepare_driver
from rltrain.config.schema import CustomRewardConfig, RewardConfig, ScoringConfig
from rltrain.data.rows import read_rows
from rltrain.rewards.custom import CustomReward
from rltrain.rewards.processes.pool import RewardPool
from rltrain.rewards.processes.slot import ScoringSlot
from rltrain.rewards.scorers.math_boxed import math_boxed

WORKERS, TIMEOUT_S = 2, 1.0
REWARD = """
from rltrain.rewards.scorers.math_boxed import math_boxed

def compute_score(data_source, solution_str, ground_truth, extra_info):
    while solution_str == "hostile":
        pass
    return math_boxed(solution_str, ground_truth, extra_info)
"""


def easy(number: int) -> str:
    """Return a response of a few thousand characters whose box is right."""
    return (
        f"{'We add the two numbers and check the sum once more. ' * 40}"
        f"The answer is \\boxed{{\\dfrac{{{number}}}{{7}}}}."
    )


def wall_clock(pool: RewardPool, texts: list[str]) -> float:
    """Return the pool's seconds for these responses."""
    reference, every = ray.put(texts), np.arange(len(texts))
    started = time.perf_counter()
    scoring = pool.begin_scoring("train", len(texts))
    scoring.add(reference, every, every)
    columns = scoring.collect()
    seconds = time.perf_counter() - started
    assert columns["score"].sum() == sum(text != "hostile" for text in texts)
    assert columns["reward_timeout"].sum() == texts.count("hostile")
    return seconds


def in_this_process(texts: list[str]) -> float:
    """Return the seconds of the scorer alone, one after the other."""
    started = time.perf_counter()
    for number, text in enumerate(texts):
        math_boxed(text, f"\\frac{{{number}}}{{7}}", {})
    return time.perf_counter() - started


def replacement(custom: CustomReward) -> float:
    """Return the seconds from a killed response's deadline until the new process has scored the next one."""
    with ScoringSlot(custom, TIMEOUT_S) as slot:
        slot.score("math", easy(1), "1", {})
        started = time.perf_counter()
        slot.score("math", "hostile", "1", {})
        slot.score("math", easy(1), "1", {})
        return time.perf_counter() - started - TIMEOUT_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--answers", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    options = parse(parser, out="rewards_cpu.md", answers=80, repeats=1)
    answers, repeats = options.answers, options.repeats

    def median(action: Callable[[], float]) -> float:
        return statistics.median(action() for _ in range(repeats))

    prepare_driver()
    ray.init("local", num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    easies = [easy(number) for number in range(answers)]
    mixed = ["hostile" if number % 100 == 50 else text for number, text in enumerate(easies)]
    hostile = mixed.count("hostile")
    with tempfile.TemporaryDirectory() as folder:
        reward = Path(folder, "reward.py")
        reward.write_text(REWARD)
        records = [
            {
                "data_source": "math",
                "prompt": [{"role": "user", "content": "?"}],
                "reward_model": {"style": "rule", "ground_truth": f"\\frac{{{number}}}{{7}}"},
            }
            for number in range(answers)
        ]
        pq.write_table(pa.Table.from_pylist(records), Path(folder, "rows.parquet"))
        custom = CustomReward(str(reward))
        splits = {"train": ray.put(read_rows(str(Path(folder, "rows.parquet"))))}
        cfg = ScoringConfig(CustomRewardConfig(str(reward)), RewardConfig(timeout_s=TIMEOUT_S))
        pool = RewardPool(cfg, WORKERS, splits)
        pool.score_truths("train", [0])
        alone, clean = median(lambda: in_this_process(easies)), median(lambda: wall_clock(pool, easies))
        attacked = wall_clock(pool, mixed)
        pool.shutdown()
        back = median(lambda: replacement(custom))
    ray.shutdown()
    least = clean + hostile * TIMEOUT_S / WORKERS
    rows = [
        ("scorer alone, in one process: ms an answer", 1e3 * alone / answers),
        (f"pool of {WORKERS}: ms of a worker an answer", 1e3 * clean * WORKERS / answers),
        ("overhead of process, socket and Ray: ms an answer", 1e3 * (clean * WORKERS - alone) / answers),
        (f"{answers} easy answers: s", clean),
        (f"the same with {hostile} hostile: s", attacked),
        (f"least possible: those {hostile} deadlines of {TIMEOUT_S:g} s over {WORKERS} workers: s", least),
        ("a hostile answer delays the batch by: s", (attacked - clean) / hostile),
        ("deadline passed until the next answer is scored: s", back),
    ]  # fmt: skip
    write(
        options,
        f"{answers} answers of {len(easies[0])} characters, {WORKERS} workers, reward.timeout_s={TIMEOUT_S:g}; "
        f"median of {repeats}, the hostile batch once.",
        table(["what", "measured"], [f"| {name} | {value:.3f} |" for name, value in rows]),
    )


if __name__ == "__main__":
    main()
