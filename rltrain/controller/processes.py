"""What the processes of a node hold: memory, threads and open files, as /proc tells it.

Memory is what is a process's own (anonymous pages): pages of the object store are shared by all who have read them, and
would count many times.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from rltrain.slots.limits import descendants

# The start of a command line -> what the process is; what it starts itself is of the second kind.
_ACTORS = {"ray::_Host": ("worker", "engine"), "ray::RewardWorker": ("scorer", "scorer")}


@dataclass(frozen=True)
class Process:
    """A process of the run on a node."""

    kind: str
    """One of driver, worker, engine (what a worker has started), scorer and ray."""
    num_bytes: int
    """Bytes of memory of its own."""
    num_threads: int
    num_files: int


@dataclass(frozen=True)
class Node:
    """The processes of Ray on a node."""

    processes: Sequence[Process] = ()
    store_bytes: int = 0
    """Pages that its object store has used."""
    shm_bytes: int = 0
    """In /dev/shm, those among them."""


def this_process(kind: str) -> Process | None:
    """None where there is no /proc."""
    return _process(os.getpid(), kind)


def this_node() -> Node:
    """Asked in a worker."""
    raylet = os.getppid()
    kinds = {raylet: "ray", **dict.fromkeys(_heads(raylet), "ray")}
    for pid in descendants(raylet):
        role, below = next((kind for start, kind in _ACTORS.items() if _command(pid).startswith(start)), ("ray", ""))
        kinds.setdefault(pid, role)
        if below:
            kinds |= dict.fromkeys(descendants(pid), below)
    processes = [_process(pid, kind) for pid, kind in kinds.items()]
    numbers = _status(raylet)
    shm = None
    with suppress(OSError):
        shm = os.statvfs("/dev/shm")
    return Node(
        [process for process in processes if process],
        (numbers.get("RssShmem", 0) + numbers.get("RssFile", 0)) << 10,
        (shm.f_blocks - shm.f_bfree) * shm.f_frsize if shm else 0,
    )


def ask_nodes(workers: Sequence[Any], nodes: Sequence[int]) -> Callable[[], list[Node]]:
    """Ask every node for `this_node`. Returns what has come by the time of the call, without waiting.

    nodes: the node of each worker, numbered.
    """
    references = [workers[nodes.index(node)].measure.remote() for node in dict.fromkeys(nodes)]

    def come() -> list[Node]:
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
        nodes = []
        for reference in ready:
            with suppress(ray.exceptions.RayError):  # the next call says that a worker is gone
                nodes.append(ray.get(reference))
        return nodes

    return come


def _process(pid: int, kind: str) -> Process | None:
    """None once it has ended."""
    numbers = _status(pid)
    try:
        num_files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    return Process(kind, numbers.get("RssAnon", 0) << 10, numbers.get("Threads", 0), num_files)


def _status(pid: int) -> dict[str, int]:
    return _numbers(f"/proc/{pid}/status")


def _numbers(file: str) -> dict[str, int]:
    """The lines ``name: number`` of a file under /proc; memory is in KiB."""
    with suppress(OSError), open(file, encoding="utf-8", errors="replace") as opened:
        parts = (line.replace(":", " ").split() for line in opened)
        return {words[0]: int(words[1]) for words in parts if len(words) > 1 and words[1].isdigit()}
    return {}


def _command(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as opened:
        return opened.read(200)
    return ""


def _heads(raylet: int) -> Iterator[int]:
    """Ray's head process where it is on this node. Whoever has started the raylet has started it too."""
    parent = _status(raylet).get("PPid")
    for listing in glob.glob(f"/proc/{parent}/task/*/children"):
        with suppress(OSError), open(listing, encoding="utf-8") as opened:
            children = map(int, opened.read().split())
            yield from (pid for pid in children if "gcs_server" in _command(pid).partition("\0")[0])
