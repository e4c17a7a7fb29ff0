"""A raylet that is stopped: nothing of Ray answers, and nothing is gone."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, ray
from rltrain.controller import cluster
cluster._GOODBYE_S = 2
ray.init(num_cpus=1, include_dashboard=False, address="local")
(raylet,) = ray._private.worker._global_node.all_processes["raylet"]
os.kill(raylet.process.pid, signal.SIGSTOP)
cluster.stop_ray()
print("over:", not os.path.exists(f"/proc/{raylet.process.pid}"))
"""


@pytest.mark.long
@pytest.mark.fault("A run that has made its steps ends, though its raylet is stopped")
def test_a_stopped_raylet_does_not_keep_a_run_from_its_end(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert "over: True" in found.stdout, found.stderr
