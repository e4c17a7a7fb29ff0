"""What a run that was killed leaves in shared memory."""

import subprocess
import sys
import time
from pathlib import Path

from rltrain.controller.sweep import sweep

# As a worker of Ray's: what it prints goes into the session's folder.
WORKER = """
import multiprocessing, time
held = multiprocessing.get_context("spawn").Semaphore()
print(held._semlock.name, flush=True)
time.sleep(600)
"""


def within(seconds, holds):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_semaphores_of_what_is_swept_away_go_too(tmp_path):
    printed = tmp_path / "session_of_the_test" / "worker.out"
    printed.parent.mkdir()
    with printed.open("wb") as out:
        worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=out, stderr=out)
    within(30, lambda: printed.read_text().endswith("\n"))
    semaphore = Path("/dev/shm") / f"sem.{printed.read_text().strip().lstrip('/')}"
    assert semaphore.exists()
    sweep(str(printed.parent))
    assert worker.wait(5) == -9
    within(5, lambda: not semaphore.exists())
