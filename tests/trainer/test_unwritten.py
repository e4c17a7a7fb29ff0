"""Failing writes: the run waits for storage that does not respond (exit 75), but not for a disk that refuses writes
(74)."""

import errno
import os
import pickle
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from rltrain.common.attempt import ATTEMPT, read_reports
from rltrain.common.errors import DiskError, NodesMissing, StorageError, WorkerLost, command, write_error
from rltrain.config.schema.trainer import TrainerConfig
from rltrain.main_ppo import main
from rltrain.models.files.hashed import hashed
from rltrain.run.previous_attempt import archive_outputs
from rltrain.trainer.progress import Progress
from rltrain.workers.state.saving import told_as_disk_error
from tests.trainer.saves import saver_of

AWAY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT)


@pytest.mark.parametrize(
    ("number", "kind"), [*((each, StorageError) for each in AWAY), *((each, DiskError) for each in REFUSED)]
)
def test_the_kind_of_a_failed_write_gets_to_the_driver(folder, number, kind):
    with pytest.raises(kind) as of_worker, told_as_disk_error("shards"):
        raise OSError(number, os.strerror(number))
    told = pickle.loads(pickle.dumps(of_worker.value))
    part = SimpleNamespace(copied=False, ready=lambda: True, finish=Mock(side_effect=told))
    saver, _ = saver_of(folder, actor=SimpleNamespace(begin_save=lambda task: part))
    said = f"step 1 could not be written: shards could not be written: {os.strerror(number)}. "
    with pytest.raises(kind, match=said) as of_driver:
        saver.save(1, Progress())
    assert of_driver.value.exit_code == (75 if kind is StorageError else 74)
    assert not list(folder.path.glob(".tmp_*"))


@pytest.mark.fault("Storage that does not answer a write ends the run with exit 75, and not as a full disk")
def test_storage_that_fails_a_write_is_no_full_disk(tmp_path):
    for name in ("shard", ".metrics.jsonl.tmp"):
        (tmp_path / name).symlink_to("/proc/self/mem")  # EIO
    said = r"shard could not be written: Input/output error$"
    with pytest.raises(StorageError, match=said), hashed(tmp_path / "shard", {}) as file:
        file.write(bytes(100))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(StorageError, match=r"Input/output error. The storage does not respond. Check it"):
        archive_outputs(TrainerConfig(), tmp_path, 1)


def test_the_supervisor_is_told_what_waiting_may_mend(tmp_path, monkeypatch):
    file = tmp_path / "told"
    monkeypatch.setenv(ATTEMPT, str(file))

    def ends(error):
        def main(argv):
            raise error

        file.write_text("")
        command(main)([])
        return read_reports(file)["passing"]

    assert ends(write_error("x", OSError(errno.EIO, "")))
    assert ends(NodesMissing("waited 600 s (WAIT_S) for a node"))
    assert not ends(DiskError("full"))
    assert not ends(WorkerLost("rank 0 died"))

    def fails(arguments, stop):
        raise StorageError("manifest.json cannot be read")

    file.write_text("")
    assert main([], fails) == 75
    assert read_reports(file)["passing"]
