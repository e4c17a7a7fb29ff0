"""The best checkpoint by a validation metric is kept, and a run without progress ends (`trainer.keep_best`,
`patience`)."""

import json
from dataclasses import replace

import pytest

from rltrain.common.errors import ConfigError
from rltrain.config.load import load_config
from rltrain.run.checkpoints.best import Best
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.resume import ResumePoint, find_resume_point
from rltrain.run.checkpoints.saver import Saver
from rltrain.run.previous_attempt import pending_validation
from rltrain.run.report.table import read_metrics
from rltrain.run.report.trackers import RunInfo
from rltrain.run.report.tracking import Tracker
from rltrain.trainer.metrics.step import Answered
from rltrain.trainer.plan import make_plan
from tests.trainer.saves import fit, saver_of

pytestmark = pytest.mark.usefixtures("process_group")
METRIC = "val-core/x/acc/mean@1"
KEYS = {
    "trainer__keep_best": METRIC, "trainer__max_actor_ckpt_to_keep": 1, "trainer__save_freq": 1,
    "trainer__test_freq": 1, "trainer__total_training_steps": 8,
}  # fmt: skip


def best_of(mode="max", patience=None, values=()) -> Best:
    words = [f"trainer.keep_best={METRIC}", f"trainer.keep_best_mode={mode}"]
    best = Best(load_config([*words, *([f"trainer.patience={patience}"] if patience else [])]).config.trainer)
    for step, value in enumerate(values):
        best.observe(step, {METRIC: value})
    return best


def test_the_first_of_equal_checkpoints_is_the_best():
    best = best_of(values=[0.1, 0.5, 0.9, 0.5, float("nan")])
    assert best.of([1, 3, 4, 7]) == 1
    assert best.of(range(9)) == 2
    assert best.of([4, 7]) is None
    assert best_of("min", values=[0.3, 0.2, 0.4]).of([0, 1, 2]) == 1


@pytest.mark.parametrize(("of", "values"), [("run", {3: 0.9, 4: 0.2}), ("other", {})])
def test_the_best_of_a_run_is_none_of_what_an_earlier_one_has_left_in_its_folder(folder, of, values):
    lines = [json.dumps({"step": step, METRIC: value}) for step, value in ((3, 0.9), (4, 0.2), (6, 0.1))]
    (folder.path / "metrics.jsonl").write_text("\n".join(lines))
    saver, _ = saver_of(folder, f"trainer.keep_best={METRIC}", "trainer.patience=1")
    saver.load(ResumePoint(4, folder=folder.path.with_name(of) / "global_step_4"))
    assert saver.best.values == values


def test_patience_counts_validations_since_the_best():
    assert not best_of(patience=3, values=[0.1, 0.5, 0.5, 0.2]).stalled()
    found = best_of(patience=3, values=[0.1, 0.5, 0.5, 0.2, 0.4]).stalled()
    assert found == (
        f"stopped early after step 4: the last 3 validations found no better {METRIC} than the 0.5 of step 1 "
        "(trainer.patience=3)"
    )
    assert not best_of(values=[0.5, 0.1, 0.1]).stalled()


def test_a_metric_that_no_validation_finds_is_told_with_those_it_does():
    with pytest.raises(ConfigError, match=r"keep_best=val-core/x/acc/mean@1: .*such as val-core/y/acc/mean@1"):
        best_of().observe(3, {"val-core/y/acc/mean@1": 0.1, "timing_s/testing": 3.0})


@pytest.fixture
def run(tiny_trainer, tmp_path):
    """run(found, **changes): return (whether it finished, its steps, its checkpoints), in one folder."""

    def run(found, **changes):
        ppo = tiny_trainer(**(KEYS | changes))
        folder = RunFolder(str(tmp_path / "run"))
        start = find_resume_point(ppo.cfg, folder, "rows:1")
        saver = Saver(ppo.cfg, folder, ppo.actor, ppo.critic, "rows:1", 16)
        saver.load(start)
        ppo.restore(start.progress, start.folder)
        run.validated = []
        ppo.validation.run = lambda step, stop: (
            run.validated.append(step) or Answered(step, {METRIC: found[step]}, None, 1)
        )
        with Tracker(["console"], RunInfo("p", "e", {}, folder.path, start.step), 8) as tracker:
            ended = fit(ppo, folder, saver, tracker, start.step)
        folder.release()
        return ended, [line["step"] for line in read_metrics(folder.path)], folder.steps()

    return run


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("freq", "before", "validated"), [(-1, True, [0, 3]), (-1, False, []), (2, True, [0, 2, 3]), (2, False, [2, 3])]
)
def test_a_validation_before_training_has_one_after_it(run, freq, before, validated):
    found = dict.fromkeys(validated, 0.5)  # any other step is a KeyError
    changes = {"trainer__test_freq": freq, "trainer__val_before_train": before, "trainer__total_training_steps": 3}
    ended, steps, _ = run(found, **changes)
    assert ended
    assert steps == [0] * before + [1, 2, 3]
    assert run.validated == validated


def test_a_last_validation_that_was_cut_short_is_owed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n{"step": 3}\n')

    def owed(step, *keys):
        config = load_config(["data.val_files=v.parquet", *keys]).config
        plan = replace(make_plan(config), total_steps=3, steps_per_epoch=2)
        return pending_validation(config.trainer, True, tmp_path, step, plan)

    assert [owed(step) for step in (0, 2, 3)] == [False, False, True]
    assert [owed(step, "trainer.test_freq=2") for step in (1, 2, 3)] == [False, True, True]
    assert [owed(step, "trainer.test_freq=epoch") for step in (1, 2, 3)] == [False, True, True]
    assert not owed(3, "trainer.val_before_train=False")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, METRIC: 0.5}) + "\n")
    assert not owed(3)


def test_the_best_checkpoint_stays_and_survives_a_resume(run):
    found = [0.1, 0.2, 0.9, 0.3, 0.3, 0.3, 0.95, 0.3, 0.3]
    assert run(found, trainer__total_training_steps=4) == (True, [1, 2, 3, 4], [2, 4])
    assert run(found) == (True, list(range(1, 9)), [6, 8])


def test_a_run_without_progress_ends_and_stays_ended(run, caplog):
    caplog.set_level("INFO")
    found = [0.1, 0.2, 0.9, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3]
    changes = {"trainer__patience": 2, "trainer__save_freq": 100}
    assert run(found, **changes) == (True, [1, 2, 3, 4], [4])
    assert caplog.text.count("stopped early after step 4: the last 2 validations") == 1
    assert run(found, **changes) == (True, [1, 2, 3, 4], [4])
    assert caplog.text.count("stopped early after step 4") == 2
