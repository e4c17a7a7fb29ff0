"""The run folder: checkpoints that are complete or absent, one owner, and space for saves."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
import xxhash

from rltrain.common import storage
from rltrain.common.errors import CheckpointError, ConfigError, DiskError, StorageError
from rltrain.config.load import load_config
from rltrain.config.schema.trainer import TrainerConfig
from rltrain.config.step_passes import make_step_passes
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.manifest import read_record
from rltrain.run.checkpoints.resume import ResumePoint, find_resume_point
from rltrain.run.checkpoints.room import check_room, checkpoint_bytes, superfluous
from rltrain.trainer.progress import Progress
from tests.trainer.saves import GRPO, after_sleeps, saver_of


def save(folder: RunFolder, *steps: int) -> None:
    for step in steps:
        temporary = folder.begin_save(step)
        (temporary / "actor").mkdir()
        (temporary / "actor" / "shard.bin").write_bytes(b"x" * 100)
        (temporary / "progress.json").write_text(json.dumps({"global_step": step}))
        folder.commit(temporary, step, {})


def newest(keep: int | None):
    return partial(superfluous, TrainerConfig(max_actor_ckpt_to_keep=keep), by_time=lambda step: False)


def rewrite_manifest(checkpoint: Path, change: Callable[[dict], object]) -> None:
    """Change the files that the manifest lists."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    change(manifest["files"])
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def flip(file: Path, bit: int) -> None:
    """Change one bit of a file."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def test_the_newest_whole_checkpoint_is_found(folder):
    assert folder.newest() is None
    save(folder, 2, 10, 9)
    assert folder.newest() == folder.step_folder(10)
    assert read_record(folder.newest())["global_step"] == 10
    with pytest.raises(CheckpointError, match="never overwritten"):
        folder.begin_save(10)


# What a file of a checkpoint has become: its text, or None where it is gone.
DAMAGE = [
    ("actor/shard.bin", "x" * 99), ("actor/shard.bin", None), ("progress.json", None), ("manifest.json", None),
    *(("manifest.json", text) for text in ("{", "[]", '{"files": {}}', '{"files": {"progress.json": 3}}', "[" * 10**5)),
    *(("progress.json", text) for text in ("[]", '{"global_step": "2"}', '{"global_step": 2')),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), DAMAGE)
def test_a_damaged_checkpoint_is_named_passed_over_and_replaced(folder, name, text, caplog):
    save(folder, 1, 2)
    damaged = folder.step_folder(2)
    (damaged / name).unlink() if text is None else (damaged / name).write_text(text)
    if name == "progress.json" and text:  # a manifest without digests, as earlier versions wrote it
        entries = {"progress.json": {"bytes": len(text)}}
        rewrite_manifest(damaged, lambda files: (files.clear(), files.update(entries)))
    assert folder.newest() == folder.step_folder(1)
    assert f"passing over {damaged}: " in caplog.text
    cfg = load_config(["trainer.resume_mode=resume_path", f"trainer.resume_from_path={damaged}"]).config
    with pytest.raises(CheckpointError, match="global_step_2 cannot be resumed from"):
        find_resume_point(cfg, folder, None)
    save(folder, 2)
    assert folder.newest() == damaged
    assert len(list(folder.path.glob("damaged_global_step_2_*"))) == 1


def test_a_run_with_damaged_checkpoints_alone_is_not_begun_anew(folder):
    save(folder, 1)
    (folder.step_folder(1) / "progress.json").unlink()
    with pytest.raises(CheckpointError, match=r"global_step_1: progress.json is missing.*resume_mode=disable"):
        folder.newest()


@pytest.mark.parametrize("tracker", ["latest_checkpointed_iteration.txt", "global_step_10/actor/model_rank_0.pt"])
def test_a_checkpoint_of_verls_is_called_that(folder, tracker):
    (folder.step_folder(10) / "actor").mkdir(parents=True)
    (folder.path / tracker.replace("model_rank", "model_world_size_8_rank")).write_text("10")
    with pytest.raises(CheckpointError, match=r"this is a checkpoint of verl\..*rltrain\.checkpoint export"):
        folder.newest()


@pytest.mark.smoke("A checkpoint is complete or absent")
def test_leftovers_of_an_interrupted_save_are_removed(folder):
    save(folder, 1)
    (folder.begin_save(2) / "half").write_text("…")
    (folder.path / ".tmp_file").write_text("")
    (folder.path / ".tmp_link").symlink_to("/nowhere")
    folder.release()
    again = RunFolder(str(folder.path))
    assert again.newest() == again.step_folder(1)
    assert not list(again.path.glob(".tmp_*"))
    again.release()


def test_pruning_keeps_the_newest_and_damaged_ones(folder):
    save(folder, 1, 2, 3, 10)
    folder.prune(newest(None))
    assert folder.steps() == [1, 2, 3, 10]
    folder.prune(newest(2), str(folder.step_folder(1)), None)
    assert folder.steps() == [1, 3, 10]
    (folder.step_folder(10) / "progress.json").unlink()
    folder.prune(newest(1))
    assert folder.steps() == [3, 10]


def test_a_damaged_checkpoint_is_not_the_best(folder):
    save(folder, 1, 2, 3, 4)
    (folder.step_folder(2) / "actor" / "shard.bin").unlink()
    saver, _ = saver_of(folder, "trainer.keep_best=m", "trainer.max_actor_ckpt_to_keep=1")
    for step, value in enumerate((0.3, 0.9, 0.1, 0.1, 0.1), start=1):
        saver.best.observe(step, {"m": value})
    saver.save(5, Progress())
    assert folder.steps() == [1, 2, 5]


@pytest.mark.parametrize("appears", [True, False])
def test_a_file_that_was_written_is_waited_for_and_must_come(folder, clock, appears):
    """Of two written files, one is visible at first."""
    temporary = folder.begin_save(1, {"progress.json": b'{"global_step": 1}', "__0_0.distcp": b"x"})
    digests = {str(temporary / f"__{rank}_0.distcp"): xxhash.xxh3_128(b"x").hexdigest() for rank in (0, 1)}
    if appears:
        after_sleeps(clock, 3, lambda: (temporary / "__1_0.distcp").write_bytes(b"x"))
        files = json.loads((folder.commit(temporary, 1, digests) / "manifest.json").read_text())["files"]
        assert files["__1_0.distcp"] == {"bytes": 1, "xxh3_128": xxhash.xxh3_128(b"x").hexdigest()}
    else:
        with pytest.raises(DiskError, match=r"__1_0.distcp was written but is missing \(1 of 2 such files"):
            folder.commit(temporary, 1, digests)
        assert folder.steps() == []


def test_a_kill_while_pruning_leaves_no_half_of_a_checkpoint(folder, monkeypatch):
    def killed(path, **_):
        (path / "progress.json").unlink()
        raise SystemExit

    save(folder, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(SystemExit):
            folder.prune(newest(1))
    assert folder.steps() == [2]
    folder.release()
    RunFolder(str(folder.path)).release()
    assert not list(folder.path.glob(".tmp_*"))


def test_the_lock_of_another_host_is_waited_for_and_that_of_this_one_is_not(folder, clock, caplog):
    with pytest.raises(ConfigError, match=r"in use by pid \d+"):
        RunFolder(str(folder.path), clock)
    assert not clock.asked
    (folder.path / "run.lock").write_text("pid 7 on elsewhere, started 2026-01-03 10:15:00")
    with pytest.raises(StorageError, match="in use by pid 7 on elsewhere"):
        RunFolder(str(folder.path), clock)
    assert caplog.text.count("is locked by pid 7 on elsewhere") == 1
    after_sleeps(clock, 3, folder.release)
    RunFolder(str(folder.path), clock).release()


def test_storage_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    folder = RunFolder(str(tmp_path / "run"))
    assert "cannot be locked" in caplog.text
    assert f"pid {os.getpid()}" in (folder.path / "run.lock").read_text()
    folder.release()


# -- room --------------------------------------------------------------------------------------------------------------


def test_what_a_checkpoint_takes_follows_from_the_weights():
    for keys, trained, size in (([GRPO], 100, 1600), ([GRPO], 10, 520), (["algorithm.adv_estimator=gae"], 100, 2800)):
        cfg = load_config(keys).config
        assert checkpoint_bytes(cfg.actor_rollout_ref.actor, make_step_passes(cfg), 100, trained) == size


def test_room_is_asked_for_before_the_first_step(folder, free, caplog):
    grpo = [GRPO, "trainer.save_freq=1"]
    saver, cfg = saver_of(folder, *grpo, "trainer.max_actor_ckpt_to_keep=null")  # 16,000 bytes each
    free(15_999)
    with pytest.raises(DiskError, match="no disk space for the checkpoint of step 3"):
        saver.check_room(2, 6)
    saver.check_room(6, 6)  # nothing left to save
    free(50_000)
    saver.check_room(2, 6)
    check_room(cfg.trainer, folder.path, 16_000, 2, 6)
    assert "no room for the 4 checkpoints that this run keeps" in caplog.text
    limited, _ = saver_of(folder, *grpo, "trainer.max_actor_ckpt_to_keep=3")
    with pytest.raises(DiskError, match=r"no room for 4 more checkpoints \(trainer.max_actor_ckpt_to_keep=3"):
        limited.check_room(2, 6)
    save(folder, 2)  # one of them is there already
    limited.check_room(2, 6)


def test_a_resume_asks_for_the_room_of_its_checkpoint(folder, free):
    grpo = [GRPO, "trainer.max_actor_ckpt_to_keep=null"]
    saver, cfg = saver_of(folder, *grpo)
    free(10**6)
    saver.save(1, Progress())
    start = find_resume_point(cfg, folder, None)
    files = (file for file in start.folder.iterdir() if file.name != "manifest.json")
    assert start.size == sum(file.stat().st_size for file in files)
    again, _ = saver_of(folder, *grpo)  # estimates 16,000 bytes
    free(start.size)
    again.check_room(start.step, 2, start.size)
    with pytest.raises(DiskError, match="no disk space for the checkpoint of step 2"):
        again.check_room(start.step, 2, start.size + 1)
    assert ResumePoint(folder=start.folder, weights_only=True).size == 0


def test_room_that_storage_gives_back_late_is_waited_for(folder, clock, free):
    saver, _ = saver_of(folder, GRPO, "trainer.max_actor_ckpt_to_keep=1", clock=clock)
    free(10**9)
    for step in (1, 2):  # the second removes the first
        saver.save(step, Progress())
    free(0)
    after_sleeps(clock, 3, lambda: free(10**9))
    saver.save(3, Progress())
    assert folder.steps() == [3]
    free(0)
    with pytest.raises(DiskError, match="no disk space for the checkpoint of step 4"):
        saver.save(4, Progress())


# -- contents ----------------------------------------------------------------------------------------------------------


def add_digests(checkpoint: Path) -> None:
    """Write the digests that a save of weights writes next to the sizes."""
    digest = lambda name: xxhash.xxh3_128((checkpoint / name).read_bytes()).hexdigest()  # noqa: E731
    rewrite_manifest(checkpoint, lambda files: [entry.update(xxh3_128=digest(name)) for name, entry in files.items()])


@pytest.mark.smoke("A flipped bit in a checkpoint is found before a run trains on it")
@pytest.mark.fault("A flipped bit in any file of a checkpoint is found, and the older checkpoint taken")
def test_a_flipped_bit_in_any_file_is_found(folder, caplog):
    saver, cfg = saver_of(folder, GRPO)
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
    assert find_resume_point(cfg, folder, None).step == 2
    # A flip in the manifest itself either changes what it says of a file, or nothing.
    manifest, listed = newest / "manifest.json", json.loads((newest / "manifest.json").read_text())["files"]
    for bit in random.sample(range(8 * manifest.stat().st_size), 60):
        flip(manifest, bit)
        assert folder.newest() == folder.step_folder(1) or json.loads(manifest.read_bytes())["files"] == listed, bit
        flip(manifest, bit)


@pytest.fixture
def hiccup(monkeypatch, clock):
    """hiccup(file) -> end: reading the file gives EIO, and its size 0, until ``end()``."""
    monkeypatch.setattr(storage, "clock", clock)

    def hiccup(file):
        kept = file.rename(file.with_name("kept"))
        file.symlink_to("/proc/self/mem")
        return lambda: kept.replace(file)

    return hiccup


@pytest.mark.fault("A checkpoint that cannot be read for a moment is neither passed over nor set aside, exit 75")
@pytest.mark.parametrize("name", ["manifest.json", "actor/empty", "actor/.metadata", "progress.json"])
def test_what_cannot_be_read_now_is_no_damage(folder, hiccup, clock, name):
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
        after_sleeps(clock, 2, end)
        assert folder.newest() == newest
    assert not list(folder.path.glob("damaged_*"))


def test_an_old_checkpoint_that_cannot_be_read_is_no_failed_save(folder, hiccup, caplog):
    saver, _ = saver_of(folder, "trainer.max_actor_ckpt_to_keep=1")
    saver.save(1, Progress())
    hiccup(folder.step_folder(1) / "manifest.json")
    saver.save(2, Progress())
    assert (saver.last_step, folder.steps()) == (2, [1, 2])
    assert "an older checkpoint could not be removed" in caplog.text


def test_a_folder_that_cannot_be_looked_into_is_not_empty(folder, hiccup):
    """A run that regarded the folder as empty would start over."""
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
