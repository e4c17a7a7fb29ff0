"""A power failure while a checkpoint is written: at every call that orders writes to the disk, and at any byte."""

import os
import resource
import shutil
import signal
import stat
import warnings
from pathlib import Path
from random import Random

import pytest

from rltrain.run.checkpoints.folder import Checkpoints, RunFolder
from rltrain.run.checkpoints.manifest import large_files
from rltrain.workers.diagnostics.node import checksum_mismatches
from tests.trainer.test_saving import saver_of

CALLS = ("fsync", "rename", "replace", "unlink", "rmdir")


def killed_at(call: int, log: int):
    """Kill this process before call number ``call`` of `CALLS`; ``log`` gets the calls that were completed."""
    count = 0

    def watched(name, real):
        def watch(*args, **kwargs):
            nonlocal count
            if (count := count + 1) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            found = real(*args, **kwargs)
            if name == "fsync":
                status = os.fstat(args[0])
                names = os.listdir(args[0]) if stat.S_ISDIR(status.st_mode) else []
                os.write(log, " ".join(["fsync", str(status.st_ino), str(status.st_size), *names, "\n"]).encode())
            else:
                os.write(log, f"{name} {args[0]} {args[1] if name in ('rename', 'replace') else ''}\n".encode())
            return found

        return watch

    for name in CALLS:
        setattr(os, name, watched(name, getattr(os, name)))


def in_a_process(work) -> list[list[str]]:
    """Return the lines that ``work(log)`` wrote into ``log``, in a process that may die from it."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has threads, of which the new one needs none
        pid = os.fork()
    if not pid:
        try:
            work(write)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read()
    os.waitpid(pid, 0)
    return [line.split() for line in said.splitlines()]


def lose_power(run: Path, said: list[list[str]], random: Random) -> None:
    """Change the files as a power failure may change data that was not synced."""
    calls = (each[1:] for each in said if each[0] == "fsync")
    synced = {int(inode): (int(size), names) for inode, size, *names in calls}
    for at, (name, source, *target) in enumerate(said):
        of_run = name == "rename" and Path(target[0]).parent == run
        later = {int(each[1]) for each in said[at:] if each[0] == "fsync"}
        if of_run and os.stat(run).st_ino not in later and random.random() < 0.5:
            os.rename(target[0], source)
    old = run / "global_step_1"
    for entry in sorted(path for folder in run.iterdir() if folder.is_dir() for path in folder.rglob("*")):
        if old in entry.parents or not entry.exists():
            continue
        _, names = synced.get(entry.parent.stat().st_ino, (0, []))
        if entry.name not in names and random.random() < 0.5:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        elif entry.is_file():
            size, _ = synced.get(entry.stat().st_ino, (random.randint(0, entry.stat().st_size), []))
            os.truncate(entry, size)


@pytest.mark.long
@pytest.mark.fault("A loss of power at any point of a save leaves a whole checkpoint, the old one or the new one")
@pytest.mark.usefixtures("process_group")
def test_power_may_fail_at_any_point_of_a_save(tiny_trainer, tmp_path):
    trainer, random = tiny_trainer(trainer__max_actor_ckpt_to_keep=1, algorithm__adv_estimator="gae"), Random(0)
    assert trainer.critic
    run, before = tmp_path / "run", tmp_path / "before"
    folder = RunFolder(str(run))
    saver = saver_of(trainer, folder)
    for step in (1, 2):
        trainer.step(step)
        saver.save(step, trainer.progress)  # the second is staged; `finish` writes it
        if step == 1:
            saver.finish()
    saver._pending.opening.result()  # a process that is forked has no other threads
    shutil.copytree(run, before)

    def crash(work) -> tuple[int, list[list[str]]]:
        """Return the step that remains after ``work`` was killed, and the completed calls."""
        for entry in run.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
        shutil.copytree(before, run, dirs_exist_ok=True)
        said = in_a_process(work)
        lose_power(run, said, random)
        found = Checkpoints(str(run))
        newest = found.newest()  # raises if none is complete
        assert found.steps()[-1] == int(newest.name.rpartition("_")[2]), "a checkpoint that is there is whole"
        assert not checksum_mismatches(large_files(newest))
        return found.steps()[-1], said

    def finish_until(call: int):
        return lambda log: (killed_at(call, log), saver.finish())

    last, calls = crash(finish_until(0))
    assert last == 2
    assert len(calls) > 20
    left = [crash(finish_until(call))[0] for call in range(1, len(calls) + 1)]
    assert set(left) == {1, 2}
    assert left[0] == 1
    assert left[-1] == 2
    largest = max(file.stat().st_size for file in (run / "global_step_2").rglob("*") if file.is_file())

    def cut_off(size: int):
        def work(log: int) -> None:
            killed_at(0, log)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills at this byte of a file
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            saver.finish()

        return work

    assert {crash(cut_off(random.randrange(largest)))[0] for _ in range(10)} == {1}

    folder.release()
