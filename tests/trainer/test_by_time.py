"""Saves by time: when they are due. They replace no requested checkpoint and end no run."""

from types import SimpleNamespace

import pytest

from rltrain.config.load import load_config
from rltrain.run.checkpoints.manifest import read_record
from rltrain.run.checkpoints.room import missing_room, superfluous
from rltrain.run.checkpoints.saver import Saver
from rltrain.run.report.plan import describe
from rltrain.run.report.table import read_metrics
from rltrain.run.report.trackers import RunInfo
from rltrain.run.report.tracking import Tracker
from rltrain.trainer.plan import make_plan
from rltrain.trainer.progress import Progress
from tests.trainer.saves import GRPO, fit, saver_of


@pytest.mark.parametrize(
    ("settings", "due"),
    [
        ([], [4, 8]),
        (["trainer.save_every_s=500"], [1, 2, 3, 4, 5, 6, 7, 8]),
        *(([f"trainer.save_every_s={off}"], []) for off in (-1, 0, "null")),
        (["trainer.save_freq=6"], [4]),
        (["trainer.save_at_end=False"], []),
        (["trainer.save_at_end=False", "trainer.save_freq=100"], [4, 8]),
    ],
)
def test_a_save_is_due_so_long_after_the_last(folder, clock, settings, due):
    (saver, _), found = saver_of(folder, GRPO, *settings, clock=clock), []
    for step in range(1, 9):
        clock.advance(500.0)
        if saver.due(step, False):
            saver.save(step, Progress())
        elif saver.overdue(step):
            found.append(step)
            saver.save(step, Progress(), by_time=True)
    assert found == due


def test_no_save_by_time_is_due_while_one_is_under_way(folder, clock):
    part = SimpleNamespace(copied=True, ready=lambda: False, lost=False)
    saver, _ = saver_of(folder, GRPO, clock=clock, actor=SimpleNamespace(begin_save=lambda task: part))
    clock.advance(5000.0)
    assert saver.overdue(1)
    saver.save(1, Progress(), by_time=True)
    clock.advance(5000.0)
    assert not saver.overdue(2)


@pytest.mark.parametrize(
    ("keep", "freq", "timed", "stay"),
    [
        (1, 10, [13, 23, 26], [20, 26]),
        (3, -1, [3, 6, 9, 12, 15], [9, 12, 15]),
        (None, -1, [3, 6, 9, 12], [9, 12]),
        (None, 10, [3, 6, 13, 16, 19], [10, 19, 20]),
        (-1, 10, [], [10, 20]),
    ],
)
def test_saves_by_time_push_out_nothing_that_was_asked_for(keep, freq, timed, stay):
    whole = sorted([*([10, 20] if freq > 0 else []), *timed])
    cfg = load_config([f"trainer.save_freq={freq}", f"trainer.max_actor_ckpt_to_keep={keep or 'null'}"]).config.trainer
    goes = superfluous(cfg, whole, lambda step: step in timed)
    assert sorted(set(whole) - set(goes)) == stay


def test_what_was_saved_by_time_is_known_to_a_resumed_run(folder):
    settings = [GRPO, "trainer.save_freq=10", "trainer.max_actor_ckpt_to_keep=1"]
    saver, _ = saver_of(folder, *settings)
    for step in (10, 13, 16):
        saver.save(step, Progress(), by_time=step > 10)
    assert [read_record(folder.step_folder(step))["by_time"] for step in folder.steps()] == [False, True]
    again, _ = saver_of(folder, *settings)
    again.save(19, Progress(), by_time=True)
    assert folder.steps() == [10, 19]
    again.save(20, Progress())
    assert folder.steps() == [20]


def test_the_last_room_is_kept_for_the_regular_save(folder, clock, free, caplog):
    settings = ["trainer.save_freq=100", "trainer.max_actor_ckpt_to_keep=2"]
    saver, _ = saver_of(folder, GRPO, *settings, clock=clock)
    free(31_999)
    clock.advance(1800.0)
    assert not saver.overdue(1)
    said = "step 1 is not saved, though the last save is trainer.save_every_s=1800 ago: the next would lack"
    assert said in caplog.text
    free(32_000)
    assert not saver.overdue(2), "asked again when as much time has gone by"
    clock.advance(1800.0)
    assert saver.overdue(3)
    # Two of them are there, so that a third takes the room of the first.
    for step in (3, 4):
        saver.save(step, Progress(), by_time=True)
    clock.advance(1800.0)
    saver.check_room(100, 100, 16_000)
    free(16_000)
    assert saver.overdue(5)
    # Then the regular save would fail too, and a run that goes on loses more.
    free(15_999)
    assert saver.overdue(5)


def test_missing_room_is_told_before_the_run(folder, free):
    cfg = load_config([]).config.trainer
    for room, problem, note in (
        (32_000, "", ""),
        (31_999, "", "there is no room for more than 1: trainer.save_every_s=1800.0 saves only where"),
        (15_999, f"there is no disk space for the checkpoint of step 10. {folder.path} has 15.6 KiB free and a", ""),
    ):
        free(room)
        found = missing_room(cfg, folder.path, 16_000, 0, 10)
        assert [text[: len(start)] for text, start in zip(found, (problem, note), strict=True)] == [problem, note]
        assert [bool(text) for text in found] == [bool(problem), bool(note)]
    assert "choose another trainer.default_local_dir" in found[0]
    (folder.path / "global_step_1").mkdir()
    assert "one that is not needed may be removed" in missing_room(cfg, folder.path, 16_000, 1, 10)[0]
    assert missing_room(load_config(["trainer.val_only=True"]).config.trainer, folder.path, 16_000, 1, 10) == ("", "")


def test_the_plan_says_when_is_saved():
    def said(*settings: str) -> str:
        config = load_config([*settings]).config
        lines = describe(make_plan(config, 2 * config.data.train_batch_size), config).splitlines()
        return next(line for line in lines if "checkpoints/" in line)

    assert "every 20 steps and 1,800 s after the last and at the end" in said("trainer.save_freq=20")
    assert "after every epoch (2 steps) and at the end" in said("trainer.save_freq=epoch", "trainer.save_every_s=-1")
    assert "never" in said("trainer.save_at_end=False")


def test_a_run_saves_by_time_and_goes_on_from_there(process_group, tiny_trainer, folder, clock):
    ppo = tiny_trainer(trainer__total_training_steps=5, trainer__save_at_end=True)
    step = ppo.step
    ppo.step = lambda number: clock.advance(700.0) or step(number)
    saver = Saver(ppo.cfg, folder, ppo.actor, ppo.critic, "rows:1", 16, clock=clock)
    with Tracker([], RunInfo("p", "e", {}, folder.path), 5) as tracker:
        assert fit(ppo, folder, saver, tracker)
    assert folder.steps() == [3, 5]
    assert [step for step in (3, 5) if read_record(folder.step_folder(step))["by_time"]] == [3]
    assert [line["step"] for line in read_metrics(folder.path)] == [1, 2, 3, 4, 5]
