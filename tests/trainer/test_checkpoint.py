import json
import logging
import os
import shutil
import threading
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from rltrain import __version__
from rltrain.base import storage
from rltrain.base.errors import CheckpointError, ConfigError, DiskError, StorageError
from rltrain.config.load import load_config
from rltrain.config.schema import Config
from rltrain.config.schema.trainer import TrainerConfig
from rltrain.run.changes import tell_changes, tell_finished, write_config
from rltrain.run.checkpoints import folder as checkpoint
from rltrain.run.checkpoints import manifest, resume
from rltrain.run.checkpoints import saver as saving
from rltrain.run.checkpoints.folder import Checkpoints, RunFolder
from rltrain.run.checkpoints.manifest import read_record
from rltrain.run.checkpoints.resume import Start, files_of, find_start, verified
from rltrain.run.checkpoints.room import check_room, checkpoint_bytes, steps_saved, superfluous
from rltrain.run.checkpoints.saver import Saver
from rltrain.trainer.progress import Progress


def save(folder: RunFolder, step: int) -> None:
    temporary = folder.begin_save(step)
    (temporary / "actor").mkdir()
    (temporary / "actor" / "shard.bin").write_bytes(b"x" * 100)
    (temporary / "progress.json").write_text(json.dumps({"global_step": step}))
    folder.commit(temporary, step, {})


def newest(keep: int | None):
    return partial(superfluous, TrainerConfig(max_actor_ckpt_to_keep=keep), by_time=lambda step: False)


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
    cfg = load_config(["trainer.resume_mode=resume_path", f"trainer.resume_from_path={newest}"]).config
    with pytest.raises(CheckpointError, match="global_step_2 cannot be resumed from"):
        find_start(cfg, folder, None)


@pytest.mark.parametrize("tracker", ["latest_checkpointed_iteration.txt", "checkpoint_tracker.json", ""])
def test_a_checkpoint_of_verls_is_called_that(folder, tracker):
    actor = folder.step_folder(10) / "actor"
    actor.mkdir(parents=True)
    if tracker:
        (folder.path / tracker).write_text("10")
    else:
        (actor / "model_world_size_8_rank_0.pt").touch()
    with pytest.raises(
        CheckpointError, match=r"this is a checkpoint of verl's.*rltrain\.checkpoint export.*a new trainer.default"
    ):
        folder.newest()


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


def test_a_damaged_checkpoint_makes_way_for_a_new_one(folder):
    save(folder, 1)
    (folder.step_folder(1) / "actor" / "shard.bin").unlink()
    save(folder, 1)
    assert folder.newest() == folder.step_folder(1)
    assert len(list(folder.path.glob("damaged_global_step_1_*"))) == 1


def test_pruning_keeps_the_newest(folder):
    for step in (1, 2, 3, 10):
        save(folder, step)
    folder.prune(newest(None))
    assert folder.steps() == [1, 2, 3, 10]
    folder.prune(newest(2), str(folder.step_folder(1)), None)
    assert folder.steps() == [1, 3, 10]
    folder.prune(newest(2))
    assert folder.steps() == [3, 10]


def test_a_damaged_checkpoint_is_not_the_best(folder):
    for step in (1, 2, 3, 4):
        save(folder, step)
    (folder.step_folder(2) / "actor" / "shard.bin").unlink()
    saver, _ = saver_of(folder, "trainer.keep_best=m", "trainer.max_actor_ckpt_to_keep=1")
    for step, value in enumerate((0.3, 0.9, 0.1, 0.1, 0.1), start=1):
        saver.best.observe(step, {"m": value})
    saver.save(5, Progress())
    assert folder.steps() == [1, 2, 5]


def half_written(folder: RunFolder, step: int) -> tuple[Path, dict[str, str]]:
    """A save of which one of two files, that were both written, is there."""
    temporary = folder.begin_save(step)
    (temporary / "progress.json").write_text(json.dumps({"global_step": step}))
    (temporary / "__0_0.distcp").write_bytes(b"x")
    return temporary, {str(temporary / f"__{rank}_0.distcp"): xxhash.xxh3_128(b"x").hexdigest() for rank in (0, 1)}


