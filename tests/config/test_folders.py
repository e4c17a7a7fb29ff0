"""Sample folders that would overwrite each other's files are refused."""

import os

import pytest

from rltrain.config.check import broken_rules
from rltrain.config.load import load_config

BASE = [
    "actor_rollout_ref.model.path=m", "data.train_files=t.parquet", "data.val_files=v.parquet",
    "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4",
]  # fmt: skip
TRAIN, VAL = "trainer.rollout_data_dir", "trainer.validation_data_dir"


def problems(folder, *words):
    return broken_rules(load_config([*BASE, f"trainer.default_local_dir={folder}/run", *words]))


def test_one_folder_for_the_answers_of_both_is_refused_however_it_is_written(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for spelling in ("a", "a/", "b/../a", "link"):
        (problem,) = problems(tmp_path, f"{TRAIN}={tmp_path}/a", f"{VAL}={tmp_path}/{spelling}")
        assert problem.startswith(f"{TRAIN}={tmp_path}/a and {VAL}={tmp_path}/{spelling} are the same folder")
        assert problem.endswith(f"such as {VAL}={tmp_path}/{spelling.rstrip('/')}/val.")
        fix = problem.rpartition("such as ")[2].rstrip(".")
        assert problems(tmp_path, f"{TRAIN}={tmp_path}/a", fix) == []


def test_a_folder_that_nothing_is_written_to_clashes_with_none(tmp_path):
    same = [f"{TRAIN}={tmp_path}/a", f"{VAL}={tmp_path}/a"]
    assert problems(tmp_path, *same, "data.val_files=null") == []
    assert problems(tmp_path, *same, "trainer.val_only=True") == []


@pytest.mark.parametrize("key", [TRAIN, VAL])
@pytest.mark.parametrize("name", ["", "/samples", "/global_step_10", "/global_step_10/actor", "/earlier_1", "/logs"])
def test_a_folder_of_the_run_itself_is_refused(tmp_path, key, name):
    (problem,) = problems(tmp_path, f"{key}={tmp_path}/run{name}")
    assert problem.startswith(f"{key}={tmp_path}/run{name} is a folder that the run itself writes to")
    assert problems(tmp_path, problem.rpartition("such as ")[2].rstrip(".")) == []


@pytest.mark.parametrize("name", ["run/answers", "run/val", ".", "run2", "run/samples_of_mine"])
def test_any_other_folder_is_taken(tmp_path, name):
    assert problems(tmp_path, f"{VAL}={os.path.normpath(tmp_path / name)}") == []
