"""Output of earlier starts in a folder is moved aside, and never overwritten."""

import json
import logging
import os

import pytest

from rltrain.common.errors import DiskError, StorageError
from rltrain.config.load import load_config
from rltrain.config.schema.trainer import TrainerConfig
from rltrain.run.previous_attempt import archive_outputs
from rltrain.run.report.table import read_metrics
from rltrain.run.report.tracking import JsonLines

OF_A_RUN = (
    "plan.json",
    "plan.1.json",
    "env.json",
    "config.yaml",
    "config.1.yaml",
    "tracking.json",
    "tensorboard/events",
)
SAMPLES = ("val_000000", "train_000001", "train_000002", "val_000002", "train_000003", "val_000003")
LEFT = ("run.lock", "attempts.jsonl", "train.log", "reward.log", "logs/rank_00000.log", "global_step_2/progress.json")


def contents(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run(tmp_path):
    """A run folder after three steps; each file contains its own name."""
    folder = tmp_path / "run"
    for name in (*OF_A_RUN, *(f"samples/{sample}.parquet" for sample in SAMPLES), *LEFT):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    lines = "".join(json.dumps({"step": step}) + "\n" for step in (0, 1, 2, 3))
    (folder / "metrics.jsonl").write_text(lines + '{"step": 4, "cut')
    return folder


@pytest.mark.parametrize(("step", "anew"), [(0, False), (2, True)])
def test_a_run_that_begins_anew_moves_all_of_the_one_before_aside(run, step, anew, caplog):
    caplog.set_level(logging.INFO)
    before = contents(run)
    archive_outputs(TrainerConfig(), run, step, anew=anew)
    assert contents(run) == {f"earlier_1/{name}" * (name not in LEFT) or name: text for name, text in before.items()}
    assert caplog.text.count(f"{run}: the output of an earlier start was moved to earlier_1") == 1
    # The next one, of which there is little.
    writer = JsonLines(run / "metrics.jsonl")
    writer.log(1, {"x": 1.0})
    writer.close()
    assert [line["step"] for line in read_metrics(run)] == [1]
    first = contents(run / "earlier_1")
    archive_outputs(TrainerConfig(), run, step, anew=anew)
    assert contents(run / "earlier_1") == first
    assert [line["step"] for line in read_metrics(run / "earlier_2")] == [1]


def test_a_run_that_goes_on_moves_what_is_of_later_steps_aside(run, caplog):
    caplog.set_level(logging.INFO)
    before = contents(run)
    archive_outputs(TrainerConfig(), run, 2)
    assert [line["step"] for line in read_metrics(run)] == [0, 1, 2]
    assert [line["step"] for line in read_metrics(run / "earlier_1")] == [3]
    assert (run / "earlier_1/metrics.jsonl").read_text().endswith('{"step": 4, "cut\n'), "what a kill has cut off"
    del before["metrics.jsonl"]
    later = {f"samples/{name}.parquet" for name in SAMPLES if name.endswith("3")}
    after = {name: text for name, text in contents(run).items() if not name.endswith("metrics.jsonl")}
    assert after == {f"earlier_1/{name}" if name in later else name: text for name, text in before.items()}
    assert "the output of steps after 2 was moved to earlier_1" in caplog.text
    caplog.clear()
    after = contents(run)
    archive_outputs(TrainerConfig(), run, 2)
    assert contents(run) == after
    assert not caplog.text, "nothing is said where nothing is made again"
    archive_outputs(TrainerConfig(), run, 2, validates=True)
    assert (run / "earlier_2" / "samples" / "val_000002.parquet").exists(), "the validation is made again"


def test_answers_in_verls_format_are_moved_aside(tmp_path):
    given = {"train": ["1", "2", "3", "of_others"], "val": ["0", "2"]}
    for split, names in given.items():
        (tmp_path / split).mkdir()
        for name in names:
            (tmp_path / split / f"{name}.jsonl").write_text(f"{split} {name}")
    keys = [f"trainer.rollout_data_dir={tmp_path}/train", f"trainer.validation_data_dir={tmp_path}/val"]
    config = load_config([*keys, "data.val_files=v.parquet"]).config
    (tmp_path / "run").mkdir()
    before = sorted(filter(None, contents(tmp_path).values()))
    for step, aside in ((2, "earlier_1"), (0, "earlier_2")):
        archive_outputs(config.trainer, tmp_path / "run", step)
        assert sorted(filter(None, contents(tmp_path).values())) == before, "nothing is lost"
        moved = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob(f"*/{aside}/*.jsonl"))
        names = {2: ["train/earlier_1/3"], 0: ["train/earlier_2/1", "train/earlier_2/2", "val/earlier_1/0"]}[step]
        assert [name.removesuffix(".jsonl") for name in moved] == [name for name in names if aside in name]


@pytest.mark.parametrize(("step", "number", "kind"), [(0, 13, DiskError), (2, 5, StorageError)])
def test_what_cannot_be_moved_ends_the_start_and_stays(run, step, number, kind, monkeypatch):
    before = contents(run)

    def fails(source, target):
        raise OSError(number, os.strerror(number), str(source))

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(kind, match=rf"{run} cannot be written: .*{os.strerror(number)}.*run/"):
        archive_outputs(TrainerConfig(), run, step)
    assert contents(run) == before