def test_a_file_that_was_written_must_be_there(folder, monkeypatch):
    monkeypatch.setattr(manifest, "_SEEN_S", 0.2)
    temporary, digests = half_written(folder, 1)
    with pytest.raises(DiskError, match=r"__1_0.distcp was written and is not there \(1 of 2 such files"):
        folder.commit(temporary, 1, digests)
    assert folder.steps() == []


def test_a_file_that_storage_shows_later_is_waited_for(folder):
    temporary, digests = half_written(folder, 1)
    later = threading.Timer(0.3, (temporary / "__1_0.distcp").write_bytes, [b"x"])
    later.start()
    files = json.loads((folder.commit(temporary, 1, digests) / "manifest.json").read_text())["files"]
    later.join()
    assert files["__1_0.distcp"] == {"bytes": 1, "xxh3_128": xxhash.xxh3_128(b"x").hexdigest()}


def test_a_kill_while_pruning_leaves_no_half_of_a_checkpoint(folder, monkeypatch):
    def killed(path, **_):
        (path / "progress.json").unlink()
        raise SystemExit

    for step in (1, 2):
        save(folder, step)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", killed)
        with pytest.raises(SystemExit):
            folder.prune(newest(1))
    assert folder.steps() == [2]
    folder.release()
    RunFolder(str(folder.path)).release()
    assert not list(folder.path.glob(".tmp_*"))


def test_files_in_use_do_not_stop_pruning(folder, monkeypatch, caplog):
    def not_empty(*_, **__):  # as network storage has it, which keeps a file that is open as `.nfs…`
        raise OSError(39, "Directory not empty")

    for step in (1, 2, 3):
        save(folder, step)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", not_empty)
        folder.prune(newest(1))
    assert folder.steps() == [3]
    assert caplog.text.count("cannot be removed whole") == 2
    folder.prune(newest(1))
    assert not list(folder.path.glob(".tmp_*"))


def test_pruning_reads_no_checkpoint_twice(folder, monkeypatch):
    read, real = [], manifest.altered
    monkeypatch.setattr(manifest, "altered", lambda files: read.append(files) or real(files))
    for step in (1, 2):
        save(folder, step)
    folder.prune(newest(2))
    assert not read, "this process has written them"
    folder.release()
    again = RunFolder(str(folder.path))
    for _ in range(3):
        again.prune(newest(1))
    assert len(read) == 2
    again.release()


def test_a_second_run_in_the_same_folder_is_refused(folder):
    with pytest.raises(ConfigError, match=r"in use by pid \d+"):
        RunFolder(str(folder.path))


def test_the_lock_of_a_host_that_is_gone_is_waited_for(folder, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "_FREED_S", 0.2)
    (folder.path / "run.lock").write_text("pid 7 on elsewhere, started 2026-01-03 10:15:00")
    with pytest.raises(StorageError, match="in use by pid 7 on elsewhere"):
        RunFolder(str(folder.path))
    assert caplog.text.count("is locked by pid 7 on elsewhere") == 1
    monkeypatch.setattr(checkpoint, "_FREED_S", 30.0)
    freed = threading.Timer(0.2, folder.release)
    freed.start()
    RunFolder(str(folder.path)).release()
    freed.join()


def test_storage_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    folder = RunFolder(str(tmp_path / "run"))
    assert "cannot be locked" in caplog.text
    assert f"pid {os.getpid()}" in (folder.path / "run.lock").read_text()
    folder.release()


def saver_of(folder: RunFolder, *settings: str, dataset: str = "rows:1 5 rows of a.parquet") -> tuple[Saver, Config]:
    """A saver of a model of 1000 weights that has nothing to write."""
    cfg = load_config([f"trainer.default_local_dir={folder.path}", *settings]).config
    saver = Saver(cfg, folder, None, None, dataset, 1000, 1000)
    saver._roles = {}
    cfg.actor_rollout_ref.actor.checkpoint.save_contents = []
    return saver, cfg


