"""Memory of processes is logged every ten steps, so that a plot shows which kind of process grows."""

import subprocess
import sys
from itertools import pairwise

import pytest

from rltrain.run.callbacks.drift import Drift
from rltrain.runtime.processes import own_memory_gb
from rltrain.trainer.metrics.step import Answered

LEAKS = """
import sys
kept = []
for line in sys.stdin:
    kept.append(bytearray(b"x" * (30 << 20)))
    print(flush=True)
"""


@pytest.fixture
def leaking():
    """A process that grows by 30 MiB with every call of the returned function."""
    process = subprocess.Popen([sys.executable, "-c", LEAKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def leak():
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()

    yield process.pid, leak
    process.communicate()


def test_memory_that_a_process_leaks_is_seen_every_ten_steps(leaking, clock):
    pid, leak = leaking
    drift = Drift(lambda: lambda: [{"drift/scorer_gb": own_memory_gb(pid)}], clock)
    seen = []
    for step in range(1, 52):
        drift.before_step(step)
        metrics = drift.on_step(Answered(step, {}, None, 1))
        assert bool(metrics) == (step % 10 == 1)
        if metrics:
            assert metrics["drift/driver_gb"] > 0
            seen.append(metrics["drift/scorer_gb"])
            leak()
    assert len(seen) == 6
    assert all(later - earlier > 0.9 * 30 / 1024 for earlier, later in pairwise(seen)), seen


def test_slow_steps_are_measured_once_a_minute(clock):
    drift = Drift(lambda: list, clock)
    measured = []
    for step in range(1, 9):
        clock.advance(25.0)
        drift.before_step(step)
        if drift.on_step(Answered(step, {}, None, 1)):
            measured.append(step)
    assert measured == [1, 4, 7]


def test_the_largest_over_all_nodes_is_the_metric():
    nodes = [{"drift/worker_gb": 3.0, "drift/ray_gb": 1.0}, {"drift/worker_gb": 12.0}, {"drift/worker_gb": 6.0}]
    drift = Drift(lambda: lambda: nodes)
    drift.before_step(1)
    metrics = drift.on_step(Answered(1, {}, None, 1))
    assert metrics.pop("drift/driver_gb") > 0
    assert metrics == {"drift/worker_gb": 12.0, "drift/ray_gb": 1.0}
