"""The command as a user starts it, in its own process, from which nothing may be left."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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
def shm():
    """shm(): what has come into /dev/shm since the test began, and belongs to no process that runs."""
    before = set(Path("/dev/shm").iterdir())

    def left() -> set[Path]:
        new = set(Path("/dev/shm").iterdir()) - before
        mapped = [_text(file) for file in Path("/proc").glob("[0-9]*/maps")] if new else []
        return {file for file in new if not any(str(file) in maps for maps in mapped)}

    return left


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the process has ended, or is another user's
        return ""


@pytest.fixture
def trap(tmp_path):
    """A `Trap`: start the command with its environment, then lay it."""
    return Trap(tmp_path)
