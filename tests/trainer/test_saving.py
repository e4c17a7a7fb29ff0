"""Saving while training goes on: nothing that comes later reaches the checkpoint, and digests are of what was meant."""

import json
import resource
import shutil
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from rltrain.base import storage
from rltrain.base.errors import DataError, DiskError, NonFiniteError, StorageError, WorkerLost
from rltrain.base.stop import Stop
from rltrain.models.files.hashed import hashed, write_weights
from rltrain.models.weights.export import Export
from rltrain.run.checkpoints import manifest
from rltrain.run.checkpoints import saver as saving_of_driver
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.manifest import find_damage
from rltrain.run.checkpoints.room import sized
from rltrain.run.checkpoints.saver import Saver
from rltrain.run.fit import Trainer
from rltrain.run.report.table import read_metrics
from rltrain.run.report.tracking import JsonLines
from rltrain.run.watchers.watcher import Watchers
from rltrain.workers import saving
from tests.local import LocalGroup, LocalHandle
from tests.trainer.steps import actor_weights, weights

pytestmark = pytest.mark.usefixtures("process_group")
GAE = {"algorithm__adv_estimator": "gae"}


class LaterGroup(LocalGroup):
    """What runs beside the steps begins when it is waited for."""

    def submit(self, calls, ranks=None, beside=False):
        return Later(self, calls) if beside else super().submit(calls, ranks)


class Later(LocalHandle):
    def __init__(self, group, calls) -> None:
        self.group, self.call, self.begun = group, calls[0], False

    def ready(self):
        return self.begun

    @property
    def found(self):
        if not self.begun:
            self.begun, self._found = True, self.group.run(self.call)
        return self._found


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(str(tmp_path / "run"))
    yield folder
    folder.release()


def saver_of(trainer, folder: RunFolder) -> Saver:
    group = LaterGroup(trainer.worker)
    for role in (trainer.actor, trainer.critic):
        if role:
            role._group = group
    return Saver(trainer.cfg, folder, trainer.actor, trainer.critic, "rows:1", 1, 1)


def test_what_is_trained_later_is_not_in_a_checkpoint(tiny_trainer, folder):
    trainer = tiny_trainer(**GAE)
    saver = saver_of(trainer, folder)
    # The second save uses the memory of the first.
    for step in (1, 2):
        trainer.step(step)
        embeddings = trainer.worker.actor.policy.model.get_input_embeddings().weight.full_tensor().clone()
        then = actor_weights(trainer)
        critic = weights(trainer.worker.critic.model)
        saver.save(step, trainer.progress)
        assert (saver.last_step, folder.steps()) == (step - 1, list(range(1, step)))
    trainer.step(3)
    assert not torch.equal(actor_weights(trainer), then)
    saver.on_wait()
    assert saver.last_step == 1, "nothing is written, so there is nothing to finish"
    saver.finish()
    last = folder.step_folder(2)
    assert (saver.last_step, folder.steps(), find_damage(last)) == (2, [1, 2], None)
    assert torch.equal(load_file(last / "huggingface" / "model.safetensors")["model.embed_tokens.weight"], embeddings)
    again = tiny_trainer(**GAE)
    for role in ("actor", "critic"):
        getattr(again, role).load(str(last / role), False)
    assert torch.equal(actor_weights(again), then)
    assert torch.equal(weights(again.worker.critic.model), critic)


def test_no_save_reads_back_what_it_has_written(tiny_trainer, folder, monkeypatch):
    trainer = tiny_trainer(**GAE)
    saver, read = saver_of(trainer, folder), []
    trainer.step(1)
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or real(path))
    saver.save(1, trainer.progress)
    saver.finish()
    files = json.loads((folder.step_folder(1) / "manifest.json").read_text())["files"]
    for name, entry in files.items():
        assert entry["xxh3_128"] == xxhash.xxh3_128(real(folder.step_folder(1) / name)).hexdigest(), name
    assert not [path for path in read if path.suffix in (".distcp", ".safetensors") or path.name == ".metadata"]


def test_without_room_for_a_copy_training_waits_and_it_is_said_once(tiny_trainer, folder, monkeypatch, caplog):
    monkeypatch.setattr(saving, "_SHARE", 0.0)
    trainer = tiny_trainer()
    saver = saver_of(trainer, folder)
    for step in (1, 2):
        trainer.step(step)
        saver.save(step, trainer.progress)
        assert saver.last_step == step
    assert caplog.text.count("are written while training waits (trainer.async_save)") == 1
    assert find_damage(folder.step_folder(2)) is None


