"""A worker dies, or lacks memory, in the middle of each phase: which of them it is does not matter to what follows."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from rltrain.run.report.table import read_metrics
from tests.faults.plug import PATIENCE_S, Trap, alive, below, error_of, wait_for_step, wait_until, worker_pids
from tests.tiny import save_tiny_model, small_run

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("own_ray")]


def steps(model, files, folder):
    return small_run(model, files, folder, trainer__save_freq=2, trainer__total_training_steps=100000)


@pytest.fixture
def words(tiny_model, arithmetic_files, tmp_path):
    return steps(tiny_model, arithmetic_files, tmp_path / "run")


@pytest.mark.fault("A worker killed while it loads, syncs, generates, computes, updates or saves is named, exit 75")
@pytest.mark.parametrize("phase", Trap.PHASES)
def test_a_worker_killed_in_a_phase_is_named_and_none_is_left(start, words, trap, shm, tmp_path, phase):
    if phase == "load":
        trap.lay(phase, signal.SIGKILL)
    process = start(words, shm=shm, **trap.environment)
    if phase != "load":
        wait_for_step(tmp_path / "run", 3, process)
        # The first is written beside the steps, which may be faster.
        assert wait_until(lambda: list((tmp_path / "run").glob("global_step_*")))
        trap.lay(phase, signal.SIGKILL)
    assert wait_until(lambda: trap.caught or process.poll() is not None)
    killed, started = time.monotonic(), below(process.pid)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - killed < 60
    assert process.returncode == 75, output
    message = error_of(output)
    assert re.match(
        rf"error: hybrid worker, rank 0 of 1 \(pid {trap.caught} on .*\), in \w+\.?\w*: the process died", message
    )
    assert "Run the same command again" in message
    assert "Traceback" not in output
    assert wait_until(lambda: not alive(started), 40), [started[pid] for pid in alive(started)]
    assert wait_until(lambda: not os.listdir(shm), 10), os.listdir(shm)
    if phase == "save":  # half a checkpoint is none
        saved = max(int(folder.name.rpartition("_")[2]) for folder in (tmp_path / "run").glob("global_step_*"))
        again = start([*words, f"trainer.total_training_steps={saved + 1}"])
        output, _ = again.communicate(timeout=PATIENCE_S)
        assert again.returncode == 0, output
        assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(1, saved + 2))


@pytest.fixture
def large(arithmetic_files, tmp_path):
    """A run whose gradients, and what gathers its weights, are tensors of MiB."""
    return steps(save_tiny_model(tmp_path / "model", width=512), arithmetic_files, tmp_path / "run")


@pytest.mark.fault("A worker that the host has no memory for says so, whatever it does, exit 75")
@pytest.mark.parametrize("phase", [*(each for each in Trap.PHASES if each != "stage"), "save, waiting"])
def test_a_worker_without_host_memory_says_what_to_do(start, large, trap, tmp_path, phase):
    trapped, waits = phase.partition(",")[0], ["trainer.async_save=False"] if "waiting" in phase else []
    if phase == "load":
        trap.lay(trapped, "memory")
    process = start([*large, *waits], **trap.environment, **Trap.MALLOC)
    if phase != "load":  # and not the trial of the model's family, which the driver makes
        wait_for_step(tmp_path / "run", 1, process)
        trap.lay(trapped, "memory")
    assert wait_until(lambda: trap.caught or process.poll() is not None)
    began, started = time.monotonic(), below(process.pid)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - began < 60
    assert process.returncode == 75, output
    message = error_of(output)
    # The next call that asks for memory, be it the one that is caught or a save beside it.
    where = rf"hybrid worker, rank 0 of 1 \(pid {trap.caught} on .*\), in [\w.]+"
    assert re.match(rf"error: {where}: the host has no memory left", message), message
    assert "Give it (or the container) more" in message
    assert "Run the same command again" in message
    assert "Traceback" not in output
    assert wait_until(lambda: not alive(started), 40), [started[pid] for pid in alive(started)]


@pytest.fixture
def group():
    """A control group of 4 MiB: the file that a pid is written into. What a process has already does not count."""
    first = Path("/sys/fs/cgroup/memory")  # of version 1; version 2 has one tree for everything
    folder = (first if first.exists() else first.parent) / f"rltrain_{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if first.exists() else "memory.max")).write_text(str(4 << 20))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"a control group with a limit of memory cannot be made here: {error}")
    yield folder / "cgroup.procs"
    assert wait_until(lambda: not (folder / "cgroup.procs").read_text(), 20)
    folder.rmdir()


@pytest.mark.fault("A worker that the kernel ends because a control group has no memory left is named, exit 75")
def test_a_worker_that_the_kernel_ends_for_memory_is_named(group, start, large, tmp_path):
    # Every large tensor is memory that the kernel has to give.
    process = start(large, **Trap.MALLOC)
    wait_for_step(tmp_path / "run", 1, process)
    began, (worker,) = time.monotonic(), worker_pids(process.pid)
    group.write_text(str(worker))
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - began < 60
    assert process.returncode == 75, output
    message = error_of(output)
    assert re.match(
        rf"error: hybrid worker, rank 0 of 1 \(pid {worker} on .*\), in \w+\.?\w*: the process died", message
    )
    assert "Run the same command again" in message
    assert "Traceback" not in output