def test_a_checkpoint_of_another_version_is_refused(folder, monkeypatch):
    saver, cfg = saver_of(folder, "algorithm.adv_estimator=grpo")
    saver.save(1, Progress())
    record = resume.read_record(folder.step_folder(1))
    monkeypatch.setattr(resume, "read_record", lambda _: {k: v for k, v in record.items() if k != "in_flight"})
    with pytest.raises(CheckpointError, match=r"another version of rltrain.*lacks in_flight.*resume_weights_only=True"):
        find_start(cfg, folder, "rows:1 5 rows of a.parquet")


@pytest.mark.parametrize(
    ("key", "value"), [("actor_rollout_ref.actor.freeze_vision_tower", "True"), ("data.max_pixels", "9000")]
)
def test_what_is_made_of_pictures_must_stay(folder, monkeypatch, key, value):
    grpo = "algorithm.adv_estimator=grpo"
    saver, cfg = saver_of(folder, grpo)
    saver.save(1, Progress())
    record = resume.read_record(folder.step_folder(1))
    # Checkpoints that were made before there was the key go on.
    then = record["frozen"].pop(key)
    monkeypatch.setattr(resume, "read_record", lambda _: record)
    assert find_start(cfg, folder, None).step == 1
    cfg = load_config([f"trainer.default_local_dir={folder.path}", grpo, f"{key}={value}"]).config
    assert find_start(cfg, folder, None, images=False).step == 1
    with pytest.raises(CheckpointError, match=f"{key}: {then} then, {value} now"):
        find_start(cfg, folder, None)


RECORDED = Path(__file__).parent / "recorded"
ROWS = "rows:ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb 2048 rows of train.parquet"


def recorded(folder: RunFolder, name: str) -> Config:
    """A checkpoint of step 4 with the progress.json that another version wrote; the settings of that run."""
    _, cfg = saver_of(folder, "algorithm.adv_estimator=grpo")
    temporary = folder.begin_save(4, files_of(Progress(batches_drawn=4), 4, cfg, ROWS))
    shutil.copy(RECORDED / f"{name}.json", temporary / "progress.json")
    folder.commit(temporary, 4, {})
    return cfg


def test_a_checkpoint_of_0_1_0_resumes(folder, caplog):
    caplog.set_level(logging.INFO)
    cfg = recorded(folder, "progress_0_1_0")
    assert "version" not in read_record(folder.step_folder(4))
    start = find_start(cfg, folder, ROWS)
    assert (start.step, start.progress.batches_drawn) == (4, 4)
    assert "4 steps are done, saved by rltrain 0.1.0" in caplog.text
    with pytest.raises(
        CheckpointError, match=r"another run, saved by rltrain 0.1.0 \(training data: 2048 rows of train"
    ):
        find_start(cfg, folder, "rows:2 4 rows of b.parquet")


def test_a_checkpoint_that_knows_its_data_otherwise_is_refused_by_its_version(folder):
    cfg = recorded(folder, "progress_0_1_0_files")
    with pytest.raises(CheckpointError) as caught:
        find_start(cfg, folder, ROWS)
    said = str(caught.value)
    assert f"was saved by another version of rltrain (0.1.0; this is {__version__}): it knows its training data" in said
    assert "by a digest of files, and this version by one of rows" in said
    assert "not the same" not in said
    assert find_start(cfg, folder, None).step == 4  # nothing is compared where the rows are not known
    weights = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder.step_folder(4)}"]
    elsewhere = Checkpoints(str(folder.path.parent / "new"))
    taken = load_config([*weights, "trainer.resume_weights_only=True", "algorithm.adv_estimator=grpo"]).config
    assert find_start(taken, elsewhere, ROWS).weights_only


def test_version_and_kind_of_digest_are_recorded(folder):
    saver_of(folder, "algorithm.adv_estimator=grpo")[0].save(1, Progress())
    record = read_record(folder.step_folder(1))
    assert (record["version"], record["digest"]) == (__version__, "rows")


