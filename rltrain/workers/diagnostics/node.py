"""Checks of a node before anything is loaded; `run.preflight.health` runs them on all nodes.

Problem: a fault of one node shows late and elsewhere, for example as a hanging collective or an incomplete checkpoint.
Choice: every node runs the same quick checks first. They do not use Ray and take seconds, unless storage hangs, which
exceeds the driver's deadline.
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

from rltrain.common.clock import SYSTEM, Clock
from rltrain.common.device import get_device
from rltrain.common.errors import RltrainError
from rltrain.common.storage import patiently
from rltrain.common.versions import fingerprint
from rltrain.models.files.source import model_problem

# Seconds to wait for a file from another node, because caches (as with NFS) may show it late.
SEEN_S, _POLL_S = 10.0, 0.1
_CONNECT_S, _THREADS = 5.0, 32
_READ_BYTES = 2**20
_GIB = 2**30


@dataclass(frozen=True)
class NodeProbe:
    """Checks that a rank runs."""

    rank: int
    name: str
    """Node name."""
    device: str
    """``trainer.device``."""
    is_first: bool
    """True for the rank that reports for its node."""
    proof: Path
    """Folder with a file ``driver`` that contains the folder's name."""
    models: Sequence[tuple[str, str]]
    """(key, path) of each model."""
    folders: Sequence[tuple[str, str]]
    """(key, path) of other required folders."""
    ray: str
    """Temporary folder of Ray."""


@dataclass(frozen=True)
class NodeReport:
    """Results of a probe. A rank that is not the first of its node sets only the device fields."""

    rank: int
    name: str
    device: str = ""
    device_error: str = ""
    """Reason why the device cannot be used."""
    memory: tuple[int, int] = (0, 0)
    """Free and total bytes of the device."""
    unshared: str = ""
    """Reason why the proof is missing, or why its folder is not writable."""
    lacking: list[str] = field(default_factory=list)
    port: int = 0
    """Port that the node listens on."""
    room: dict[str, float] = field(default_factory=dict)
    """Free resources, by their name in `run.preflight.health`."""
    versions: dict[str, str] = field(default_factory=dict)


open_ports: list[socket.socket] = []


def probe_node(probe: NodeProbe) -> NodeReport:
    """Check this process's device and, on the first rank of a node, the node."""
    device = NodeReport(probe.rank, probe.name, *_device(probe.device))
    if not probe.is_first:
        return device
    # The socket stays open until `close`. Clients can connect to it although nothing calls accept.
    open_ports.append(socket.create_server(("", 0), backlog=1024))
    lacking = [problem for key, path in probe.models if (problem := model_problem(key, path))]
    lacking += [f"{key}={path} does not exist." for key, path in probe.folders if not Path(path).exists()]
    return replace(
        device,
        unshared=_unshared(probe),
        lacking=lacking,
        port=open_ports[-1].getsockname()[1],
        room=_room(probe.ray),
        versions=fingerprint(),
    )


def connect(addresses: Sequence[tuple[str, int]]) -> list[float | str]:
    """Return the seconds to connect to each (address, port), or an error text."""
    # Behind a firewall every connection attempt takes the full timeout.
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(_check_port, addresses))


def close(_: None = None) -> float:
    """Close the sockets of `probe_node`. Returns the node's time in seconds since 1970."""
    while open_ports:
        open_ports.pop().close()
    return time.time()


def missing_files(files: Sequence[Path], clock: Clock = SYSTEM) -> list[str]:
    """Wait until files exist and contain their folder's name. Returns the reason why a file is missing, or "", for
    each."""
    # Wait for all files at once, because separate waits for a hundred missing files would add up.
    clock.poll(lambda: not any(map(_missing, files)), SEEN_S, _POLL_S)
    return [_missing(file) for file in files]


def checksum_mismatches(files: Sequence[tuple[Path, str]]) -> list[str]:
    """Read files and return a message for each that is unreadable or has an unexpected digest.

    Raises StorageError if the storage fails, because then the contents are unknown.
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
    """Return XXH3 (128 bits) of the contents, in hexadecimal. Raises OSError."""
    digest, buffer = xxhash.xxh3_128(), bytearray(_READ_BYTES)
    with file.open("rb", buffering=0) as stream:
        while size := stream.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
    return digest.hexdigest()


def commit(file: Path, text: str) -> None:
    """Write a file like a checkpoint: under a temporary name, fsync, rename. Raises OSError."""
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


def _unshared(probe: NodeProbe) -> str:
    (problem,) = missing_files([probe.proof / "driver"])
    if problem:
        return problem
    try:
        commit(probe.proof / f"rank_{probe.rank}", probe.proof.name)
    except OSError as error:
        return f"sees it but cannot write next to it ({error.strerror})"
    return ""


def _check_port(address: tuple[str, int]) -> float | str:
    started = time.perf_counter()
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
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
        # Ray stops spilling objects to a disk that is 95 % full.
        "local disk": max(0.0, disk.free - 0.05 * disk.total) / _GIB,
        "/dev/shm": shutil.disk_usage("/dev/shm").total / _GIB if Path("/dev/shm").is_dir() else 0.0,
        "open files": float("inf") if files == resource.RLIM_INFINITY else files,
    }
