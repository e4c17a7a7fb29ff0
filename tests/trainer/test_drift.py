"""What keeps growing is named once, and what goes up and down is not."""

import re
import subprocess
import sys

import pytest

from rltrain.controller.processes import Node, _process
from rltrain.trainer.drift import Drift

LEAKS = """
import sys
kept = []
for line in sys.stdin:
    kept.append(bytearray(b"x" * (30 << 20)) if "memory" in line else [open("/dev/null") for _ in range(8)])
    print(flush=True)
"""
GIB = 2**30


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


@pytest.mark.fault("A process that leaks memory or files is named, once, with how long it can go on")
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("memory", r"holds more and more memory: 0.0\d GiB at step 1, 0.3\d GiB at step 111, 3.\d MiB a step .*"
                   r"drift/scorer_gb.* 4.0 GiB are free there, enough for about 1,\d{3} steps"),
        ("files", r"has more and more files: \d+ at step 1, \d\d+ at step 111 \(drift/files\)"),
    ],
)  # fmt: skip
def test_a_process_that_leaks_is_named_once(leaking, caplog, what, words):
    pid, leak = leaking

    def look():
        node = Node("node-a", [_process(pid, "scorer")], free_bytes=4 * GIB)
        return lambda: [node]

    drift = Drift(look, {})
    for step in range(1, 200):
        drift.begin(step)
        found = drift.metrics(step, {})
        assert bool(found) == (step % 10 == 1)
        if found:
            leak(what)
            assert {"drift/driver_gb", "drift/scorer_gb", "drift/files", "drift/threads"} <= found.keys()
    (said,) = caplog.messages
    assert said.startswith(f"scorer (pid {pid} on node-a) ")
    assert re.search(words, said), said


@pytest.mark.parametrize(
    "values",
    [
        [GIB * (1 + 0.3 * (look % 2)) for look in range(24)],  # up and down
        [GIB * (2 - 0.5**look) for look in range(24)],  # levels off
        [GIB + look * 2**20 for look in range(24)],  # so little
        [GIB] * 12 + [2 * GIB] * 12,  # one step
    ],
)
def test_what_does_not_keep_growing_is_not_named(values, caplog):
    nodes = iter([Node("node-a", store_bytes=int(value)) for value in values])
    drift = Drift(lambda: lambda: [next(nodes)], {})
    for step in range(0, 240, 10):
        drift.begin(step)
        drift.metrics(step, {})
    assert caplog.messages == []


def test_a_node_that_has_not_answered_yet_is_left_out():
    drift = Drift(lambda: list, {})
    drift.begin(1)
    assert drift.metrics(1, {"perf/max_memory_allocated_gb": 3.0})["drift/device_gb"] == 3.0
