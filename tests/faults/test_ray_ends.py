"""Ray dies during a run, or does not start."""

import os
import re
import resource
import signal

import pytest

from tests.clock import eventually
from tests.faults.plug import below, ended, error_of, gone, over, pids, wait_for_step
from tests.tiny import small_run

pytestmark = pytest.mark.usefixtures("own_ray")


@pytest.fixture
def command(tiny_model, arithmetic_files, tmp_path):
    return lambda **changes: small_run(tiny_model, arithmetic_files, tmp_path / "run", **changes)


def told(output: str) -> str:
    """Return the error, which must not contain Ray's own text."""
    assert "Traceback" not in output, output
    assert "state-dump" not in output
    return error_of(output)


@pytest.mark.long
@pytest.mark.fault("A killed raylet or GCS is named within seconds, exit 75, and nothing is left")
@pytest.mark.parametrize("part", ["raylet/raylet", "gcs/gcs_server"])
def test_a_killed_part_of_ray_ends_the_run_and_its_processes(start, command, shm, tmp_path, part):
    process = start(command(trainer__total_training_steps=100000), shm=shm)
    wait_for_step(tmp_path / "run", 2, process)
    started = below(process.pid)
    os.kill(pids(process.pid, part)[0], signal.SIGKILL)
    output = over(process, 75)
    name = part.partition("/")[2]
    assert re.match(rf"error: Ray's .*{name}.* has ended on this node .*Run the same command again", told(output))
    ended(started)
    eventually(lambda: not os.listdir(shm))


@pytest.mark.long
@pytest.mark.fault("A raylet killed while Ray starts is told without a traceback, exit 75, and nothing is left")
def test_a_raylet_killed_at_the_start_is_told(start, command, tmp_path):
    """Every raylet is killed, because Ray may report the first death as a slow start, which is retried."""
    process, killed = start(command()), set()

    def killed_all() -> bool:
        for pid in {*pids(process.pid, "raylet/raylet")} - killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        return process.poll() is not None

    eventually(killed_all)
    output = over(process, 75)
    assert killed
    assert "Ray" in told(output)
    assert "un the same command again" in told(output)
    gone(tmp_path)


@pytest.mark.long
@pytest.mark.fault("Too small a limit for files (ulimit -f) is named before Ray starts, exit 2")
def test_a_limit_for_files_that_ray_does_not_fit_is_named(start, command):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 << 10, limits[1]))
    try:
        process = start(command(), whole=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    output = over(process, 2)
    assert "ulimit -f unlimited" in told(output)