def test_other_training_data_is_refused_by_name(folder):
    grpo = "algorithm.adv_estimator=grpo"
    saver, cfg = saver_of(folder, grpo)
    saver.save(1, Progress())
    assert find_start(cfg, folder, "rows:1 5 rows of renamed.parquet").step == 1
    with pytest.raises(CheckpointError, match=r"5 rows of a.parquet then, 4 rows of b.parquet now") as caught:
        find_start(cfg, folder, "rows:2 4 rows of b.parquet")
    assert "rows:" not in str(caught.value)


def test_adapters_of_a_critic_stay_with_the_model_under_them(folder, monkeypatch):
    lora, path = "critic.model.lora_rank=4", "critic.model.path=/one"
    saver_of(folder, lora, path)[0].save(1, Progress())
    (folder.step_folder(1) / "critic").mkdir()
    assert find_start(saver_of(folder, lora, path)[1], folder, None).step == 1
    other = saver_of(folder, lora, "critic.model.path=/two")[1]
    with pytest.raises(CheckpointError, match=r"critic\.model\.path: /one then, /two now"):
        find_start(other, folder, None)
    # Earlier versions did not say which model it was.
    record = read_record(folder.step_folder(1))
    del record["frozen"]["critic.model.path"]
    monkeypatch.setattr(resume, "read_record", lambda _: record)
    assert find_start(other, folder, None).step == 1


