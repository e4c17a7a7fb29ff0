"""Saves by time: when they are due, that they push out nothing that was asked for, and that they end no run."""

import threading
import time
from contextlib import ExitStack

import pytest

from rltrain.base.stop import Stop
from rltrain.config.load import load_config
from rltrain.run.checkpoints import room
from rltrain.run.checkpoints import saver as saving
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.manifest import read_record
from rltrain.run.checkpoints.room import missing_room, superfluous
from rltrain.run.checkpoints.saver import Saver
from rltrain.run.fit import Trainer
from rltrain.run.report.plan import describe
from rltrain.run.report.table import read_metrics
from rltrain.run.report.trackers import RunInfo
from rltrain.run.report.tracking import Tracker
from rltrain.run.watchers.watcher import Watchers
from rltrain.trainer.plan import make_plan
from rltrain.trainer.progress import Progress


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(str(tmp_path / "run"))
    yield folder
    folder.release()


@pytest.fixture
def clock(monkeypatch):
    """A list whose one number is by how much the time is ahead."""
    ahead, real = [0.0], time.monotonic
    monkeypatch.setattr(saving.time, "monotonic", lambda: real() + ahead[0])
    return ahead


@pytest.fixture
def free(monkeypatch):
    """free(n): the disk has room for so many bytes."""
    usage = room.shutil._ntuple_diskusage
    return lambda size: monkeypatch.setattr(room.shutil, "disk_usage", lambda _: usage(10**9, 0, size))


def saver_of(folder: RunFolder, *settings: str) -> Saver:
    """A saver of a model of 1000 weights (16,000 bytes) that has nothing to write."""
    cfg = load_config(["algorithm.adv_estimator=grpo", *settings]).config
    saver = Saver(cfg, folder, None, None, "rows:1 5 rows of a.parquet", 1000, 1000)
    saver._roles = {}
    cfg.actor_rollout_ref.actor.checkpoint.save_contents = ["hf_model"]
    return saver


@pytest.mark.parametrize(
    ("settings", "due"),
    [
        ([], [4, 8]),
        (["trainer.save_every_s=500"], [1, 2, 3, 4, 5, 6, 7, 8]),
        (["trainer.save_every_s=-1"], []),
        (["trainer.save_every_s=0"], []),
        (["trainer.save_every_s=null"], []),
        (["trainer.save_freq=3"], []),
        (["trainer.save_freq=6"], [4]),
        (["trainer.save_at_end=False"], []),
        (["trainer.save_at_end=False", "trainer.save_freq=100"], [4, 8]),
    ],
)
def test_a_save_is_due_so_long_after_the_last(folder, clock, settings, due):
    saver, found = saver_of(folder, *settings), []
    for step in range(1, 9):
        clock[0] += 500.0
        if saver.due(step, False):
            saver.save(step, Progress())
        elif saver.overdue(step):
            found.append(step)
            saver.save(step, Progress(), by_time=True)
    assert found == due


def test_no_save_by_time_is_due_while_one_is_under_way(folder, clock):
    saver = saver_of(folder)
    clock[0] = 5000.0
    saver._pending = object()
    assert not saver.overdue(1)
    saver._pending = None
    assert saver.overdue(1)


@pytest.mark.parametrize(
    ("keep", "freq", "timed", "stay"),
    [
        (3, 10, [23, 26, 29], [10, 20, 26, 29]),
        (3, 10, [13, 16, 19, 23], [10, 20, 23]),
        (1, 10, [13, 23, 26], [20, 26]),
        (1, 10, [13], [20]),
        (3, -1, [3, 6, 9, 12, 15], [9, 12, 15]),
        (1, -1, [3, 6], [6]),
        (None, -1, [3, 6, 9, 12], [9, 12]),
        (None, 10, [3, 6, 13, 16, 19], [10, 19, 20]),
        (-1, 10, [], [10, 20]),
        (2, 10, [33, 36], [10, 20, 33, 36]),
    ],
)
def test_saves_by_time_push_out_nothing_that_was_asked_for(keep, freq, timed, stay):
    regular = [10, 20] if freq > 0 else []
    whole = sorted([*regular, *timed])
    cfg = load_config([f"trainer.save_freq={freq}", f"trainer.max_actor_ckpt_to_keep={keep or 'null'}"]).config.trainer
    goes = superfluous(cfg, whole, lambda step: step in timed)
    assert sorted(set(whole) - set(goes)) == stay


def test_what_was_saved_by_time_is_known_to_a_resumed_run(folder):
    settings = ["trainer.save_freq=10", "trainer.max_actor_ckpt_to_keep=1"]
    saver = saver_of(folder, *settings)
    saver.save(10, Progress())
    for step in (13, 16):
        saver.save(step, Progress(), by_time=True)
    assert [read_record(folder.step_folder(step))["by_time"] for step in folder.steps()] == [False, True]
    again = saver_of(folder, *settings)
    again.save(19, Progress(), by_time=True)
    assert folder.steps() == [10, 19]
    again.save(20, Progress())
    assert folder.steps() == [20]


