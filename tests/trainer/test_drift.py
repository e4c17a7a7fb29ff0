"""What processes hold is a metric of every tenth step, so that a plot shows what grows."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest

from rltrain.controller.processes import Node, Process, _process
from rltrain.run.watchers.drift import Drift
from rltrain.trainer.metrics import Answered

LEAKS = """
import sys
kept = []
for line in sys.stdin:
    kept.append(bytearray(b"x" * (30 << 20)) if "memory" in line else [open("/dev/null") for _ in range(200)])
    print(flush=True)
"""
GIB, MIB = 2**30, 2**20


@pytest.fixture
def leaking():
    """leaking(what): a process that holds more of it after every call of the function that comes with it."""
    process = subprocess.Popen([sys.executable, "-c", LEAKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def leak(what):
        process.stdin.write(f"{what}\n")
        process.stdin.flush()
        process.stdout.readline()

    yield process.pid, leak
    process.communicate()


@pytest.mark.parametrize(("what", "metric", "growth"), [("memory", "scorer_gb", 30 / 1024), ("files", "files", 200)])
def test_what_a_process_leaks_is_seen_every_ten_steps(leaking, caplog, what, metric, growth):
    pid, leak = leaking
    leak(what)  # of files the process shall have more than this one
    drift = Drift(lambda: lambda: [Node([_process(pid, "scorer")])])
    seen = []
    for step in range(1, 52):
        drift.before_step(step)
        metrics = drift.on_step(Answered(step, {}, None, 1))
        assert bool(metrics) == (step % 10 == 1)
        if metrics:
            assert {"drift/driver_gb", "drift/scorer_gb", "drift/files", "drift/threads"} <= metrics.keys()
            seen.append(metrics[f"drift/{metric}"])
            leak(what)
    assert len(seen) == 6
    assert all(later - earlier > 0.9 * growth for earlier, later in pairwise(seen)), seen
    assert not caplog.messages  # whether that is too much is for whoever looks at the plot


def test_slow_steps_are_looked_at_once_a_minute(monkeypatch):
    clock = iter(range(0, 40 * 25, 25))
    monkeypatch.setattr("rltrain.run.watchers.drift.time.monotonic", lambda: 1000 + next(clock))
    drift = Drift(lambda: list)
    looked = []
    for step in range(1, 9):
        drift.before_step(step)
        if drift.on_step(Answered(step, {}, None, 1)):
            looked.append(step)
    assert looked == [1, 4, 7]


def test_the_largest_of_each_kind_over_all_nodes_is_told():
    def node(scale):
        sizes = {"worker": 3 * scale, "engine": 5, "ray": 1}
        processes = [Process(kind, size * GIB, 10 * size, 7 * size) for kind, size in sizes.items()]
        return Node([*processes, Process("worker", MIB, 1, 1)], store_bytes=scale * GIB, shm_bytes=2 * scale * GIB)

    drift = Drift(lambda: lambda: [node(1), node(4), node(2)])
    drift.before_step(1)
    metrics = drift.on_step(Answered(1, {"perf/max_memory_allocated_gb": 3.0}, None, 1))
    assert metrics.pop("drift/driver_gb") > 0
    assert metrics == {
        "drift/worker_gb": 12.0, "drift/engine_gb": 5.0, "drift/ray_gb": 1.0, "drift/threads": 120,
        "drift/files": max(84, len(os.listdir("/proc/self/fd")) - 1), "drift/object_store_gb": 4.0,
        "drift/shm_gb": 8.0, "drift/device_gb": 3.0,
    }  # fmt: skip


def test_a_node_that_has_not_answered_yet_is_left_out():
    drift = Drift(lambda: list)
    drift.before_step(1)
    made = Answered(1, {"perf/max_memory_allocated_gb": 3.0}, None, 1)
    assert drift.on_step(made)["drift/device_gb"] == 3.0
