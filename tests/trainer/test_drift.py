"""What keeps growing is named once, and what goes up and down is not."""

import re
import subprocess
import sys

import numpy as np
import pytest

from rltrain.controller.processes import Node, Process, _process
from rltrain.run.watchers.drift import Drift, _History, _Look
from rltrain.trainer.metrics import Answered

LEAKS = """
import sys
kept = []
for line in sys.stdin:
    kept.append(bytearray(b"x" * (30 << 20)) if "memory" in line else [open("/dev/null") for _ in range(8)])
    print(flush=True)
"""
GIB, MIB = 2**30, 2**20
A_DAY = 1440  # looks, where one is taken every minute


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
        drift.before_step(step)
        found = drift.on_step(Answered(step, {}, None, 1))
        assert bool(found) == (step % 10 == 1)
        if found:
            leak(what)
            assert {"drift/driver_gb", "drift/scorer_gb", "drift/files", "drift/threads"} <= found.keys()
    (said,) = caplog.messages
    assert said.startswith(f"scorer (pid {pid} on node-a) ")
    assert re.search(words, said), said


def named(values):
    """The look at which a process that holds these bytes, minute by minute, is told to grow; None for never."""
    history = _History()
    for look, value in enumerate(values):
        history.add(_Look(look, value), "node-a", 64 * GIB)
        if history.growing("memory"):
            return look
    return None


@pytest.mark.parametrize("rate", [1, 5, 15, 100])
def test_a_slow_leak_is_named_within_a_day(rate):
    shaken = np.random.default_rng(0).normal(0, 5 * MIB, 2000)
    assert named([GIB + look * rate * MIB + shaken[look] for look in range(2000)]) < A_DAY


@pytest.mark.parametrize(
    "value",
    [
        lambda look: 0.3 * (look % 2),  # up and down
        lambda look: 0.01 * (look % 10),
        lambda look: 0.01 * (look % 65),
        lambda look: 0.001 * (look % 129),
        lambda look: 1 - 0.5**look,  # levels off
        lambda look: 0.05 * (1 - 0.99**look),
        lambda look: min(look, 100) / 200,
        lambda look: look / 2**14,  # so little
        lambda look: look >= 12,  # one step
        lambda look: look >= 700,
    ],
)
def test_what_does_not_keep_growing_is_not_named(value):
    assert named([GIB * (1 + value(look)) for look in range(2000)]) is None


def test_each_process_that_leaks_is_named_once(caplog):
    looks = iter(range(120))

    def come():
        look = next(looks)
        held = [look, max(look - 100, 0), 0] if look < 60 else [look, look - 60, 0]
        held += [max(look - 80, 0) * (1 + pid) for pid in range(6)]
        return [Node("node-a", [Process(pid, "scorer", GIB + 30 * MIB * leak, 1, 9) for pid, leak in enumerate(held)])]

    drift = Drift(lambda: come, {})
    for step in range(0, 1200, 10):
        drift.before_step(step)
        drift.on_step(Answered(step, {}, None, 1))
    first, second, *others = caplog.messages
    assert first.startswith("scorer (pid 0 on node-a) holds more and more memory")
    assert second.startswith("scorer (pid 1 on node-a) holds more and more memory")
    named = [pid for words in others for pid in re.findall(r"pid (\d)", words)]
    assert len(set(named)) == len(named)
    assert {"8", "7", "6"} <= set(named) <= set("345678")


def test_a_node_that_answers_late_loses_nothing(caplog):
    answers = iter(range(40))

    def come():
        look = next(answers)
        return [] if look % 5 == 4 else [Node("node-a", store_bytes=GIB + look * 30 * MIB)]

    drift = Drift(lambda: come, {})
    for step in range(0, 400, 10):
        drift.before_step(step)
        drift.on_step(Answered(step, {}, None, 1))
    assert len(caplog.messages) == 1


def test_a_node_that_has_not_answered_yet_is_left_out():
    drift = Drift(lambda: list, {})
    drift.before_step(1)
    made = Answered(1, {"perf/max_memory_allocated_gb": 3.0}, None, 1)
    assert drift.on_step(made)["drift/device_gb"] == 3.0
