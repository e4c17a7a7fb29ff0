import json
import logging
import os

import pytest

from rltrain.errors import CheckpointError, ConfigError
from rltrain.trainer.checkpoint import RunFolder, find_damage, read_record


def save(folder: RunFolder, step: int) -> None:
    temporary = folder.begin_save(step)
    (temporary / "actor").mkdir()
    (temporary / "actor" / "shard.bin").write_bytes(b"x" * 100)
    (temporary / "progress.json").write_text(json.dumps({"global_step": step}))
    folder.commit(temporary, step)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(str(tmp_path / "run"))
    yield folder
    folder.release()


def test_the_newest_whole_checkpoint_is_found(folder):
    assert folder.newest() is None
    for step in (2, 10, 9):
        save(folder, step)
    assert folder.newest() == folder.step_folder(10)
    assert read_record(folder.newest())["global_step"] == 10


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "garbage manifest"])
def test_a_damaged_checkpoint_is_named_and_passed_over(folder, damage, caplog):
    save(folder, 1)
    save(folder, 2)
    newest = folder.step_folder(2)
    if damage == "truncated":
        (newest / "actor" / "shard.bin").write_bytes(b"x" * 99)
    elif damage == "missing":
        (newest / "actor" / "shard.bin").unlink()
    elif damage == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        (newest / "manifest.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert folder.newest() == folder.step_folder(1)
    assert "global_step_2" in caplog.text
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        read_record(newest)


def test_digests_catch_a_flipped_bit_that_sizes_do_not(folder):
    save(folder, 1)
    file = folder.step_folder(1) / "actor" / "shard.bin"
    file.write_bytes(b"x" * 50 + b"y" + b"x" * 49)
    assert find_damage(folder.step_folder(1)) is None
    assert "shard.bin has changed" in find_damage(folder.step_folder(1), check_digests=True)


def test_an_interrupted_save_is_invisible_and_cleaned_up(folder):
    save(folder, 1)
    (folder.begin_save(2) / "half").write_text("…")
    folder.release()
    again = RunFolder(str(folder.path))
    assert again.newest() == again.step_folder(1)
    assert not list(again.path.glob(".tmp_*"))
    again.release()


def test_a_checkpoint_is_never_overwritten(folder):
    save(folder, 1)
    with pytest.raises(CheckpointError, match="never overwritten"):
        folder.begin_save(1)


def test_a_damaged_checkpoint_makes_way_for_a_new_one_of_its_step(folder):
    save(folder, 1)
    (folder.step_folder(1) / "actor" / "shard.bin").unlink()
    save(folder, 1)
    assert folder.newest() == folder.step_folder(1)
    assert len(list(folder.path.glob("damaged_global_step_1_*"))) == 1


def test_pruning_keeps_the_newest(folder):
    for step in (1, 2, 3, 10):
        save(folder, step)
    folder.prune(None)
    assert folder.steps() == [1, 2, 3, 10]
    folder.prune(2)
    assert folder.steps() == [3, 10]


def test_a_second_run_in_the_same_folder_is_refused(folder):
    with pytest.raises(ConfigError, match=r"in use by pid \d+"):
        RunFolder(str(folder.path))


def test_storage_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    folder = RunFolder(str(tmp_path / "run"))
    assert "cannot be locked" in caplog.text
    assert f"pid {os.getpid()}" in (folder.path / "run.lock").read_text()
    folder.release()
