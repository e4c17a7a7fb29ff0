"""A stopped raylet: nothing of Ray responds, but no process is gone. After a kill of the raylet Ray's library would end
the process with exit code 1 and without a message."""

import json
import os
import re
import subprocess
import sys

import pytest

from rltrain.common.attempt import ATTEMPT
from tests.faults.plug import ended

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("own_ray")]

PROGRAM = """
import os, signal, sys, ray
from rltrain.runtime import ray_watchdog
from rltrain.runtime.hang import Deadlines
from rltrain.common.errors import WorkerLost
ray_watchdog._SHUTDOWN_S = 2
ray.init(num_cpus=1, include_dashboard=False, address="local", log_to_driver=False)
node = ray._private.worker._global_node
kept = ray.put(bytearray(1 << 20))
(raylet,), (gcs,) = (node.all_processes[name] for name in ("raylet", "gcs_server"))
print("pids:", raylet.process.pid, gcs.process.pid, flush=True)
"""
GOODBYE = """
with ray_watchdog.cleanup_after_exit(local=True):
    os.kill(raylet.process.pid, signal.SIGSTOP)
    ray_watchdog.stop_ray()
print("over", flush=True)
os._exit(3)
"""
CUT_OFF = """
with ray_watchdog.cleanup_after_exit(local=True), ray_watchdog.watch_ray(Deadlines(), local=True):
    try:
        with ray_watchdog.require_heartbeat():
            raise WorkerLost("rank 1 of 2 hangs")
    except WorkerLost:
        os._exit(1)  # as Ray's library may at any call
"""


def run(end: str, **environment: str) -> tuple[subprocess.CompletedProcess, list[int]]:
    """Return how the run ends, and the pids of its raylet and GCS."""
    words, env = [sys.executable, "-c", PROGRAM + end], {**os.environ, **environment}
    process = subprocess.run(words, capture_output=True, text=True, timeout=100, env=env)
    pids = re.search(r"pids: (\d+) (\d+)", process.stdout)
    assert pids, process.stderr
    return process, [int(pids[1]), int(pids[2])]


@pytest.mark.fault("A run that has made its steps ends with its own exit code, though its raylet is stopped")
def test_a_stopped_raylet_does_not_keep_a_run_from_its_end():
    found, pids = run(GOODBYE)
    assert found.returncode == 3, found.stderr
    assert "over" in found.stdout
    assert "error:" not in found.stderr
    ended(pids)


@pytest.mark.fault("A run that Ray's library ends while it cleans up after an error has told the error, with its code")
def test_an_error_is_told_before_anything_of_ray_is_ended(tmp_path):
    found, pids = run(CUT_OFF, **{ATTEMPT: str(tmp_path / "told")})
    assert "error: rank 1 of 2 hangs\n" in found.stderr
    assert found.stderr.count("error:") == 1
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert {"error": "rank 1 of 2 hangs", "passing": False, "ends": 75} in told
    ended(pids)
