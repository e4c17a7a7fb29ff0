"""Shared memory that a killed run leaves behind."""

import subprocess
import sys
from pathlib import Path

from rltrain.runtime.cleanup import kill_session_processes
from tests.clock import eventually

# As a worker of Ray's: what it prints goes into the session's folder.
WORKER = """
import multiprocessing, signal
held = multiprocessing.get_context("spawn").Semaphore()
print(held._semlock.name, flush=True)
signal.pause()
"""


def test_semaphores_of_what_is_swept_away_go_too(tmp_path):
    printed = tmp_path / "session_of_the_test" / "worker.out"
    printed.parent.mkdir()
    with printed.open("wb") as out:
        worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=out, stderr=out)
    eventually(lambda: printed.read_text().endswith("\n"))
    semaphore = Path("/dev/shm") / f"sem.{printed.read_text().strip().lstrip('/')}"
    assert semaphore.exists()
    kill_session_processes(str(printed.parent))
    assert worker.wait() == -9
    eventually(lambda: not semaphore.exists())
