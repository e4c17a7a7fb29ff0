"""A long supervised run with repeated faults, compared with an undisturbed run.

    python -m bench.soak --steps 300 --seed 0

Two workers train a tiny actor and critic with GAE and save every few steps. Every 20 to 40 steps a random process of
the disturbed run gets SIGKILL, SIGTERM or SIGSTOP at a random moment: a worker, the driver, a scorer, the reward
worker, the raylet, the GCS. A raylet or GCS that the run does not need stays stopped until the next fault.
`rltrain.supervise` restarts the run. Both runs must have the same weights, optimizer state, sampler and responses, byte
for byte, and no process may grow in memory. Not included: a stopped scorer, whose response is lost and scored by
`reward.on_error`. Exits with 1 if something differs, or if a faulty worker ends the run without a message.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.table import parse, table, write
from rltrain.common.attempt import NO_REPORT
from rltrain.common.errors import DataError
from rltrain.run.report.table import read_metrics
from tests.faults.plug import below
from tests.tiny import save_tiny_model, small_run, write_arithmetic

# Role -> words of its command line.
WHO = {
    "worker": "ray::_Host",
    "driver": "rltrain.main_ppo",
    "reward worker": "ray::RewardWorker",
    "raylet": "raylet/raylet",
    "gcs": "gcs/gcs_server",
}
# Role and signal of each fault. A stopped driver is continued after a while, because nothing watches it.
FAULTS = [
    ("worker", signal.SIGKILL), ("driver", signal.SIGTERM), ("raylet", signal.SIGKILL), ("worker", signal.SIGSTOP),
    ("scorer", signal.SIGKILL), ("driver", signal.SIGKILL), ("gcs", signal.SIGKILL), ("worker", signal.SIGTERM),
    ("driver", signal.SIGSTOP), ("reward worker", signal.SIGKILL), ("raylet", signal.SIGSTOP), ("gcs", signal.SIGSTOP),
    ("scorer", signal.SIGTERM), ("raylet", signal.SIGTERM), ("gcs", signal.SIGTERM),
]  # fmt: skip
_DRIVER_STOPPED_S = 5
# After this many steps the run counts as unaffected by a fault.
_GOES_ON = 10
_POLL_S = 0.05
# Metrics in which two equal runs differ: times, rates, memory, and the engine that was free for a prompt.
_OF_THE_CLOCK = ("timing", "perf/", "drift/", "reward/compute_s", "global_seqlen/min", "global_seqlen/max")
_MEMORY_LIMIT_MB = 1.0


@dataclass
class Run:
    """A run folder, its process, and its observed memory."""

    folder: Path
    process: subprocess.Popen
    memory: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Name of a process -> step, MB."""

    def step(self) -> int:
        """Return the newest step with metrics; 0 before the first, and while the file is being replaced."""
        try:
            return max((line["step"] for line in read_metrics(self.folder)), default=0)
        except (DataError, ValueError):
            return 0

    def sample_memory(self, step: int) -> None:
        """Record the resident memory of every process of the run, by role."""
        for name, pids in self.processes().items():
            for number, pid in enumerate(pids):
                try:
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                except OSError:  # it has ended
                    continue
                label = f"{name} {number}" if len(pids) > 1 else name
                self.memory.setdefault(label, []).append((step, pages * os.sysconf("SC_PAGE_SIZE") / 1e6))

    def processes(self) -> dict[str, list[int]]:
        """Return role -> pids, in the order of their numbers."""
        commands = below(self.process.pid) | {self.process.pid: " ".join(map(str, self.process.args))}
        named = {
            name: sorted(pid for pid, words in commands.items() if word in words and "rltrain.supervise" not in words)
            for name, word in WHO.items()
        }
        named["scorer"] = [pid for parent in named["reward worker"] for pid in sorted(below(parent))]
        return named


