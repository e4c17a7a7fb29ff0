"""The command as a user starts it, in a separate process, which must leave nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.conftest import cluster, joined  # noqa: F401 - fixtures
from tests.faults import nursery
from tests.faults.forked import Forked
from tests.faults.plug import Trap, processes_of
from tests.ranks import MARK


@pytest.fixture
def start(tmp_path):
    """start(args, module="rltrain.main_ppo", **environment) -> Popen. All processes that it started end with
    the test.
    """
    processes = []

    def start(
        args: list[str],
        module: str = "rltrain.main_ppo",
        shm: Path | None = None,
        inside: Sequence[str] = (),
        whole: bool = False,
        whole_workers: bool = False,
        **environment: str,
    ) -> subprocess.Popen | Forked:
        variables = {**os.environ, MARK: str(tmp_path), **environment}
        if inside or whole or module != "rltrain.main_ppo":
            process = subprocess.Popen(
                [*inside, sys.executable, "-m", module, *map(str, args)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=variables,
            )
        else:
            variables |= {} if whole_workers else nursery.variables()
            process = Forked([*map(str, args)], variables, str(shm or ""))
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
    """The run starts a separate Ray, although other tests share one."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def shm(tmp_path):
    """A folder that replaces /dev/shm for the started processes, because other programs use the machine's."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def trap(tmp_path):
    """A `Trap`: start the command with its environment, then set it."""
    return Trap(tmp_path)
