"""Memory of a node's processes by kind, from /proc.

Only anonymous pages count, because pages of the object store are shared by all processes that have read them, and would
be counted several times.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from rltrain.runtime.slots.limits import descendants

# Prefix of a command line -> kind of the process, and kind of its descendants.
_ACTORS = {"ray::_Host": ("worker", "engine"), "ray::RewardWorker": ("scorer", "scorer")}


def node_memory() -> dict[str, float]:
    """Return ``drift/*`` (GiB) of a worker's node: the largest process of each kind, and the object store."""
    raylet = os.getppid()
    kinds = dict.fromkeys([raylet, *_heads(raylet)], "ray")
    for pid in descendants(raylet):
        kind, below = next((kinds for start, kinds in _ACTORS.items() if _command(pid).startswith(start)), ("ray", ""))
        kinds.setdefault(pid, kind)
        if below:
            kinds |= dict.fromkeys(descendants(pid), below)
    shared_kib = sum(_status(raylet).get(name, 0) for name in ("RssShmem", "RssFile"))
    memory = defaultdict(float, {"drift/object_store_gb": shared_kib / 2**20})
    for pid, kind in kinds.items():
        memory[f"drift/{kind}_gb"] = max(memory[f"drift/{kind}_gb"], own_memory_gb(pid))
    return dict(memory)


def ask_nodes(group: Any) -> Callable[[], list[dict[str, float]]]:
    """Request `node_memory` from every node. Returns a function that returns the replies so far, without blocking.

    group: a `WorkerGroup`, which imports this module.
    """
    firsts = [group.nodes.index(node) for node in dict.fromkeys(group.nodes)]
    references = [group.workers[first].measure.remote() for first in firsts]

    def replies() -> list[dict[str, float]]:
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
        nodes = []
        for reference in ready:
            with suppress(ray.exceptions.RayError):  # the next call raises the error of a lost worker
                nodes.append(ray.get(reference))
        return nodes

    return replies


def own_memory_gb(pid: int) -> float:
    """Return the anonymous pages of a process in GiB; 0 if it has ended, or without /proc."""
    return _status(pid).get("RssAnon", 0) / 2**20


def _status(pid: int) -> dict[str, int]:
    """Return the numbers in /proc/PID/status; sizes are in KiB."""
    words = [line.replace(":", " ").split() for line in _read(f"/proc/{pid}/status").splitlines()]
    return {name: int(numbers[0]) for name, *numbers in words if numbers and numbers[0].isdecimal()}


def _read(file: str) -> str:
    with suppress(OSError):
        return Path(file).read_text("utf-8", "replace")
    return ""


def _heads(raylet: int) -> Iterator[int]:
    """Yield Ray's head process if it runs on this node: it has the same parent as the raylet."""
    for listing in Path(f"/proc/{_status(raylet).get('PPid')}/task").glob("*/children"):
        yield from (pid for pid in map(int, _read(str(listing)).split()) if "gcs_server" in _command(pid))


def _command(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline")