def test_room_is_asked_for_at_each_save_before_it_is_taken(tiny_trainer, folder, monkeypatch):
    trainer, gathered, real = tiny_trainer(), [], Export.gather
    monkeypatch.setattr(Export, "gather", lambda self, copies: gathered.append(copies) or real(self, copies))
    saver, waited = saver_of(trainer, folder), []
    for step, share in ((1, 0.7), (2, 0.0), (3, 0.7)):
        monkeypatch.setattr(saving, "_SHARE", share)
        trainer.step(step)
        saver.save(step, trainer.progress)
        waited.append(saver.last_step == step)
    assert (gathered, waited) == ([True, False, True], [False, True, False])
    saver.finish()
    assert [find_damage(folder.step_folder(step)) for step in folder.steps()] == [None] * 3


def run_that_fails(trainer, folder: RunFolder, error: Exception):
    """The saver of a run that ends in its second step, while the checkpoint of the first is written."""
    saver, real = saver_of(trainer, folder), trainer.step

    def step(number):
        if number == 2:
            raise error
        return real(number)

    trainer.step = step
    plan = SimpleNamespace(total_steps=3, steps_per_epoch=1)
    run = Trainer(trainer.cfg, plan, folder, Stop(), 0, ExitStack(), trainer, saver, Watchers(saver))
    with pytest.raises(type(error), match=str(error)):
        run.fit()
    return saver


@pytest.mark.fault("An error in the step behind a save costs no checkpoint: what is being written is finished first")
@pytest.mark.parametrize("error", [NonFiniteError("not finite"), DataError("no row"), ValueError("a callback")])
def test_an_error_costs_no_checkpoint_under_way(tiny_trainer, folder, error):
    saver = run_that_fails(tiny_trainer(trainer__save_freq=1, trainer__test_freq=-1), folder, error)
    assert (saver.last_step, folder.steps(), find_damage(folder.step_folder(1))) == (1, [1], None)


def test_a_checkpoint_whose_writers_are_gone_is_not_waited_for(tiny_trainer, folder, monkeypatch):
    monkeypatch.setattr(LaterGroup, "ended", True)
    saver = run_that_fails(
        tiny_trainer(trainer__save_freq=1, trainer__test_freq=-1), folder, WorkerLost("a worker died")
    )
    assert (saver.last_step, folder.steps()) == (0, [])


class Rang(Exception):
    pass


@pytest.fixture
def slow_fsync(monkeypatch):
    """Every fsync of the driver waits until this event is set."""
    gate, real = threading.Event(), manifest.sync
    monkeypatch.setattr(manifest, "sync", lambda path: real(path) if gate.wait(10) else 0)
    monkeypatch.setattr(saving_of_driver, "_LOOK_S", 0.01)
    yield gate
    gate.set()


def polled_until_closing(trainer, folder) -> Saver:
    """The saver of a checkpoint that waits for fsync."""
    saver = Saver(trainer.cfg, folder, trainer.actor, trainer.critic, "rows:1", 1, 1)
    trainer.step(1)
    saver.save(1, trainer.progress)
    while not saver._pending.closing:
        time.sleep(0.02)
        saver.on_wait()
    return saver


def test_no_step_waits_for_the_disk_and_a_signal_costs_no_save(tiny_trainer, folder, slow_fsync):
    trainer = tiny_trainer()
    started = time.monotonic()
    saver = polled_until_closing(trainer, folder)
    trainer.step(2)
    for _ in range(3):
        time.sleep(0.02)
        saver.on_wait()
    assert (saver.last_step, saver.newest, folder.steps()) == (0, 1, [])

    def ring(*_):
        raise Rang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Rang):
            saver.finish()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < 9, "nothing has waited for fsync"
    slow_fsync.set()
    saver.finish()
    assert (saver.last_step, folder.steps(), find_damage(folder.step_folder(1))) == (1, [1], None)


def test_a_checkpoint_of_which_all_is_written_needs_no_worker(tiny_trainer, folder, slow_fsync, monkeypatch):
    saver = polled_until_closing(tiny_trainer(), folder)
    monkeypatch.setattr(LocalGroup, "ended", True)
    slow_fsync.set()
    saver.on_failure()
    assert (saver.last_step, find_damage(folder.step_folder(1))) == (1, None)


def test_async_save_off_waits_without_a_word(tiny_trainer, folder, caplog):
    trainer = tiny_trainer(trainer__async_save=False)
    saver = saver_of(trainer, folder)
    trainer.step(1)
    saver.save(1, trainer.progress)
    assert saver.last_step == 1
    assert "trainer.async_save" not in caplog.text


