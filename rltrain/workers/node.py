"""What a process finds out about its node before anything is loaded; `run.preflight.health` asks all nodes.

Problem: what is wrong with one node of many shows late and somewhere else: as a collective that hangs, as half a
checkpoint. Choice: every node answers the same small questions first. Nothing here knows of Ray, and nothing takes more
than seconds, unless storage hangs, which the driver's deadline then tells.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import xxhash

from rltrain.base.clock import SYSTEM, Clock
from rltrain.base.device import get_device
from rltrain.base.errors import RltrainError
from rltrain.base.storage import patiently
from rltrain.base.versions import fingerprint
from rltrain.models.files.source import model_problem

# A file that was made on one node may come to the others' caches late, as with NFS.
SEEN_S, _POLL_S = 10.0, 0.1
_CONNECT_S, _THREADS = 5.0, 32
_READ_BYTES = 2**20
_GIB = 2**30


@dataclass(frozen=True)
class Question:
    """What a rank shall look at."""

    rank: int
    name: str
    """Of its node."""
    device: str
    """``trainer.device``."""
    is_first: bool
    """It speaks for its node."""
    proof: Path
    """The folder in which a file ``driver`` lies, with the folder's name as text."""
    models: Sequence[tuple[str, str]]
    """(key, path)."""
    folders: Sequence[tuple[str, str]]
    """(key, path) of what else must be there."""
    ray: str
    """A folder of Ray's."""


@dataclass(frozen=True)
class Facts:
    """Answers; of a rank that is not the first of its node, only those on its device."""

    rank: int
    name: str
    device: str = ""
    device_error: str = ""
    """Why the device cannot be used."""
    memory: tuple[int, int] = (0, 0)
    """Its free and total bytes."""
    unshared: str = ""
    """Why the proof is not there, or nothing can be left beside it."""
    lacking: list[str] = field(default_factory=list)
    port: int = 0
    """Where the node listens."""
    room: dict[str, float] = field(default_factory=dict)
    """What is left, by a name of `run.preflight.health`."""
    versions: dict[str, str] = field(default_factory=dict)


open_doors: list[socket.socket] = []


def look(question: Question) -> Facts:
    """The facts about this process's device and, of the first rank of a node, about the node."""
    device = Facts(question.rank, question.name, *_device(question.device))
    if not question.is_first:
        return device
    # Kept open until `part`: who connects need not be accepted.
    open_doors.append(socket.create_server(("", 0), backlog=1024))
    lacking = [problem for key, path in question.models if (problem := model_problem(key, path))]
    lacking += [f"{key}={path} is not there." for key, path in question.folders if not Path(path).exists()]
    return replace(
        device,
        unshared=_unshared(question),
        lacking=lacking,
        port=open_doors[-1].getsockname()[1],
        room=_room(question.ray),
        versions=fingerprint(),
    )


def reach(doors: Sequence[tuple[str, int]]) -> list[float | str]:
    """Seconds that a connection to each (address, port) takes, or why there is none."""
    # Behind a firewall every one of them takes the whole wait.
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(_knock, doors))


def part(_: None = None) -> float:
    """Close what `look` has opened. Returns what the clock says, in seconds since 1970."""
    while open_doors:
        open_doors.pop().close()
    return time.time()


def unseen(files: Sequence[Path], clock: Clock = SYSTEM) -> list[str]:
    """Wait for files with their folder's name as text. Returns why each is not there, or nothing."""
    # One for all: of a hundred nodes whose files do not come, each would take the whole wait.
    clock.poll(lambda: not any(map(_missing, files)), SEEN_S, _POLL_S)
    return [_missing(file) for file in files]


def altered(files: Sequence[tuple[Path, str]]) -> list[str]:
    """Read files whole. Returns what is said of those whose contents have another digest than the one given.

    Raises StorageError where one cannot be read, which says nothing of its contents.
    """
    problems = []
    for file, expected in files:
        try:
            digest = patiently(file, partial(digest_of, file))
        except OSError as error:
            problems.append(f"{file.name} cannot be read ({error})")
        else:
            if digest != expected:
                problems.append(f"the contents of {file.parent.name}/{file.name} have changed since it was saved")
    return problems


def digest_of(file: Path) -> str:
    """XXH3 (128 bits) of the contents, in hexadecimal. Raises OSError."""
    digest, buffer = xxhash.xxh3_128(), bytearray(_READ_BYTES)
    with file.open("rb", buffering=0) as stream:
        while size := stream.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
    return digest.hexdigest()


def leave(file: Path, text: str) -> None:
    """Write a file as checkpoints are written: under another name, to the disk, renamed. Raises OSError."""
    with open(file.with_suffix(".new"), "w", encoding="utf-8") as new:
        new.write(text)
        new.flush()
        os.fsync(new.fileno())
    os.rename(file.with_suffix(".new"), file)


def _missing(file: Path) -> str:
    try:
        return "" if file.read_text("utf-8") == file.parent.name else "sees another file of that name"
    except FileNotFoundError:
        return "does not see it"
    except OSError as error:
        return f"cannot read it ({error.strerror})"


def _unshared(question: Question) -> str:
    (problem,) = unseen([question.proof / "driver"])
    if problem:
        return problem
    try:
        leave(question.proof / f"rank_{question.rank}", question.proof.name)
    except OSError as error:
        return f"sees it and cannot write beside it ({error.strerror})"
    return ""


def _knock(door: tuple[str, int]) -> float | str:
    started = time.perf_counter()
    try:
        socket.create_connection(door, timeout=_CONNECT_S).close()
    except OSError as error:
        return str(error.strerror or error)
    return time.perf_counter() - started


def _device(name: str) -> tuple[str, str, tuple[int, int]]:
    try:
        device = get_device(name)
        if not device.count:
            return "", f"torch sees no {device.kind.upper()} device", (0, 0)
        device.activate()
        return device.name, "", (device.free_memory_bytes(), device.total_memory_bytes())
    except (RltrainError, RuntimeError, OSError, ImportError) as error:
        return "", (str(error).strip().splitlines() or [type(error).__name__])[0], (0, 0)


def _room(ray: str) -> dict[str, float]:
    disk = shutil.disk_usage(next(folder for folder in (Path(ray), *Path(ray).parents) if folder.exists()))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return {
        # Ray moves no objects to a disk that is 95 % full.
        "local disk": max(0.0, disk.free - 0.05 * disk.total) / _GIB,
        "/dev/shm": shutil.disk_usage("/dev/shm").total / _GIB if Path("/dev/shm").is_dir() else 0.0,
        "open files": float("inf") if files == resource.RLIM_INFINITY else files,
    }
