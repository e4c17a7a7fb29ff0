"""`python -m rltrain.main_ppo`, forked from a process that has imported the packages: a third of a small run's work.

A forked run has words, variables, output and session of its own, ends as the command does, and is a `subprocess.Popen`
to its test. What it does not have is a beginning: the seconds in which Python loads the packages. Its threads are all
its own, as the process that it is forked from has one alone.
"""

import atexit
import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

from rltrain import main_ppo
from tests.ranks import MARK, preload

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.getenv.restype = ctypes.c_void_p
_NEW_MOUNTS = 0x20000


class Forked:
    """What of `subprocess.Popen` the tests use. shm: the folder that is its /dev/shm."""

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
    _mark(variables[MARK])
    os.environ.clear()
    os.environ.update(variables)
    if shm:
        assert not _LIBC.unshare(_NEW_MOUNTS), os.strerror(ctypes.get_errno())
        for mount in (["--make-rprivate", "/"], ["--bind", shm, "/dev/shm"]):
            subprocess.run(["mount", *mount], check=True)
    sys.argv = [main_ppo.__file__, *words]
    try:
        main_ppo.leave(main_ppo.main())
    finally:  # what Python does where it ends, and multiprocessing leaves out
        threading._shutdown()
        atexit._run_exitfuncs()
        main_ppo._end()


def _mark(folder: str) -> None:
    """In /proc/PID/environ: there are the variables that a process was started with, until it writes over them."""
    begin = _LIBC.getenv(MARK.encode())
    room = len(ctypes.string_at(begin))
    assert len(os.fsencode(folder)) < room
    ctypes.memmove(begin, os.fsencode(folder).ljust(room, b"\0"), room)