def main(argv: list[str] | None = None) -> int:
    """Run both, compare them, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="seed of faults, processes and times")
    parser.add_argument("--every", type=int, nargs=2, default=(20, 40), help="steps between two faults, from and to")
    parser.add_argument("--spare", nargs="*", default=[], help="processes without faults: raylet, gcs, …")
    options = parse(
        parser, argv, out="soak_cpu.md", steps=8, every=(6, 6), spare=sorted({who for who, _ in FAULTS} - {"driver"})
    )
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    words(folder, "quiet", options.steps)  # prepares the model once, before both runs need it
    # The two runs are concurrent, because both mostly wait.
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(undisturbed, folder, options.steps)
        hurt, faults = disturbed(folder, options)
        quiet = waiting.result()
    problems = differences(quiet.folder, hurt.folder, options.steps)
    growth = {name: slope(sizes) for name, sizes in sorted(quiet.memory.items())}
    problems += [f"{name} grows by {mb:.2f} MB in 100 steps" for name, mb in growth.items() if mb > _MEMORY_LIMIT_MB]
    problems += [
        f"step {fault['step']}: {fault['signal']} to {fault['to']}: {NO_REPORT}"
        for fault in faults
        if "worker" in fault["to"] and fault["cause"] == NO_REPORT
    ]
    lost = sum(fault["steps made again"] for fault in faults)
    verdict = "; ".join(problems) or "weights, optimizer state, sampler, answers and metrics are equal"
    title = (
        f"{options.steps} steps of two workers with a critic; {len(faults)} faults, {lost} steps made again. Beside an "
        f"undisturbed run: {verdict}."
    )
    rows = [f"| {' | '.join(str(value) for value in fault.values())} |" for fault in faults]
    notes = "Memory of the undisturbed run, MB in 100 steps (second half): " + ", ".join(
        f"{name} {mb:+.2f}" for name, mb in growth.items()
    )
    write(options, title, table(list(faults[0]) if faults else ["none"], rows), notes + ".")
    if problems:
        sys.stdout.write(f"\nkept: {folder}\n")
        return 1
    shutil.rmtree(folder)
    return 0


def words(folder: Path, name: str, steps: int) -> list[str]:
    """Return the command of a run."""
    model = folder / "model"
    if not model.exists():
        save_tiny_model(model)
        write_arithmetic(folder / "train.parquet", range(24))
        write_arithmetic(folder / "test.parquet", range(24, 30))
    changes = {
        "algorithm__adv_estimator": "gae", "critic__model__path": model, "critic__ppo_mini_batch_size": 2,
        "critic__ppo_max_token_len_per_gpu": 64, "critic__optim__lr": 5e-3, "critic__optim__eps": 1e-2,
        "trainer__n_gpus_per_node": 2, "trainer__total_training_steps": steps, "trainer__save_freq": 5,
        "trainer__max_actor_ckpt_to_keep": 2, "trainer__async_save": True, "trainer__hang_floor_s": 20,
    }  # fmt: skip
    files = (folder / "train.parquet", folder / "test.parquet")
    return [sys.executable, "-m", "rltrain.main_ppo", *small_run(model, files, folder / name, **changes)]


def begin(folder: Path, name: str, command: list[str]) -> Run:
    """Start a command; its output goes to NAME.log."""
    with open(folder / f"{name}.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    return Run(folder / name, process)


def undisturbed(folder: Path, steps: int) -> Run:
    """Run undisturbed and sample the memory."""
    run = begin(folder, "quiet", words(folder, "quiet", steps))
    last_step = 0
    while run.process.poll() is None:
        # Processes already end during the last step.
        if last_step < (step := run.step()) < steps:
            run.sample_memory(last_step := step)
        time.sleep(10 * _POLL_S)
    if run.process.returncode:
        raise SystemExit(f"the undisturbed run has failed, see {folder}/quiet.log")
    return run


def disturbed(folder: Path, options: argparse.Namespace) -> tuple[Run, list[dict]]:
    """Run with faults; return the run and its faults."""
    supervise = [sys.executable, "-m", "rltrain.supervise", "--wait-s", "1", "--"]
    run = begin(folder, "hurt", [*supervise, *words(folder, "hurt", options.steps)])
    draw = random.Random(options.seed)
    deck: list[tuple[str, signal.Signals]] = []
    faults: list[dict] = []
    at = draw.randint(*options.every)
    while run.process.poll() is None:
        if (step := run.step()) < at:
            time.sleep(_POLL_S)
            continue
        # The fault comes at a random moment of a step or a save.
        time.sleep(draw.uniform(0, 0.5))
        deck = deck or [fault for fault in draw.sample(FAULTS, len(FAULTS)) if fault[0] not in options.spare]
        target, number = deck.pop()
        if not (pids := run.processes()[target]):
            continue
        attempts = len(attempts_of(run))
        started, victim = time.monotonic(), draw.choice(pids)
        print(f"step {step}: {number.name} to {target} {victim}", flush=True)
        os.kill(victim, number)
        if (target, number) == ("driver", signal.SIGSTOP):
            time.sleep(_DRIVER_STOPPED_S)
            os.kill(victim, signal.SIGCONT)
        harmless = target == "scorer" or (target, number) == ("driver", signal.SIGSTOP)
        outcome, lost = ("goes on", "") if harmless else wait_for_end(run, attempts, step + _GOES_ON)
        resumed = step if outcome == "goes on" else step_after(run)
        faults.append(
            {
                "step": step, "signal": number.name, "to": target, "exit code": outcome, "cause": lost,
                "seconds until the next step": f"{time.monotonic() - started:.0f}",
                "steps made again": max(0, step - resumed),
            }
        )  # fmt: skip
        at = step + draw.randint(*options.every)
    if run.process.returncode:
        raise SystemExit(f"the supervisor has ended with {run.process.returncode}, see {folder}/hurt.log")
    return run, faults


def attempts_of(run: Run) -> list[dict]:
    """Return the lines of attempts.jsonl."""
    file = run.folder / "attempts.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_end(run: Run, before: int, step: int) -> tuple[str, str]:
    """Return exit code and cause of the attempt that a fault has ended; "goes on" if it reached ``step`` instead."""
    while run.process.poll() is None and len(attempts_of(run)) <= before:
        if run.step() >= step:
            return "goes on", ""
        time.sleep(_POLL_S)
    if len(attempts := attempts_of(run)) <= before:
        return "none", ""
    cause = attempts[before]["cause"].replace("|", "/")
    return str(attempts[before]["exit_code"]), cause if len(cause) < 160 else cause[:157] + "…"


def step_after(run: Run) -> int:
    """Return the checkpoint from which the run resumes, once it has made a step."""
    start = max((int(folder.name.rpartition("_")[2]) for folder in run.folder.glob("global_step_*")), default=0)
    ended_at = time.time()
    while run.process.poll() is None:
        # The metrics of repeated steps exist until the run has started.
        with suppress(OSError):
            if (run.folder / "metrics.jsonl").stat().st_mtime > ended_at and run.step() > start:
                break
        time.sleep(_POLL_S)
    return start


def differences(quiet: Path, hurt: Path, steps: int) -> list[str]:
    """Return all differences, file by file and metric by metric."""
    problems = []
    # Shards and exports; files that hold a time or a path cannot be equal.
    for pattern in (f"global_step_{steps}/**/*", "samples/*.parquet"):
        ours, theirs = ({str(path.relative_to(top)) for path in top.glob(pattern)} for top in (quiet, hurt))
        problems += [f"{name} is in one run alone" for name in sorted(ours ^ theirs)]
        for name in sorted(ours & theirs):
            is_binary = name.endswith((".distcp", ".safetensors", ".npz", ".parquet"))
            if is_binary and (quiet / name).read_bytes() != (hurt / name).read_bytes():
                problems.append(f"{name} differs")
    # The progress files contain the metrics of their step; only metrics without times are compared.
    progress = [json.loads((run / f"global_step_{steps}" / "progress.json").read_text()) for run in (quiet, hurt)]
    for record in progress:
        record["metrics"] = unclocked(record.get("metrics") or {})
    if progress[0] != progress[1]:
        problems.append("progress.json differs")
    lines = [{line["step"]: line for line in read_metrics(run)} for run in (quiet, hurt)]
    if lines[0].keys() != lines[1].keys():
        problems.append("metrics.jsonl has not the same steps")
    for step in sorted(lines[0].keys() & lines[1].keys()):
        first, second = (unclocked(of_run[step]) for of_run in lines)
        if first != second:
            differ = [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]
            problems.append(f"step {step}: {', '.join(sorted(differ)[:5])}")
    return problems[:20]


def unclocked(metrics: dict) -> dict:
    """Return the metrics that equal runs share."""
    return {name: value for name, value in metrics.items() if not name.startswith(_OF_THE_CLOCK)}


def slope(seen: list[tuple[int, float]]) -> float:
    """Return the MB per 100 steps over the second half of the run, because the first half fills caches."""
    steps, sizes = np.array(seen[len(seen) // 2 :]).T
    return float(np.polyfit(steps, sizes, 1)[0] * 100) if len(steps) > 20 else 0.0


if __name__ == "__main__":
    sys.exit(main())
