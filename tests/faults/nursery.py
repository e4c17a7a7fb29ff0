"""Ray workers forked from a process that has imported the packages, because the imports are most of a small
run's work.
"""

import atexit
import ctypes
import functools
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import process as processes
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NoReturn

from tests.faults.trapping import lay
from tests.ranks import MARK, STAND_IN, preload

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.getenv.restype = ctypes.c_void_p
MOUNTS = 0x20000  # of setns and unshare
_VARIABLE = "RLTRAIN_NURSERY"
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_ARENA_MAX": -8}  # of mallopt


@functools.cache
def variables() -> dict[str, str]:
    """Return the variables of a run with forked workers; the nursery ends with this process."""
    preload()
    name = f"rltrain-nursery-{os.getpid()}"
    making = multiprocessing.get_context("forkserver")
    listens = making.Event()
    making.Process(target=_tend, args=[name, listens], daemon=True).start()
    assert listens.wait(60)
    return begin() | {_VARIABLE: name}


def begin() -> dict[str, str]:
    """Return the variables of a run whose processes import `begin/sitecustomize.py`."""
    here = Path(__file__).parent
    return {"PYTHONPATH": f"{here / 'begin'}:{here.parents[1]}"}


def _tend(name: str, listens: "multiprocessing.synchronize.Event") -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind("\0" + name)
    server.listen()
    listens.set()
    parent = multiprocessing.parent_process().sentinel
    children: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that reports its end
    while True:
        lines = {line: pid for pid, line in children.values()}
        ready, _, _ = select.select([server, parent, *children, *lines], [], [])
        for each in ready:
            if each == parent:
                for pid in lines.values():
                    os.kill(pid, signal.SIGKILL)
                return
            if each is server:
                line, _ = server.accept()
                if pid := _fork(line, [server, *lines], children):
                    children[os.pidfd_open(pid)] = pid, line
            elif each in children:
                pid, line = children.pop(each)
                os.close(each)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with line, suppress(OSError):  # the stand-in was killed too
                    line.sendall(str(code).encode())
            elif each in {line for _, line in children.values()}:  # the stand-in was killed
                os.kill(lines[each], signal.SIGKILL)


def _fork(line: socket.socket, lines: Sequence[socket.socket], ends: Sequence[int]) -> int | None:
    """Return the pid of the worker requested by the stand-in at the other end of ``line``, or None if the stand-in was
    killed meanwhile. The worker closes the other lines and ends."""
    streams = socket.recv_fds(line, 1, 3)[1]
    asked = line.makefile().readline()
    pid = os.fork() if asked else None
    if pid == 0:
        for each in [line, *lines]:
            each.close()
        for each in ends:
            os.close(each)
        _work(streams, *json.loads(asked))
    for each in streams:
        os.close(each)
    return pid


def _work(
    streams: Sequence[int], stand_in: int, folder: str, words: list[str], environment: dict[str, str]
) -> NoReturn:
    os.setsid()
    for at, each in enumerate(streams):
        os.dup2(each, at)
        os.close(each)
    mounts = f"/proc/{stand_in}/ns/mnt"
    if os.readlink(mounts) != os.readlink("/proc/self/ns/mnt"):
        with open(mounts) as opened:
            assert not LIBC.setns(opened.fileno(), MOUNTS), os.strerror(ctypes.get_errno())
    os.chdir(folder)
    mark(STAND_IN, str(stand_in))
    take(environment)
    del os.environ[_VARIABLE]
    for option, number in _MALLOC.items():  # glibc reads them where a program begins
        if option in environment:
            LIBC.mallopt(number, int(environment[option]))
    sys.argv = words
    lay()
    be_a_program(lambda: runpy.run_path(words[0], run_name="__main__"))


def take(variables: Mapping[str, str]) -> None:
    """Set these variables. `MARK` is also written to /proc/PID/environ."""
    mark(MARK, variables.get(MARK, ""))
    os.environ.clear()
    os.environ.update(variables)


def mark(name: str, value: str) -> None:
    """Write to /proc/PID/environ, which holds the variables with which a process was started until it
    overwrites them."""
    begin = LIBC.getenv(name.encode())
    room = len(ctypes.string_at(begin))
    assert len(os.fsencode(value)) < room
    ctypes.memmove(begin, os.fsencode(value).ljust(room, b"\0"), room)


def be_a_program(main: Callable[[], object]) -> NoReturn:
    """Call ``main`` as a process that multiprocessing, which engines use, does not regard as a child; end as Python
    does."""
    from tests import preloaded

    processes._current_process, processes._parent_process = preloaded.MAIN, None
    multiprocessing.set_start_method(None, force=True)
    tracker = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # that of the tests
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - whatever it is
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader has ended
            stream.flush()
    os._exit(code)
