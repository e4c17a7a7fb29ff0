"""A run whose disk becomes full during training, on a file system of 8 MB."""

import os
import re
import shutil
import signal

import pytest

from rltrain.run.checkpoints.manifest import find_damage
from rltrain.run.report.table import read_metrics
from tests.clock import eventually
from tests.faults.plug import error_of, gone, over, wait_for_line, wait_for_step
from tests.tiny import small_run

ROOM = r"checkpoint of step \d+.* has [\d.]+ (bytes|KiB|MiB) free and a checkpoint takes about [\d.]+ KiB"


@pytest.fixture
def command(tiny_model, arithmetic_files, small_disk):
    """Return the arguments of a run on that disk, which saves every second step."""
    always = {"trainer__save_freq": 2, "trainer__max_actor_ckpt_to_keep": 2, "trainer__total_training_steps": 100000}
    return lambda **changes: small_run(tiny_model, arithmetic_files, small_disk / "run", **always | changes)


def fill(disk) -> None:
    with open(disk / "of_others", "ab", buffering=0) as file:
        try:
            while file.write(bytes(65536)):
                pass
        except OSError:
            pass


def ended_and_goes_on(process, start, command, disk) -> str:
    """Return the output of the run that found the disk full. The same command must continue after space is freed."""
    run = disk / "run"
    output = over(process, 74)
    assert re.search(ROOM, error_of(output)), output
    # The removed half of a checkpoint may leave room for lines that have waited.
    last = max(map(int, re.findall(r"step (\d+)/", output)), default=0)
    assert "metrics.jsonl lacks its last" in output or read_metrics(run)[-1]["step"] >= last, output
    assert not list(run.glob(".tmp_*"))
    saved = [int(folder.name.rpartition("_")[2]) for folder in run.glob("global_step_*")]
    assert [find_damage(run / f"global_step_{step}") for step in saved] == [None] * len(saved)
    (disk / "of_others").unlink()
    again = start(command(trainer__total_training_steps=max(saved) + 2))
    over(again)
    assert [line["step"] for line in read_metrics(run)] == list(range(1, max(saved) + 3))
    assert shutil.disk_usage(disk).free > 2**20
    return output


@pytest.mark.long
@pytest.mark.fault("A disk that fills up during a run: exit 74 with the free space, and the same command goes on")
@pytest.mark.usefixtures("joined")
def test_a_disk_that_fills_up_in_a_run_costs_no_checkpoint(start, command, tmp_path, small_disk):
    process = start(command())
    wait_for_step(small_disk / "run", 4, process)
    fill(small_disk)
    ended_and_goes_on(process, start, command, small_disk)
    gone(tmp_path)


@pytest.mark.long
@pytest.mark.fault("A disk that fills up while a save is written beside a step: exit 74, and the same command goes on")
@pytest.mark.usefixtures("own_ray")
def test_a_disk_that_fills_up_under_a_save(start, command, trap, tmp_path, small_disk):
    process = start(command(), **trap.environment)
    wait_for_step(small_disk / "run", 3, process)
    trap.lay("save", signal.SIGSTOP)
    trap.wait(process)
    fill(small_disk)
    os.kill(int(trap.caught), signal.SIGCONT)
    output = ended_and_goes_on(process, start, command, small_disk)
    assert "could not be written: No space left on device" in output
    gone(tmp_path)


@pytest.mark.long
@pytest.mark.fault(
    "A full disk that takes neither metrics.jsonl nor a save: both are told, and no line is missing later"
)
@pytest.mark.usefixtures("joined")
def test_a_full_disk_that_metrics_and_a_save_hit(start, command, tmp_path, small_disk):
    run = small_disk / "run"
    process = start(command(trainer__save_freq=5))
    wait_for_step(run, 6, process)
    eventually((run / "global_step_5").exists)
    fill(small_disk)
    wait_for_line(process, "metrics.jsonl cannot be written (No space left on device): training continues")
    process.send_signal(signal.SIGUSR1)
    ended_and_goes_on(process, start, command, small_disk)
    gone(tmp_path)