def test_the_last_room_is_kept_for_the_regular_save(folder, clock, free, caplog):
    settings = ["trainer.save_freq=100", "trainer.max_actor_ckpt_to_keep=2"]
    saver = saver_of(folder, *settings)
    free(31_999)
    clock[0] = 1800.0
    assert not saver.overdue(1)
    assert (
        "step 1 is not saved, though the last save is trainer.save_every_s=1800 ago: the next would lack" in caplog.text
    )
    free(32_000)
    assert not saver.overdue(2), "asked again when as much time has gone by"
    clock[0] = 3600.0
    assert saver.overdue(3)
    # Two of them are there, so that a third takes the room of the first.
    for step in (3, 4):
        saver.save(step, Progress(), by_time=True)
    clock[0], saver._bytes_needed = 5400.0, 16_000
    free(16_000)
    assert saver.overdue(5)
    # Then the regular save would fail too, and a run that goes on loses more.
    free(15_999)
    assert saver.overdue(5)


def test_a_look_at_the_room_that_was_late_counts_for_no_later_save(folder, clock, free, monkeypatch):
    saver, disk_answers = saver_of(folder, "trainer.save_freq=100"), threading.Event()
    look = saver._has_room_for_two
    monkeypatch.setattr(saver, "_has_room_for_two", lambda step: disk_answers.wait(20) and look(step))
    monkeypatch.setattr(saving, "_LOOK_S", 0.01)
    clock[0] = 1800.0
    free(10**9)
    assert not saver.overdue(1)
    disk_answers.set()
    assert saver._room.result()
    saver.save(2, Progress())
    free(saver._bytes_needed)  # room for the regular save alone
    monkeypatch.setattr(saving, "_LOOK_S", 20.0)
    clock[0] = 3600.0
    assert not saver.overdue(3)


def test_missing_room_for_saves_by_time_is_foretold(folder, free):
    cfg = load_config([]).config.trainer
    free(31_999)
    problem, note = missing_room(cfg, folder.path, 16_000, 0, 10)
    assert not problem
    assert note.startswith("there is no room for more than 1: trainer.save_every_s=1800.0 saves only where")
    free(32_000)
    assert missing_room(cfg, folder.path, 16_000, 0, 10) == ("", "")


def test_the_first_checkpoint_lacks_room_in_words_that_can_help(folder, free):
    cfg = load_config([]).config.trainer
    free(15_999)
    problem, _ = missing_room(cfg, folder.path, 16_000, 0, 10)
    assert problem == (
        f"there is no room for the checkpoint of step 10. {folder.path} has 15.6 KiB free and a checkpoint takes about "
        "15.6 KiB. Free space, or choose another trainer.default_local_dir, and run the same command again."
    )
    (folder.path / "global_step_1").mkdir()
    problem, _ = missing_room(cfg, folder.path, 16_000, 1, 10)
    assert "Older checkpoints are intact; one that is not needed may be removed. Free space, and run" in problem
    assert missing_room(load_config(["trainer.val_only=True"]).config.trainer, folder.path, 16_000, 1, 10) == ("", "")


def test_the_plan_says_when_is_saved():
    def said(*settings: str) -> str:
        config = load_config([*settings]).config
        prompts = 2 * config.data.train_batch_size if len(settings) > 1 else None
        return next(
            line for line in describe(make_plan(config, prompts), config).splitlines() if "checkpoints/" in line
        )

    assert "1,800 s after the last and at the end, in" in said()
    assert "every 20 steps and 1,800 s after the last and at the end" in said("trainer.save_freq=20")
    assert "at the end" in said("trainer.save_every_s=-1")
    assert "after every epoch and 1,800 s after the last and at the end" in said("trainer.save_freq=epoch")
    assert "after every epoch (2 steps) and at the end" in said("trainer.save_freq=epoch", "trainer.save_every_s=-1")


def test_a_run_saves_by_time_and_goes_on_from_there(process_group, tiny_trainer, folder, clock):
    ppo = tiny_trainer(trainer__total_training_steps=5, trainer__save_at_end=True)
    step = ppo.step
    ppo.step = lambda number: clock.__setitem__(0, clock[0] + 700.0) or step(number)
    saver = Saver(ppo.cfg, folder, ppo.actor, ppo.critic, "rows:1", 1, 1)
    with Tracker([], RunInfo("p", "e", {}, folder.path), 5) as tracker:
        assert Trainer(ppo.cfg, ppo.plan, folder, Stop(), 0, ExitStack(), ppo, saver, Watchers(tracker)).fit()
    assert folder.steps() == [3, 5]
    assert [step for step in (3, 5) if read_record(folder.step_folder(step))["by_time"]] == [3]
    assert [line["step"] for line in read_metrics(folder.path)] == [1, 2, 3, 4, 5]
