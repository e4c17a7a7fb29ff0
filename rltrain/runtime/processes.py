"""Memory of a node's processes by kind, from /proc.

Only anonymous pages count, because pages of the object store are shared by all processes that have read them, and would
be counted several times.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray

from rltrain.runtime.slots.proc import children, command, descendants, status

# Prefix of a command line -> kind of the process, and kind of its descendants.
_ACTORS = {"ray::_Host": ("worker", "engine"), "ray::RewardWorker": ("scorer", "scorer")}


def node_memory() -> dict[str, float]:
    """Return ``drift/*`` (GiB) of a worker's node: the largest process of each kind, and the object store."""
    raylet = os.getppid()
    # Ray's head process has the same parent as the raylet.
    heads = [pid for pid in children(int(status(raylet).get("PPid", 0))) if "gcs_server" in command(pid)]
    kinds = dict.fromkeys([raylet, *heads], "ray")
    for pid in descendants(raylet):
        kind, below = next((kinds for start, kinds in _ACTORS.items() if command(pid).startswith(start)), ("ray", ""))
        kinds.setdefault(pid, kind)
        if below:
            kinds |= dict.fromkeys(descendants(pid), below)
    memory = defaultdict(float, {"drift/object_store_gb": _gib(raylet, "RssShmem", "RssFile")})
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
    return _gib(pid, "RssAnon")


def _gib(pid: int, *names: str) -> float:
    fields = status(pid)
    return sum(int(fields.get(name, "0").split()[0]) for name in names) / 2**20
