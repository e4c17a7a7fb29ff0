"""Writes that fail: storage that does not answer is waited for (exit 75), a disk that takes nothing is not (74)."""

import errno
import os
import pickle

import pytest

from rltrain.base.attempt import ATTEMPT, told_supervisor
from rltrain.base.errors import DiskError, NodesMissing, StorageError, WorkerLost, command, unwritten
from rltrain.config.schema.trainer import TrainerConfig
from rltrain.main_ppo import main
from rltrain.models.files.hashed import hashed
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.earlier import set_aside
from rltrain.workers.saving import told_as_disk_error
from tests.trainer.test_checkpoint import saver_of

AWAY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN)
REFUSED = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOENT,
)  # fmt: skip


@pytest.mark.parametrize(
    ("number", "kind"), [*((each, StorageError) for each in AWAY), *((each, DiskError) for each in REFUSED)]
)
def test_the_kind_of_a_failed_write_gets_to_the_driver(tmp_path, number, kind):
    folder = RunFolder(str(tmp_path / "run"))
    saver, _ = saver_of(folder)
    temporary = folder.begin_save(1)
    with pytest.raises(kind) as of_worker, told_as_disk_error("shards"):
        raise OSError(number, os.strerror(number))
    told = pickle.loads(pickle.dumps(of_worker.value))
    said = f"step 1 could not be written: shards could not be written: {os.strerror(number)}. "
    with pytest.raises(kind, match=said) as of_driver, saver._disk_errors(1, temporary):
        raise told
    assert of_driver.value.exit_code == (75 if kind is StorageError else 74)
    assert not temporary.exists()
    folder.release()


@pytest.mark.fault("Storage that does not answer a write ends the run with exit 75, and not as a full disk")
def test_storage_that_fails_a_write_is_no_full_disk(tmp_path):
    for name in ("shard", "metrics.tmp"):
        (tmp_path / name).symlink_to("/proc/self/mem")  # EIO
    said = r"shard could not be written: Input/output error$"
    with pytest.raises(StorageError, match=said), hashed(tmp_path / "shard", {}) as file:
        file.write(bytes(100))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(StorageError, match=r"Input/output error. The storage does not answer: see to it"):
        set_aside(TrainerConfig(), tmp_path, 1)


def test_the_supervisor_is_told_what_waiting_may_mend(tmp_path, monkeypatch):
    file = tmp_path / "told"
    monkeypatch.setenv(ATTEMPT, str(file))

    def ends(error):
        def main(argv):
            raise error

        file.write_text("")
        command(main)([])
        return told_supervisor(file)["passing"]

    assert ends(unwritten("x", OSError(errno.EIO, "")))
    assert ends(NodesMissing("waited 600 s (WAIT_S) for a node"))
    assert not ends(DiskError("full"))
    assert not ends(WorkerLost("rank 0 died"))

    def fails(arguments, stop):
        raise StorageError("manifest.json cannot be read")

    file.write_text("")
    assert main([], fails) == 75
    assert told_supervisor(file)["passing"]
