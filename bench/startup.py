"""Start-up time of Ray, devices, idle workers and their process group, and the driver's share of it.

    python -m bench.startup [--workers 1,4,8,16]

Workers are those of `bench.scale`: they import the modules that a run's workers import before a model is loaded,
connect, and wait. On this machine they share its cores, so wall-clock time is mostly their imports; on a cluster every
node does its own. Two costs grow with the cluster on any hardware: the driver's processor time, which is extrapolated,
and the rendezvous of all ranks, which is not, because here it cannot be separated from waiting for a core. The default
is at most 16 workers: each takes a third of a GB, and on two cores they would wait for each other for minutes. Writes
bench/results/startup_cpu.md.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

import numpy as np
import ray

from bench.scale import numbers
from bench.table import finished_row, parse, table, write
from rltrain.common.device import get_device
from rltrain.config.load import load_config
from rltrain.runtime.cluster import reserve, start_ray
from rltrain.runtime.group import WorkerGroup
from rltrain.runtime.ray_watchdog import stop_ray

# Devices of the largest extrapolated run.
LARGEST = 384


def processor_s(pid: int) -> float:
    """Return the processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def memory_mb(pid: int) -> float:
    """Return the memory of a process in MB; shared pages count in part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000


def measure(workers: int) -> dict[str, float]:
    """Return the seconds of each part of a start, in wall-clock time and of the driver's processor."""
    cfg = load_config(["trainer.device=cpu", f"trainer.n_gpus_per_node={workers}"]).config
    device, times, busy = get_device("cpu"), [time.perf_counter()], [own_s()]

    def now() -> None:
        times.append(time.perf_counter())
        busy.append(own_s())

    start_ray(cfg.cluster)
    now()
    try:
        placement = reserve(cfg.cluster, device)
        now()
        group = WorkerGroup("hybrid", placement, device, threads=1)
        started = [worker.identity.remote() for worker in group.workers]
        pids = [identity["pid"] for identity in ray.get(started)]
        now()
        group.start("bench.idle_worker:IdleWorker", {"prompt_tokens": 1})
        now()
        seconds, driver = np.diff(times), np.diff(busy)
        parts = {"ray": seconds[0], "reserve": seconds[1], "start": seconds[2], "connect": seconds[3]}
        return parts | {
            "driver": driver[1:].sum(),
            "worker": sum(map(processor_s, pids)) / workers,
            "memory": sum(map(memory_mb, pids)) / workers,
        }
    finally:
        stop_ray()


def own_s() -> float:
    """Return the processor seconds of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=numbers, default=[1, 4, 8, 16])
    options = parse(parser, argv, out="startup_cpu.md", workers=[1])
    names = ("ray", "reserve", "start", "connect", "driver", "worker", "memory")
    measured, rows = [], []
    for workers in options.workers:
        measured.append(measure(workers))
        finished_row(rows, f"| {workers} | " + " | ".join(f"{measured[-1][name]:.2f}" for name in names) + " |")
    notes = ""
    if len(measured) > 1:
        slope, base = np.polyfit(options.workers, [parts["driver"] for parts in measured], 1)
        notes = (
            f"Extrapolated, not measured: {LARGEST} workers take {base + slope * LARGEST:.1f} s of the driver's "
            f"processor, by a straight line through these rows ({1000 * slope:.0f} ms a worker). The meeting is not "
            f"extrapolated, and nothing above {max(options.workers)} workers was started: each takes "
            f"{measured[-1]['memory'] / 1000:.2f} GB, and all share {len(os.sched_getaffinity(0))} cores, so what the "
            "meeting itself costs cannot be told from waiting for a core. How long a large "
            "cluster takes to meet is not known."
        )
    write(
        options,
        "Seconds on the clock until Ray is there (`Ray`), its devices are reserved (`devices`), all worker processes "
        "have imported torch and answer (`processes`), and have met and built an empty worker (`meeting`), with all "
        "of them on this machine's cores. `driver CPU`: processor seconds of the driver after Ray's own start. `worker "
        "CPU` and `worker MB`: of one worker.",
        table(["workers", "Ray", "devices", "processes", "meeting", "driver CPU", "worker CPU", "worker MB"], rows),
        notes,
    )


if __name__ == "__main__":
    main()
