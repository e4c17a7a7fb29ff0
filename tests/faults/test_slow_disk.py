"""Runs on storage that is slow or does not respond, for a while or forever: the steps do not wait for it."""

import re
import signal

import pytest

from rltrain.run.checkpoints.manifest import find_damage
from rltrain.run.report import tracking
from rltrain.run.report.table import read_metrics
from rltrain.run.report.trackers import RunInfo
from tests.clock import PATIENCE_S, eventually
from tests.faults.plug import gone, over, wait_for_line, wait_for_step
from tests.slow_disk import slow_disk
from tests.tiny import small_run

LIMIT_S = 30
BYTES_PER_S = 40_000


@pytest.fixture
def disk(start, tmp_path):
    """A disk of 64 MiB, which responds again before the started processes are ended."""
    try:
        with slow_disk(tmp_path, 64) as disk:
            yield disk
    except OSError as error:
        pytest.skip(f"no disk can be made: {error}")


@pytest.fixture
def command(tiny_model, arithmetic_files, disk):
    """The arguments of a run on that disk, which saves every ten steps."""
    always = {"trainer__save_freq": 10, "trainer__max_actor_ckpt_to_keep": 1, "trainer__total_training_steps": 100000}
    return lambda **changes: small_run(tiny_model, arithmetic_files, disk.path / "run", **always | changes)


@pytest.mark.long
@pytest.mark.fault("Storage that does not answer for a while, or is slow, stops no step; the save is whole afterwards")
@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("how", ["frozen", "slow"])
def test_steps_do_not_wait_for_the_disk(start, command, disk, tmp_path, how):
    run = disk.path / "run"
    process = start(command())
    wait_for_step(run, 3, process)
    try:
        disk.freeze() if how == "frozen" else disk.limit(BYTES_PER_S)
    except OSError as error:
        pytest.skip(str(error))
    said = wait_for_line(process, "step 10/")
    said += wait_for_line(process, "step 16/")  # the next save would wait for this one
    assert not (run / "global_step_10").exists()
    disk.thaw()
    eventually((run / "global_step_10").exists)
    disk.limit(0)
    process.send_signal(signal.SIGTERM)
    over(process, 75)
    told = "metrics.jsonl cannot be written (the storage does not respond): training continues" in said
    assert told or how == "slow"
    steps = read_metrics(run)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert find_damage(run / f"global_step_{len(steps)}") is None
    gone(tmp_path)


@pytest.mark.long
@pytest.mark.fault("Storage that never answers again ends the run with what waits for it; it is gone once that answers")
@pytest.mark.usefixtures("own_ray")
def test_a_disk_that_never_answers_is_told(start, command, disk, tmp_path):
    run = disk.path / "run"
    process = start(command(trainer__hang_timeout_s=LIMIT_S))
    wait_for_step(run, 11, process)
    disk.freeze()
    said = wait_for_line(process, "error:")
    # Either may be noticed first: the driver's background job, or the writing worker.
    assert re.search(r"hangs: for \d+ s its thread '[^']+' has been in|in Actor\.\w+: not done after", said), said
    assert f"trainer.hang_timeout_s={LIMIT_S}" in said
    assert "incidents does not respond" in said
    assert "Traceback" not in said
    disk.thaw()  # until then the kernel ends no process that waits for it
    assert process.wait(PATIENCE_S) == 75
    gone(tmp_path)
    again = start(command(trainer__total_training_steps=12))
    over(again)


@pytest.mark.fault("A tracker that hangs neither slows a run nor holds up its end")
def test_a_tracker_whose_storage_does_not_answer_is_not_waited_for(disk, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "CLOSE_S", 0.5)
    run = tmp_path / "run"
    run.mkdir()
    (run / "tensorboard").symlink_to(disk.path)
    track = tracking.Tracker(["tensorboard"], RunInfo("project", "run", {}, run, 0), total_steps=4)
    track.on_metrics(1, {"loss": 0.5})
    eventually(lambda: any(file.stat().st_size for file in disk.path.glob("events*")))
    disk.freeze()
    for step in range(2, 5):
        track.on_metrics(step, {"loss": 0.5})
    track.close()
    assert "tracker 'tensorboard': not finished" in caplog.text
    assert tracking.hanging()
    assert len(read_metrics(run)) == 4
    disk.thaw()
    eventually(lambda: not tracking.hanging())