@pytest.mark.parametrize("piece_bytes", [7, 32 << 20])
def test_weights_are_written_as_safetensors_writes_them(piece_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr("rltrain.models.files.hashed._PIECE", piece_bytes)
    weights = {
        "b": torch.randn(3, 5), "a": torch.randn(4, 2).T, "half": torch.randn(7).bfloat16(), "none": torch.zeros(0, 3),
        "n": torch.tensor(5), "flag": torch.tensor([True, False]), "eight": torch.randn(9).to(torch.float8_e4m3fn),
    }  # fmt: skip
    digests = {}
    write_weights(weights, tmp_path / "ours.safetensors", digests)
    found = load_file(tmp_path / "ours.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert (found[name].dtype, found[name].shape) == (weight.dtype, weight.shape)
        assert torch.equal(found[name].view(-1).view(torch.uint8), weight.contiguous().view(-1).view(torch.uint8))
    content = (tmp_path / "ours.safetensors").read_bytes()
    assert digests == {str(tmp_path / "ours.safetensors"): xxhash.xxh3_128(content).hexdigest()}


@pytest.mark.fault("A file that outgrows its limit is told as such, although torch says something else")
def test_the_limit_of_a_file_is_named(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with (
            pytest.raises(DiskError, match=r"big could not be written: File too large"),
            hashed(tmp_path / "big", {}) as file,
        ):
            torch.save(torch.zeros(2**20), file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.fault("A disk that fills up while a checkpoint is written: exit 74, free space told, the older one whole")
def test_a_disk_that_fills_up_during_a_save_is_told(tiny_trainer, small_disk, request):
    trainer = tiny_trainer()
    folder = RunFolder(str(small_disk / "run"))
    request.addfinalizer(folder.release)
    saver = saver_of(trainer, folder)
    trainer.step(1)
    saver.save(1, trainer.progress)
    saver.finish()
    trainer.step(2)
    saver.save(2, trainer.progress)
    (small_disk / "of_others").write_bytes(bytes(shutil.disk_usage(small_disk).free - 100_000))
    with pytest.raises(
        DiskError, match=r"step 2 could not be written: .*No space left.* has [\d.]+ KiB free.* takes about"
    ):
        saver.finish()
    assert not list(folder.path.glob(".tmp_*"))
    assert folder.newest() == folder.step_folder(1)


@pytest.mark.fault("Metrics that cannot be written are told once and kept until they can")
def test_lines_that_cannot_be_written_wait(small_disk, caplog):
    file, other = small_disk / "metrics.jsonl", small_disk / "of_others"
    lines = JsonLines(file)
    lines.log(1, {"a": 0.5})
    other.write_bytes(bytes(shutil.disk_usage(small_disk).free))
    # The page of the first line has room for some more of them.
    for step in range(2, 1000):
        lines.log(step, {"a": 0.5, "b": 1.0})
    assert caplog.text.count("cannot be written (No space left on device): training goes on") == 1
    other.unlink()
    lines.log(1000, {})
    lines.close()
    assert [line["step"] for line in read_metrics(file)] == list(range(1, 1001))


def stale(*_, **__):
    """As network storage whose server has forgotten the folder."""
    raise OSError(116, "Stale file handle")


def test_a_disk_that_says_nothing_of_its_room_is_no_traceback(tiny_trainer, folder, monkeypatch):
    trainer = tiny_trainer()
    saver = saver_of(trainer, folder)
    monkeypatch.setattr(shutil, "disk_usage", stale)
    saver.check_room(0, 1)
    saver.save(1, trainer.progress)
    saver.finish()
    monkeypatch.setattr(Path, "mkdir", stale)
    saver.save(2, trainer.progress)
    with pytest.raises(StorageError, match=r"step 2 could not be written: .*Stale file handle. The storage does not"):
        saver.finish()
    assert (saver.last_step, find_damage(folder.step_folder(1))) == (1, None)


def test_a_checkpoint_that_is_whole_stays_one_whatever_storage_does(tiny_trainer, folder, monkeypatch):
    trainer = tiny_trainer(trainer__max_actor_ckpt_to_keep=1)
    saver = saver_of(trainer, folder)
    monkeypatch.setattr(storage, "TRIED_S", 0.0)
    monkeypatch.setattr(storage, "PAUSE_S", 0.01)
    saver.save(1, trainer.progress)
    for name in ("stat", "read_bytes"):
        real = getattr(Path, name)
        monkeypatch.setattr(
            Path,
            name,
            lambda path, real=real, **k: stale() if folder.step_folder(1) in path.parents else real(path, **k),
        )
    saver.finish()
    assert saver.last_step == 1


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (300 * 2**20, "300 MiB"), (2**41, "2.0 TiB")],
)
def test_sizes_are_said_in_units_that_one_reads(size, words):
    assert sized(size) == words
