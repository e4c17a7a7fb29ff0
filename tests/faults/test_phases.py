"""A worker dies, or lacks memory, in the middle of each phase. The behaviour does not depend on which worker it is."""

import os
import re
import signal
from pathlib import Path

import pytest

from rltrain.models.files.source import model_problem
from rltrain.run.checkpoints.manifest import find_damage
from rltrain.run.report.table import read_metrics
from tests.clock import eventually
from tests.faults.plug import Trap, below, ended, error_of, gone, over, wait_for_step, worker_pids
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
        # The first save runs during the steps, which may be faster.
        eventually(lambda: list((tmp_path / "run").glob("global_step_*")))
        trap.lay(phase, signal.SIGKILL)
    is_named(process, trap.wait(process), shm)
    if phase == "save":  # half a checkpoint does not count
        goes_on(start, words, tmp_path / "run")


def is_named(process, pid, shm, rank="0 of 1"):
    """Check that the run names the dead worker, and leaves nothing behind."""
    started = below(process.pid)
    message = error_of(over(process, 75))
    named = rf"error: hybrid worker, rank {rank} \(pid {pid} on .*\), in \w+\.?\w*: the process died"
    assert re.match(named, message), message
    assert message.count("error:") == 1
    assert "Run the same command again" in message
    ended(started)
    eventually(lambda: not os.listdir(shm))


def goes_on(start, words, run):
    """Check that the same command makes one more step. Return its output."""
    saved = max(int(folder.name.rpartition("_")[2]) for folder in run.glob("global_step_*"))
    output = over(start([*words, f"trainer.total_training_steps={saved + 1}"]))
    assert f"exported model: {run}/global_step_{saved + 1}/huggingface" in output
    assert [line["step"] for line in read_metrics(run)] == list(range(1, saved + 2))
    assert not list(run.glob(".tmp_*"))


@pytest.mark.fault("The worker of two that is killed in a phase of critic, reference, actor or save is named, exit 75")
@pytest.mark.parametrize("phase", Trap.TRAINED)
def test_the_rank_that_died_is_named(start, tiny_model, arithmetic_files, trap, shm, tmp_path, phase):
    """The second of two workers dies; the report must not be the first one's lost connection."""
    changes = {
        "algorithm__adv_estimator": "gae", "critic__model__path": tiny_model, "critic__ppo_mini_batch_size": 2,
        "critic__ppo_max_token_len_per_gpu": 64, "trainer__n_gpus_per_node": 2, "trainer__save_freq": 1,
        "trainer__total_training_steps": 100000, "trainer__max_actor_ckpt_to_keep": 1,
    }  # fmt: skip
    trap.lay(phase, signal.SIGKILL, rank=1)
    process = start(small_run(tiny_model, arithmetic_files, tmp_path / "run", **changes), shm=shm, **trap.environment)
    is_named(process, trap.wait(process), shm, "1 of 2")
    gone(tmp_path)


@pytest.mark.fault("A worker killed in an export leaves no half of a model, exit 75; the same command goes on")
def test_a_worker_killed_in_an_export_leaves_no_half_of_a_model(start, words, trap, shm, tmp_path):
    process = start(words, shm=shm, **trap.environment)
    wait_for_step(tmp_path / "run", 2, process)
    eventually(lambda: list((tmp_path / "run").glob("global_step_*")))
    trap.lay("export", signal.SIGKILL)
    is_named(process, trap.wait(process), shm)
    for folder in (tmp_path / "run").glob("global_step_*"):
        assert not find_damage(folder)
        assert not model_problem("model.path", str(folder / "huggingface"))
    # The folder that a kill leaves does not have the name of a checkpoint, and the next start removes it.
    assert list((tmp_path / "run").glob(".tmp_global_step_*"))
    goes_on(start, words, tmp_path / "run")


@pytest.fixture
def large(arithmetic_files, tmp_path):
    """A run with gradients and gathered weights of several MiB."""
    return steps(save_tiny_model(tmp_path / "model", width=512), arithmetic_files, tmp_path / "run")


@pytest.mark.fault("A worker that the host has no memory for says so, whatever it does, exit 75")
@pytest.mark.parametrize("phase", [*(each for each in Trap.PHASES if each != "stage"), "save, waiting"])
def test_a_worker_without_host_memory_says_what_to_do(start, large, trap, tmp_path, phase):
    trapped, waits = phase.partition(",")[0], ["trainer.async_save=False"] if "waiting" in phase else []
    if phase == "load":
        trap.lay(trapped, "memory")
    process = start([*large, *waits], **trap.environment, **Trap.MALLOC)
    if phase != "load":  # not the trial of the model's family, which the driver makes
        wait_for_step(tmp_path / "run", 1, process)
        trap.lay(trapped, "memory")
    trap.wait(process)
    started = below(process.pid)
    output = over(process, 75)
    message = error_of(output)
    # The next call that requests memory, whether the one that is caught or a concurrent save.
    where = rf"hybrid worker, rank 0 of 1 \(pid {trap.caught} on .*\), in [\w.]+"
    assert re.match(rf"error: {where}: the host is out of memory", message), message
    assert "Give the host (or the container) more" in message
    assert "Run the same command again" in message
    ended(started)


@pytest.fixture
def group():
    """A control group of 4 MiB: the file for the pid. Memory that a process already has does not count."""
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
    eventually(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


@pytest.mark.fault("A worker that the kernel ends because a control group has no memory left is named, exit 75")
def test_a_worker_that_the_kernel_ends_for_memory_is_named(group, start, large, tmp_path):
    # Every large tensor is memory that the kernel must provide.
    process = start(large, **Trap.MALLOC)
    wait_for_step(tmp_path / "run", 1, process)
    (worker,) = worker_pids(process.pid)
    group.write_text(str(worker))
    output = over(process, 75)
    message = error_of(output)
    assert re.match(
        rf"error: hybrid worker, rank 0 of 1 \(pid {worker} on .*\), in \w+\.?\w*: the process died", message
    )
    assert "Run the same command again" in message
