"""Failures of the host: no memory, files that cannot be read or written. They are not reported as damage."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain.common import storage
from rltrain.common.clock import Backoff
from rltrain.common.errors import StorageError, command
from rltrain.config.load import load_config
from rltrain.main_ppo import main
from rltrain.run.changes import write_config
from rltrain.run.checkpoints.best import Best
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.previous_attempt import archive_outputs
from rltrain.tools.report import main as report
from tests.data.conftest import make_row
from tests.tiny import small_config

NO_ANSWER = "/proc/self/mem"  # EIO, as from storage that is lost


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(storage, "TRIED_S", 0.0)
    monkeypatch.setattr(storage, "BACKOFF", Backoff(0.01, 0.01))


def into_a_full_disk():
    with open("/dev/full", "w") as file:
        file.write("x")


def below_a_file(folder):
    (folder / "file").touch()
    (folder / "file" / "run").mkdir()


FAILURES = {
    "storage": (lambda folder: Path(NO_ANSWER).read_bytes(), 75, "Input/output error"),
    "full disk": (
        lambda folder: into_a_full_disk(),
        74,
        "No space left on device. Fix this, and run the same command again",
    ),
    "no folder": (below_a_file, 74, "Not a directory: '"),
    "no memory": (lambda folder: np.empty(1 << 50), 75, "the host is out of memory: Unable to allocate"),
}


@pytest.mark.fault("What nothing else has dealt with: storage and memory of the driver end a command with one sentence")
@pytest.mark.parametrize("name", FAILURES)
def test_what_the_host_refuses_is_told_without_a_traceback(tmp_path, capsys, name):
    fails, code, said = FAILURES[name]
    assert command(lambda argv: fails(tmp_path))([]) == code
    assert main([], lambda arguments, stop: fails(tmp_path)) == code
    assert [said in line for line in capsys.readouterr().err.splitlines()] == [True, True]


@pytest.mark.fault("A file of the run folder that cannot be read at a start: its name, exit 75")
def test_files_of_a_run_that_cannot_be_read(tmp_path, at_once, capsys):
    config = small_config()
    config.trainer.keep_best = "val-core/x"
    (tmp_path / "metrics.jsonl").symlink_to(NO_ANSWER)
    with pytest.raises(StorageError, match=r"metrics.jsonl cannot be read: Input/output error"):
        Best(config.trainer, tmp_path / "metrics.jsonl", 1)
    assert report([str(tmp_path)]) == 75
    assert "error: " in capsys.readouterr().err
    (tmp_path / "config.yaml").symlink_to(NO_ANSWER)
    folder = RunFolder(str(tmp_path))
    with pytest.raises(StorageError, match=r"config.yaml cannot be read: Input/output error"):
        write_config(folder, load_config([]))
    folder.release()
    with pytest.raises(StorageError, match=r"metrics.jsonl cannot be read: Input/output error"):
        archive_outputs(config.trainer, tmp_path, 1)


# In a separate process, which gets only a little more memory than it has.
SCRIPT = """
import resource, sys
from pathlib import Path
import pandas
from rltrain.data.rows import read_rows
from rltrain.data.trial import problem_in_fork
from rltrain.main_ppo import main
from rltrain.models.files.safe import read_metadata
from rltrain.run.report.samples import read_samples

folder = Path(sys.argv[1])
works = [
    lambda: read_rows(folder / "big.parquet"),
    lambda: read_metadata(folder),
    lambda: read_samples(folder),
    lambda: problem_in_fork(lambda: len(bytes(1 << 27)), 1 << 30),
]
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (48 << 20),) * 2)
for work in works:
    print("code", main([], lambda arguments, stop: work()), file=sys.stderr)
"""


@pytest.mark.fault("A driver without memory says so, exit 75, and calls no data, template or checkpoint damaged")
def test_a_driver_without_memory_calls_nothing_damaged(tmp_path):
    (tmp_path / "samples").mkdir()
    rows = [make_row(extra_info={"long": os.urandom(1 << 20).hex()}) for _ in range(64)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "big.parquet")
    (tmp_path / "samples" / "train_000001.parquet").symlink_to(tmp_path / "big.parquet")
    (tmp_path / ".metadata").write_bytes(bytes(64 << 20))
    process = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True, timeout=120)
    said = re.findall(r"(?m)^error: the host is out of memory: .*\ncode 75$", process.stderr)
    assert len(said) == 4, process.stderr
    assert "Traceback" not in process.stderr
