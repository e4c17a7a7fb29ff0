"""Key-value store shared by the nodes of a launch, and the processes of a Ray cluster on a node.

Nodes may not share storage, and a separate port would have to be opened. But Ray's head has a key-value store,
protected by the token, which a node can access before it joins. So every node publishes its identity and software
versions there, and the head publishes the end of the command. `ray stop` finds processes by name and would end other
clusters of this machine; processes of this cluster are marked in their environment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray._raylet import AuthenticationTokenLoader, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RayError

from rltrain.runtime.slots import proc

# Variable that every process of a cluster inherits; its value is the address of the head.
MARK = "RLTRAIN_CLUSTER"
# Keys: the head's record, the command's exit code, the requester of a stop, and the heartbeat of the head's script.
HEAD, END, STOP, BEAT = "head", "end", "stop", "beat"
_NAMESPACE = b"rltrain"
_ANSWER_S = 5
_END_S = 5


@dataclass
class Node:
    """Node as published by itself, and its devices as counted by Ray."""

    address: str
    host: str
    rank: int | None = None
    left: bool = False
    refused: str = ""
    """Reason why the node was rejected."""
    stranger: bool = False
    """True if the node may belong to another run; then its rejection does not end this run."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Devices by Ray's resource name; empty before Ray has started there."""

    @property
    def is_in(self) -> bool:
        """True if Ray runs on the node and keeps running."""
        return bool(self.resources) and not self.left and not self.refused

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}, "
        return f"{self.host} ({rank}{self.address})"


def is_here(host: str) -> bool:
    """Return True if a name or address belongs to this node."""
    with suppress(OSError), socket.socket() as line:
        line.bind((host, 0))
        return True
    return False


def accepts_connections(address: str) -> bool:
    """Return True if host:port accepts connections. Ray would retry silently for minutes."""
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
        return True
    return False


class KVStore:
    """Client of the head's store. Raises ConnectionError if the head is unreachable or has another token."""

    def __init__(self, address: str) -> None:
        # The cache is cleared, because otherwise an earlier token, which may be wrong, would be reused.
        AuthenticationTokenLoader.instance().reset_cache()
        self.address = address
        self._client = self._checked(lambda: GcsClient(address=address))

    def put(self, name: str, value: Any) -> None:
        """Write a JSON value."""
        self._request("internal_kv_put", name.encode(), json.dumps(value).encode(), True)

    def get(self, name: str) -> Any:
        """Return the value, or None."""
        value = self._request("internal_kv_get", name.encode())
        return None if value is None else json.loads(value)

    def alive(self) -> dict[str, dict[str, float]]:
        """Return the devices of each live node, by address."""
        nodes = self._request("get_all_node_info").values()
        return {node.node_manager_address: dict(node.resources_total) for node in nodes if node.state == 0}

    def nodes(self) -> list[Node]:
        """Return all published nodes, by rank."""
        alive, names = self.alive(), self._request("internal_kv_keys", b"node/")
        records = map(json.loads, self._request("internal_kv_multi_get", names).values() if names else ())
        listed_nodes = [Node(**record, resources=alive.get(record["address"], {})) for record in records]
        return sorted(listed_nodes, key=lambda node: (node.rank is None, node.rank or 0, node.address))

    def publish_node(self, node: Node) -> None:
        """Publish or update a node's record."""
        key = f"node/{node.address}/{node.rank}{'/stranger' * node.stranger}"
        self.put(key, {k: v for k, v in vars(node).items() if k != "resources"})

    def _request(self, method: str, *arguments: Any) -> Any:
        place = {} if method == "get_all_node_info" else {"namespace": _NAMESPACE}
        return self._checked(lambda: getattr(self._client, method)(*arguments, timeout=4 * _ANSWER_S, **place))

    def _checked(self, request: Callable[[], Any]) -> Any:
        # Without this check, the client would wait for a lost head, and terminate this process after a minute.
        if not accepts_connections(self.address):
            raise ConnectionRefusedError(f"{self.address} does not accept connections")
        try:
            return request()
        except (RayError, RuntimeError) as error:
            cause = "this node's token differs from the head's" if "AuthToken" in str(error) else str(error).strip()
            raise ConnectionError(cause.partition("\n")[0]) from error


def clusters_here() -> dict[str, list[int]]:
    """Return the processes on this node by cluster, which is identified by the head's address."""
    marked: dict[int, str] = {}
    parents: dict[int, int] = {}
    network = os.readlink("/proc/self/ns/net")
    # This process and its ancestors must survive when the cluster is terminated.
    ancestors = {ancestor := os.getpid()}
    while ancestor > 1:
        ancestors.add(ancestor := int(proc.stat(ancestor)[1]))
    for pid in proc.pids():
        # A process may have ended meanwhile, or belong to another user.
        with suppress(OSError):
            # Containers on this machine are different nodes.
            if os.readlink(f"/proc/{pid}/ns/net") != network or pid in ancestors:
                continue
            if not (fields := proc.stat(pid)) or fields[0] == "Z":
                continue
            parents[pid] = int(fields[1])
            for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if line.startswith(MARK.encode() + b"="):
                    marked[pid] = line.decode().partition("=")[2]
    clusters: dict[str, list[int]] = {}
    for pid in parents:
        # Ray's workers overwrite their environment with process titles, but descend from a raylet that does not.
        above: int | None = pid
        while above is not None and above not in marked:
            above = parents.get(above)
        if above is not None:
            clusters.setdefault(marked[above], []).append(pid)
    return clusters


def end_processes(address: str) -> int:
    """Terminate the cluster of the head at ``address`` on this node. Returns the number of processes."""
    pids: set[int] = set()
    for signum in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + _END_S
        while (left := clusters_here().get(address, [])) and time.monotonic() < until:
            for pid in left:
                # SIGTERM only once per process, because a second one makes a run exit without saving.
                if signum == signal.SIGKILL or pid not in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signum)
            pids |= set(left)
            time.sleep(0.2)
    return len(pids)


def group_is_alive(group: int) -> bool:
    """Return True if a process group has a running process; zombies do not count."""
    return any(fields[2:3] == [str(group)] and fields[0] != "Z" for fields in map(proc.stat, proc.pids()))
