"""Disturb a process in the middle of a function, like a debugger: RLTRAIN_TRAP=FOLDER names the folder of the file
`trap`.
"""

import ctypes
import os
import resource
import sys
import threading
import time
from pathlib import Path

# Bytes; `Trap.MALLOC` has the first too.
_LARGE, _SMALL = 3 << 19, 5 << 18


def _starve() -> None:
    """Make the kernel refuse new memory, and use up the large blocks of the heap. Some small ones are left, because for
    a tensor that does not fit Ray creates a message, which needs up to a MiB."""
    libc = ctypes.PyDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    # Behind each small block a tiny one stays, so that they do not become a large one.
    kept = [(libc.malloc(_SMALL), libc.malloc(1024)) for _ in range(16)]
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))  # less than it has
    while libc.malloc(_LARGE):
        pass
    for small, _ in kept:
        libc.free(small)


def _hurt(how: str) -> None:
    if how == "memory":
        _starve()
    else:
        os.kill(os.getpid(), int(how))


def _is_rank(wanted: str) -> bool:
    try:
        found = sys.modules["torch.distributed"]
        return found.is_initialized() and found.get_rank() == int(wanted)
    except (KeyError, AttributeError):  # it is not there yet, or not whole
        return False


def _watch(folder: Path) -> None:
    while not (folder / "caught").exists():
        try:
            file, function, how, *rank = (folder / "trap").read_text().split()
        except (OSError, ValueError):
            time.sleep(0.05)
            continue
        if not all(map(_is_rank, rank)):
            time.sleep(0.05)
            continue
        for frame in sys._current_frames().values():
            while frame is not None:
                if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file):
                    try:
                        with open(folder / "caught", "x") as caught:
                            caught.write(str(os.getpid()))
                    except FileExistsError:
                        return
                    _hurt(how)
                    return
                frame = frame.f_back
        time.sleep(0.001)


def lay() -> None:
    """Watch this process, if it belongs to a run with a trap."""
    if "RLTRAIN_TRAP" in os.environ:
        threading.Thread(target=_watch, args=[Path(os.environ["RLTRAIN_TRAP"])], daemon=True).start()
