"""`python -m rltrain.main_ppo`, forked from a process that has imported the packages, because the imports are two
thirds of a small run's work.
"""

import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

from rltrain import main_ppo
from tests.faults.nursery import LIBC, MOUNTS, be_a_program, take
from tests.ranks import preload


class Forked:
    """The part of `subprocess.Popen` that the tests use. shm: the folder that replaces its /dev/shm."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], shm: str) -> None:
        preload()
        self.args = [*words]
        making = multiprocessing.get_context("forkserver")
        read, write = making.Pipe(duplex=False)
        with read, write:
            self.stdout = os.fdopen(os.dup(read.fileno()))
            self._process = making.Process(target=_run, args=[self.args, dict(variables), shm, write])
            self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        said = []
        reader = threading.Thread(target=lambda: said.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if not said:
            raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(timeout)
        return said[0], None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _run(words: list[str], variables: dict[str, str], shm: str, output: Connection) -> None:
    os.setsid()
    with output:
        for stream, opened in enumerate((os.open(os.devnull, os.O_RDONLY), output.fileno(), output.fileno())):
            os.dup2(opened, stream)
    take(variables)
    if shm:
        assert not LIBC.unshare(MOUNTS), os.strerror(ctypes.get_errno())
        for mount in (["--make-rprivate", "/"], ["--bind", shm, "/dev/shm"]):
            subprocess.run(["mount", *mount], check=True)
    sys.argv = [main_ppo.__file__, *words]
    be_a_program(lambda: main_ppo.leave(main_ppo.main()))
