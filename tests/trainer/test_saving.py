"""Saving during training: later changes do not reach the checkpoint, and digests match the intended contents."""

import json
import resource
import shutil
import signal
import threading

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from rltrain.common.errors import AgentError, DiskError, JudgeError, NonFiniteError, RewardError, WorkerLost
from rltrain.models.files.hashed import hashed, write_weights
from rltrain.run.checkpoints import manifest
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.manifest import find_damage
from rltrain.run.checkpoints.saver import Saver
from rltrain.workers.state import saving
from tests.clock import PATIENCE_S, eventually
from tests.local import LocalGroup, LocalHandle
from tests.trainer.saves import fit
from tests.trainer.steps import actor_weights, weights

pytestmark = pytest.mark.usefixtures("process_group")
GAE = {"algorithm__adv_estimator": "gae"}


class Later(LocalHandle):
    """A call that runs concurrently with the steps: it begins when it is awaited."""

    def __init__(self, group, calls) -> None:
        self.group, self.call, self.begun = group, calls[0], False

    def ready(self):
        return self.begun

    @property
    def found(self):
        if not self.begun:
            self.begun, self._found = True, self.group.run(self.call)
        return self._found


def saver_of(trainer, folder: RunFolder) -> Saver:
    """Return a saver of a trainer whose saves are written when they are awaited."""
    group, submit = trainer.group, LocalGroup.submit
    group.submit = lambda calls, ranks=None, concurrent=False: (
        Later(group, calls) if concurrent else submit(group, calls)
    )
    return Saver(trainer.cfg, folder, trainer.actor, trainer.critic, "rows:1", 16)


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
    for name, entry in json.loads((last / "manifest.json").read_text())["files"].items():
        assert entry["xxh3_128"] == xxhash.xxh3_128((last / name).read_bytes()).hexdigest(), name
    assert torch.equal(load_file(last / "huggingface" / "model.safetensors")["model.embed_tokens.weight"], embeddings)
    again = tiny_trainer(**GAE)
    for role in ("actor", "critic"):
        getattr(again, role).load(str(last / role), False)
    assert torch.equal(actor_weights(again), then)
    assert torch.equal(weights(again.worker.critic.model), critic)


@pytest.mark.parametrize("shares", [(0.0, 0.0), (0.7, 0.0, 0.7)])
def test_training_waits_where_there_is_no_room_for_a_copy(tiny_trainer, folder, monkeypatch, caplog, shares):
    """Memory is checked at each save, and the lack of it is reported once."""
    trainer = tiny_trainer()
    saver, waited = saver_of(trainer, folder), []
    for step, share in enumerate(shares, 1):
        monkeypatch.setattr(saving, "_SHARE", share)
        trainer.step(step)
        saver.save(step, trainer.progress)
        waited.append(saver.last_step == step)
    assert waited == [share == 0 for share in shares]
    saver.finish()
    assert caplog.text.count("are written while training waits (trainer.async_save)") == 1
    assert [find_damage(folder.step_folder(step)) for step in folder.steps()] == [None] * len(shares)


def test_async_save_off_waits_without_a_word(tiny_trainer, folder, caplog):
    trainer = tiny_trainer(trainer__async_save=False)
    saver = saver_of(trainer, folder)
    trainer.step(1)
    saver.save(1, trainer.progress)
    assert saver.last_step == 1
    assert "trainer.async_save" not in caplog.text


def run_that_fails(trainer, folder: RunFolder, error: Exception, where: str = "step") -> Saver:
    """Return the saver of a run that fails in its second step, or in a validation after it."""
    saver, real = saver_of(trainer, folder), trainer.step

    def fails(*_):
        raise error

    trainer.step = lambda number: fails() if (number, where) == (2, "step") else real(number)
    trainer.validation.run = fails
    with pytest.raises(type(error), match=str(error)):
        fit(trainer, folder, saver, saver)
    return saver


SAVES = {"trainer__save_freq": 1, "trainer__test_freq": -1, "trainer__total_training_steps": 3}


@pytest.mark.fault("An error in the step after a save costs no checkpoint: the pending save is finished first")
@pytest.mark.parametrize("error", [NonFiniteError("not finite"), ValueError("a callback")])
def test_an_error_costs_no_checkpoint_under_way(tiny_trainer, folder, error):
    saver = run_that_fails(tiny_trainer(**SAVES), folder, error)
    assert (saver.last_step, folder.steps(), find_damage(folder.step_folder(1))) == (1, [1], None)


