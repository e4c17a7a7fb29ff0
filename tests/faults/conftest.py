"""The command as a user starts it, in its own process, from which nothing may be left."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.e2e.conftest import cluster, joined  # noqa: F401 - fixtures
from tests.faults.plug import Trap, processes_of


@pytest.fixture
def start(tmp_path):
    """start(args, module, **environment) -> Popen. All that it started ends with the test.

    inside: words before the command.
    """
    processes = []

    def start(
        args: list[str], module: str = "rltrain.main_ppo", inside: Sequence[str] = (), **environment: str
    ) -> subprocess.Popen:
        process = subprocess.Popen(
            [*inside, sys.executable, "-m", module, *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "RLTRAIN_TEST": str(tmp_path), **environment},
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
    for line in processes_of(tmp_path):
        os.kill(int(line.split()[0]), signal.SIGKILL)


@pytest.fixture
def own_ray(monkeypatch):
    """The run starts its own Ray, although others join one."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def shm(tmp_path):
    """The /dev/shm of what is started inside of `own_shm` of it: that of the machine has what others make beside."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def trap(tmp_path):
    """A `Trap`: start the command with its environment, then lay it."""
    return Trap(tmp_path)