@pytest.mark.parametrize("mode", ["resume_path", "disable"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_run_that_began_elsewhere_goes_on_too(folder, tmp_path, caplog, mode, weights_only):
    grpo = "algorithm.adv_estimator=grpo"
    old = RunFolder(str(tmp_path / "old"))
    saver_of(old, grpo)[0].save(7, Progress())
    path = [f"trainer.resume_from_path={old.step_folder(7)}"] if mode == "resume_path" else []
    command = [grpo, f"trainer.resume_mode={mode}", f"trainer.resume_weights_only={weights_only}", *path]
    saver, cfg = saver_of(folder, *command)
    begun = find_start(cfg, folder, None)
    assert begun.folder == (old.step_folder(7) if path else None)
    first = begun.step + 1
    for step in (first, first + 1, first + 2):
        saver.save(step, Progress(batches_drawn=step))
    (folder.step_folder(first + 2) / "sampler.npz").unlink()
    caplog.set_level(logging.INFO)
    start = find_start(cfg, folder, None)
    assert (start.step, start.folder, start.weights_only) == (first + 1, folder.step_folder(first + 1), False)
    assert start.progress.batches_drawn == first + 1
    assert f"by the same command (trainer.resume_mode={mode})" in caplog.text
    # Another start than the one of the run is refused, as before.
    save(old, 8)
    other = [grpo, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={old.step_folder(8)}"]
    # The key that decides the folder is named: where it is set, another name of the experiment changes nothing.
    with pytest.raises(
        CheckpointError, match=r"already holds a checkpoint of step.*another trainer\.default_local_dir"
    ):
        find_start(saver_of(folder, *other, "trainer.resume_weights_only=True")[1], folder, None)
    old.release()


def test_a_step_is_of_its_run_however_its_path_is_written(folder, monkeypatch):
    saver, _ = saver_of(folder, "algorithm.adv_estimator=grpo")
    saver.save(4, Progress())
    monkeypatch.chdir(folder.path.parent)
    monkeypatch.setenv("HOME", str(folder.path.parent))
    for name in ("run/global_step_4", "./run/../run/global_step_4/", "~/run/global_step_4"):
        words = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={name}")
        start = find_start(saver_of(folder, "algorithm.adv_estimator=grpo", *words)[1], folder, None)
        # Else the metrics of its four steps would be moved aside as another run's.
        assert start.is_of(folder.path)
        assert start.folder == folder.step_folder(4)


@pytest.mark.parametrize(
    ("settings", "first", "total", "steps"),
    [
        (["trainer.save_freq=2"], 0, 5, [2, 4, 5]),
        (["trainer.save_freq=2"], 3, 6, [4, 6]),
        (["trainer.save_freq=2", "trainer.save_at_end=False"], 0, 5, [2, 4]),
        (["trainer.save_freq=epoch"], 0, 7, [3, 6, 7]),
        (["trainer.save_freq=epoch", "trainer.save_at_end=False"], 3, 7, [6]),
        ([], 0, 5, [5]),
        ([], 5, 5, []),
    ],
)
def test_the_steps_that_will_be_saved_are_known(settings, first, total, steps):
    assert steps_saved(load_config(settings).config.trainer, first, total, 3) == steps


def test_what_a_checkpoint_takes_follows_from_the_weights():
    cfg = load_config(["algorithm.adv_estimator=grpo"]).config
    assert checkpoint_bytes(cfg, 100, 100) == 1600
    assert checkpoint_bytes(cfg, 100, 10) == 520
    assert checkpoint_bytes(load_config(["algorithm.adv_estimator=gae"]).config, 100, 100) == 2800


def test_room_is_asked_for_before_the_first_step(folder, monkeypatch, caplog):
    def free(num_bytes: int) -> None:
        monkeypatch.setattr(
            saving.shutil, "disk_usage", lambda path: saving.shutil._ntuple_diskusage(10**9, 0, num_bytes)
        )

    grpo = ["algorithm.adv_estimator=grpo", "trainer.save_freq=1"]
    saver, _ = saver_of(folder, *grpo, "trainer.max_actor_ckpt_to_keep=null")  # 16,000 bytes each
    free(15_999)
    with pytest.raises(DiskError, match="no room for the checkpoint of step 3"):
        saver.check_room(2, 6)
    saver.check_room(6, 6)  # nothing left to save
    free(50_000)
    saver.check_room(2, 6)
    check_room(saver._cfg.trainer, folder.path, 16_000, 2, 6)
    assert "no room for the 4 checkpoints that this run keeps" in caplog.text
    limited, _ = saver_of(folder, *grpo, "trainer.max_actor_ckpt_to_keep=3")
    with pytest.raises(DiskError, match=r"no room for 4 more checkpoints, as trainer.max_actor_ckpt_to_keep=3"):
        limited.check_room(2, 6)
    save(folder, 2)  # one of them is there already
    limited.check_room(2, 6)


def test_a_resume_asks_for_the_room_of_its_checkpoint(folder, monkeypatch):
    grpo = ["algorithm.adv_estimator=grpo", "trainer.max_actor_ckpt_to_keep=null"]
    saver, cfg = saver_of(folder, *grpo)
    saver.save(1, Progress())
    start = find_start(cfg, folder, None)
    files = (file for file in start.folder.iterdir() if file.name != "manifest.json")
    assert start.size == sum(file.stat().st_size for file in files)
    again, _ = saver_of(folder, *grpo)  # estimates 16,000 bytes
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: saving.shutil._ntuple_diskusage(10**9, 0, start.size))
    again.check_room(start.step, 2, start.size)
    with pytest.raises(DiskError, match="no room for the checkpoint of step 2"):
        again.check_room(start.step, 2, start.size + 1)
    assert Start(folder=start.folder, weights_only=True).size == 0


def test_room_that_comes_back_late_is_waited_for(folder, monkeypatch):
    room = [0, 10**9, 0, 10**9, 10**9]
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: saving.shutil._ntuple_diskusage(10**9, 0, room.pop()))
    monkeypatch.setattr(saving, "_LOOK_S", 0.01)
    saver, _ = saver_of(folder, "algorithm.adv_estimator=grpo", "trainer.max_actor_ckpt_to_keep=1")
    for step in (1, 2, 3):  # the second removes the first
        saver.save(step, Progress())
    assert (folder.steps(), room) == ([3], [0])
    folder.pruned_at -= saving._FREED_S
    room[:] = [0, 0]
    with pytest.raises(DiskError, match="no room for the checkpoint of step 4"):
        saver.save(4, Progress())


def started(folder: RunFolder, *settings: str) -> None:
    write_config(folder, load_config(settings))


def test_a_resumed_run_logs_changes_and_keeps_old_settings(folder, caplog):
    caplog.set_level(logging.INFO)
    name = "trainer.experiment_name=mine"
    started(folder, name, "algorithm.adv_estimator=grpo")
    started(folder, name, "algorithm.adv_estimator=grpo")  # nothing new to keep
    again = load_config([name, "algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.optim.lr=1e-4"])
    tell_changes(again, Start(3, folder=folder.path / "global_step_3"))
    assert "  actor_rollout_ref.actor.optim.lr: 1e-06 -> 0.0001\n" in caplog.text + "\n"
    assert caplog.text.count(" -> ") == 3  # and the estimator, once more in the warning
    assert "the 3 steps so far are of another experiment" in caplog.text
    write_config(folder, again)
    started(folder, name)
    assert "adv_estimator: grpo" in (folder.path / "config.1.yaml").read_text()
    assert "adv_estimator: rloo" in (folder.path / "config.2.yaml").read_text()
    assert not (folder.path / "config.3.yaml").exists()


def test_a_finished_run_says_where_it_is_and_what_differs(folder, caplog):
    caplog.set_level(logging.INFO)
    started(folder, "trainer.experiment_name=mine", "data.seed=3", "trainer.logger=[console]")
    again, start = load_config(["trainer.experiment_name=mine"]), Start(3, folder=folder.path / "global_step_3")
    changes = tell_changes(again, start)
    assert changes == ["data.seed: 3 -> 1"]
    caplog.clear()
    tell_finished(folder.path, 3, changes)
    assert "nothing left to do: the run has its 3 steps" in caplog.text
    assert str(folder.path) in caplog.text
    assert "other settings than this command has (data.seed: 3 -> 1). A new run" in caplog.text
    caplog.clear()
    tell_finished(folder.path, 3, [])
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_default_written_out_is_no_other_experiment(folder, caplog):
    caplog.set_level(logging.INFO)
    mode, gspo = "actor_rollout_ref.actor.loss_agg_mode", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"
    start = Start(2, folder=folder.path / "global_step_2")
    # As earlier versions wrote it, whose default was a name.
    started(folder, f"{mode}=token-mean")
    tell_changes(load_config([]), start)
    assert not caplog.records
    started(folder, f"{mode}=token-mean", gspo)
    with pytest.raises(ConfigError, match=f"{mode}: token-mean -> seq-mean-token-mean"):
        tell_changes(load_config([gspo]), start)


def test_another_experiment_needs_a_name_to_resume(folder):
    started(folder, "algorithm.adv_estimator=grpo")
    start = Start(2, folder=folder.path / "global_step_2")
    with pytest.raises(ConfigError, match=r"algorithm.adv_estimator: grpo -> rloo.*trainer.experiment_name="):
        tell_changes(load_config(["algorithm.adv_estimator=rloo"]), start)
    with pytest.raises(ConfigError, match="clip_ratio_high"):
        tell_changes(
            load_config(["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.clip_ratio_high=0.3"]), start
        )
    tell_changes(load_config(["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.optim.lr=1e-5"]), start)
    tell_changes(load_config(["algorithm.adv_estimator=rloo", "trainer.experiment_name=run"]), start)
    of_weights = Start(folder=start.folder, weights_only=True)
    tell_changes(load_config(["algorithm.adv_estimator=rloo", "trainer.resume_weights_only=True"]), of_weights)


def add_digests(folder: Path) -> None:
    """What a save writes beside the sizes."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        entry["xxh3_128"] = xxhash.xxh3_128((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def flip(file: Path, bit: int) -> None:
    """Change one bit of a file."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.mark.fault("A flipped bit in any file of a checkpoint is found, and the older checkpoint taken")
def test_a_flipped_bit_in_any_file_is_found(folder, caplog):
    saver, cfg = saver_of(folder, "algorithm.adv_estimator=grpo")
    for step in (1, 2):
        experts = {"tokens": np.arange(6).reshape(2, 3)}
        saver.save(step, Progress(step, sampler={"seen": np.arange(9)}, expert_load=experts))
        add_digests(folder.step_folder(step))
    newest, random = folder.step_folder(2), Random(0)
    files = [*(file for file in newest.rglob("*") if file.is_file() and file.name != "manifest.json")]
    assert {file.name for file in files} == {"progress.json", "sampler.npz", "lengths.npz", "experts.npz"}
    for file in files:
        for bit in random.sample(range(8 * file.stat().st_size), 20):
            flip(file, bit)
            assert folder.newest() == folder.step_folder(1), (file, bit)
            assert f"{file.name} have changed since it was saved" in caplog.text
            flip(file, bit)
    assert find_start(cfg, folder, None).step == 2
    # A flip in the manifest itself either changes what it says of a file, or nothing.
    manifest = newest / "manifest.json"
    for bit in random.sample(range(8 * manifest.stat().st_size), 60):
        flip(manifest, bit)
        assert folder.newest() == folder.step_folder(1) or harmless(manifest, bit), bit
        flip(manifest, bit)
    (newest / "manifest.json").unlink()
    saver.save(2, Progress())  # the damaged one makes way


def harmless(manifest: Path, bit: int) -> bool:
    """Whether a manifest with a flipped bit says of its files what it said before."""
    flipped = json.loads(manifest.read_bytes())
    flip(manifest, bit)
    before = json.loads(manifest.read_bytes())
    flip(manifest, bit)
    return flipped["files"] == before["files"]


def test_what_workers_distrust_is_passed_over_and_replaced(folder, caplog):
    """Large files are read by workers; what they find, the next choice and the next save know."""
    saver, cfg = saver_of(folder, "algorithm.adv_estimator=grpo")
    saver.save(1, Progress())
    saver.save(2, Progress())
    large = folder.step_folder(2) / "large.bin"
    large.write_bytes(bytes(5 * 2**20))
    manifest = json.loads((folder.step_folder(2) / "manifest.json").read_text())
    manifest["files"]["large.bin"] = {"bytes": 5 * 2**20}
    (folder.step_folder(2) / "manifest.json").write_text(json.dumps(manifest))
    add_digests(folder.step_folder(2))
    group, asked = SimpleNamespace(world=2), []

    def ask(function, shares):
        asked.extend(shares)
        return SimpleNamespace(collect=lambda: [function(share) for share in shares])

    group.ask = ask
    find = partial(find_start, cfg, folder, None)
    assert verified(find(), group, folder, find).step == 2
    assert [[file.name for file, _ in share] for share in asked] == [["large.bin"], []]
    flip(large, 12345)
    assert find().step == 2
    assert verified(find(), group, folder, find).step == 1
    assert "large.bin have changed since it was saved" in caplog.text
    saver.save(2, Progress())
    assert len(list(folder.path.glob("damaged_global_step_2_*"))) == 1
    assert find().step == 2, "what has taken its place is trusted"


@pytest.fixture
def hiccup(monkeypatch):
    """hiccup(file) -> end: reading the file gives EIO, and its size 0, until ``end()``."""
    monkeypatch.setattr(storage, "TRIED_S", 0.2)
    monkeypatch.setattr(storage, "PAUSE_S", 0.02)

    def hiccup(file):
        kept = file.rename(file.with_name("kept"))
        file.symlink_to("/proc/self/mem")
        return lambda: kept.replace(file)

    return hiccup


@pytest.mark.fault("A checkpoint that cannot be read for a moment is neither passed over nor set aside, exit 75")
@pytest.mark.parametrize("name", ["manifest.json", "actor/empty", "actor/.metadata", "progress.json"])
def test_what_cannot_be_read_now_is_no_damage(folder, hiccup, monkeypatch, name):
    save(folder, 1)
    temporary = folder.begin_save(2)
    (temporary / "actor").mkdir()
    (temporary / "actor" / "empty").write_text("")
    (temporary / "progress.json").write_text('{"global_step": 2}')
    newest = folder.commit(temporary, 2)
    if name == "progress.json":  # without a digest, of the size that the device of the error shows
        (newest / "manifest.json").write_text('{"files": {"progress.json": {"bytes": 0}}}')
    if name.endswith(".metadata"):
        (newest / name).write_text("")
    end = hiccup(newest / name)
    for use in (folder.newest, partial(folder.begin_save, 2)):
        with pytest.raises(StorageError, match=f"{name} cannot be read: Input/output error") as caught:
            use()
        assert caught.value.exit_code == 75
    if name in ("manifest.json", "actor/empty"):
        monkeypatch.setattr(storage, "TRIED_S", 60)
        threading.Timer(0.1, end).start()
        assert folder.newest() == newest
    assert not list(folder.path.glob("damaged_*"))


def test_an_old_checkpoint_that_cannot_be_read_is_no_failed_save(folder, hiccup, caplog):
    saver, _ = saver_of(folder, "trainer.max_actor_ckpt_to_keep=1")
    saver.save(1, Progress())
    hiccup(folder.step_folder(1) / "manifest.json")
    saver.save(2, Progress())
    assert (saver.last_step, folder.steps()) == (2, [1, 2])
    assert "an older checkpoint could not be removed" in caplog.text


def test_a_folder_that_cannot_be_looked_into_is_not_empty(folder, monkeypatch):
    """A run that took it for empty would begin anew."""
    monkeypatch.setattr(storage, "TRIED_S", 0)
    save(folder, 1)
    folder.path.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        with pytest.raises(StorageError, match=f"{folder.path} cannot be read: Permission denied"):
            folder.newest()
    finally:
        os.seteuid(user)
        folder.path.chmod(0o700)


@pytest.mark.parametrize(
    "text",
    ["[]", '{"files": null}', '{"files": {}}', '{"files": {"progress.json": {}}}', '{"files": {"progress.json": 3}}',
     '{"files": {"progress.json": {"bytes": "9"}}}', "[" * 100_000, b"\xff\xfe".decode("latin-1"), ""],
)  # fmt: skip
def test_a_manifest_that_is_none_is_damage(folder, text):
    save(folder, 1)
    save(folder, 2)
    (folder.step_folder(2) / "manifest.json").write_text(text, encoding="latin-1")
    assert folder.newest() == folder.step_folder(1)


@pytest.mark.parametrize("text", ["[]", "{}", '{"global_step": "2"}', "[" * 100_000, '{"global_step": 2'])
def test_a_record_that_is_none_is_damage_without_digests(folder, text):
    save(folder, 1)
    save(folder, 2)
    record, manifest = folder.step_folder(2) / "progress.json", folder.step_folder(2) / "manifest.json"
    record.write_text(text)
    files = json.loads(manifest.read_text())["files"] | {"progress.json": {"bytes": len(text)}}
    manifest.write_text(json.dumps({"files": files}))
    assert folder.newest() == folder.step_folder(1)


def test_a_run_with_damaged_checkpoints_alone_is_not_begun_anew(folder):
    save(folder, 1)
    (folder.step_folder(1) / "progress.json").unlink()
    with pytest.raises(CheckpointError, match=r"global_step_1: progress.json is missing.*resume_mode=disable"):
        folder.newest()


def test_a_damaged_checkpoint_counts_as_none_when_pruning(folder):
    for step in (1, 2, 3):
        save(folder, step)
    (folder.step_folder(3) / "progress.json").unlink()
    folder.prune(newest(1))
    assert folder.steps() == [2, 3]


def test_leftovers_of_any_kind_are_removed(folder):
    (folder.path / ".tmp_file").write_text("")
    (folder.path / ".tmp_link").symlink_to("/nowhere")
    (folder.path / ".tmp_folder").mkdir()
    folder.release()
    RunFolder(str(folder.path)).release()
    assert not list(folder.path.glob(".tmp_*"))


def test_a_lock_that_is_a_folder_is_told(tmp_path):
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(DiskError, match="nothing can be written into the run folder"):
        RunFolder(str(tmp_path))
    assert "run.lock is a folder" in Checkpoints(str(tmp_path)).problem()