def test_a_checkpoint_whose_writers_are_gone_is_not_waited_for(tiny_trainer, folder):
    trainer = tiny_trainer(**SAVES)
    trainer.group.ended = True
    saver = run_that_fails(trainer, folder, WorkerLost("a worker died"))
    assert (saver.last_step, folder.steps()) == (0, [])


@pytest.mark.parametrize("failure", [RewardError, JudgeError, AgentError])
@pytest.mark.parametrize(("where", "step"), [("step", 1), ("validation", 2)])
def test_the_steps_so_far_are_saved_where_answers_or_rewards_fail(tiny_trainer, folder, failure, where, step):
    """This holds in a step, and in the validation after one: neither has changed weights before it fails."""
    trainer = tiny_trainer(**SAVES | {"trainer__save_freq": -1, "trainer__test_freq": 2})
    saver = run_that_fails(trainer, folder, failure("nobody answers"), where)
    assert (saver.last_step, folder.steps(), find_damage(folder.step_folder(step))) == (step, [step], None)


def test_a_save_that_fails_after_rewards_that_fail_hides_nothing(tiny_trainer, folder, free, caplog):
    trainer = tiny_trainer(**SAVES | {"trainer__save_freq": -1})
    assert run_that_fails(trainer, folder, RewardError("nobody answers")).last_step == 0
    assert "step 1 could not be saved: there is no disk space" in caplog.text


@pytest.fixture
def closing(tiny_trainer, folder, monkeypatch, clock):
    """Return (trainer, saver, gate): the first checkpoint is written, and every fsync of the driver waits for
    the gate."""
    gate, reached, real = threading.Event(), threading.Event(), manifest.sync
    monkeypatch.setattr(manifest, "sync", lambda path: (reached.set(), gate.wait(PATIENCE_S), real(path))[-1])
    trainer = tiny_trainer()
    saver = Saver(trainer.cfg, folder, trainer.actor, trainer.critic, "rows:1", 16, clock=clock)
    trainer.step(1)
    saver.save(1, trainer.progress)

    def looked() -> bool:
        clock.advance(1.0)
        saver.on_wait()
        return reached.is_set()

    eventually(looked, "fsync")
    yield trainer, saver, gate
    gate.set()


def test_no_step_waits_for_the_disk_and_a_signal_costs_no_save(closing, folder, clock):
    trainer, saver, gate = closing
    trainer.step(2)
    clock.advance(1.0)
    saver.on_wait()
    assert (saver.last_step, saver.newest, folder.steps()) == (0, 1, [])

    def ring(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            saver.finish()
    finally:
        signal.signal(signal.SIGALRM, before)
    gate.set()
    saver.finish()
    assert (saver.last_step, folder.steps(), find_damage(folder.step_folder(1))) == (1, [1], None)


def test_a_checkpoint_of_which_all_is_written_needs_no_worker(closing, folder):
    trainer, saver, gate = closing
    trainer.group.ended = True
    gate.set()
    saver.on_failure()
    assert (saver.last_step, find_damage(folder.step_folder(1))) == (1, None)


def test_weights_are_written_as_safetensors_writes_them(tmp_path):
    weights = {
        "b": torch.randn(3, 5), "a": torch.randn(4, 2).T, "half": torch.randn(7).bfloat16(), "none": torch.zeros(0, 3),
        "n": torch.tensor(5), "flag": torch.tensor([True, False]), "eight": torch.randn(9).to(torch.float8_e4m3fn),
    }  # fmt: skip
    digests, file = {}, tmp_path / "ours.safetensors"
    write_weights(weights, file, digests)
    found = load_file(file)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert (found[name].dtype, found[name].shape) == (weight.dtype, weight.shape)
        assert torch.equal(found[name].view(-1).view(torch.uint8), weight.contiguous().view(-1).view(torch.uint8))
    assert digests == {str(file): xxhash.xxh3_128(file.read_bytes()).hexdigest()}


@pytest.mark.fault("A file that outgrows its limit is reported as such, although torch says something else")
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
