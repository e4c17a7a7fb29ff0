"""What the nodes of a launch tell each other, and the processes that make up Ray on one of them.

Nodes share no storage for certain, and a port of our own would be one more to open. The head of Ray keeps a store of
keys and values, behind the token, which a node can reach before it has joined. So every node says there who it is and
what it runs, and the head how the command has ended. Ray's own `ray stop` looks for processes by name and would end
those of other clusters of this machine; ours carry a mark in their environment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray._raylet import AuthenticationTokenLoader, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RayError

# The variable that every process of a cluster inherits; its value is the address of the head.
MARK = "RLTRAIN_CLUSTER"
# What the head is, how its command has ended, who asks it to end, and that its script is alive.
HEAD, END, STOP, BEAT = "head", "end", "stop", "beat"
_NAMESPACE = b"rltrain"
_ANSWER_S = 5
_END_S = 5


@dataclass
class Node:
    """A node as it has told of itself, and the devices that Ray counts there."""

    address: str
    host: str
    rank: int | None = None
    left: bool = False
    refused: str = ""
    """Why it was not let in."""
    stranger: bool = False
    """It may be of another run, so its refusal is no reason to end this one."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Ray's name of a device -> how many; empty before Ray has started there."""

    @property
    def is_in(self) -> bool:
        """Whether Ray runs there, and is to go on."""
        return bool(self.resources) and not self.left and not self.refused

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}, "
        return f"{self.host} ({rank}{self.address})"


def is_here(host: str) -> bool:
    """Whether a name or address is one of this node's."""
    with suppress(OSError), socket.socket() as line:
        line.bind((host, 0))
        return True
    return False


def answers(address: str) -> bool:
    """Whether anybody listens at host:port. Ray itself would try for minutes, without a word."""
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
        return True
    return False


class Board:
    """The head's store. Raises ConnectionError where nobody answers, and where our token is not that of the head."""

    def __init__(self, address: str) -> None:
        # A token that was wrong would else be used again.
        AuthenticationTokenLoader.instance().reset_cache()
        self.address = address
        self._client = self._guarded(lambda: GcsClient(address=address))

    def tell(self, name: str, value: Any) -> None:
        """Write a value that JSON can hold."""
        self._ask("internal_kv_put", name.encode(), json.dumps(value).encode(), True)

    def read(self, name: str) -> Any:
        """The value, or None."""
        value = self._ask("internal_kv_get", name.encode())
        return None if value is None else json.loads(value)

    def alive(self) -> dict[str, dict[str, float]]:
        """Address of each node where Ray runs -> its devices."""
        nodes = self._ask("get_all_node_info").values()
        return {node.node_manager_address: dict(node.resources_total) for node in nodes if node.state == 0}

    def nodes(self) -> list[Node]:
        """All that have told of themselves, by rank."""
        alive, names = self.alive(), self._ask("internal_kv_keys", b"node/")
        records = map(json.loads, self._ask("internal_kv_multi_get", names).values() if names else ())
        listed_nodes = [Node(**record, resources=alive.get(record["address"], {})) for record in records]
        return sorted(listed_nodes, key=lambda node: (node.rank is None, node.rank or 0, node.address))

    def tell_of(self, node: Node) -> None:
        """Say, or say anew, who we are."""
        key = f"node/{node.address}/{node.rank}{'/stranger' * node.stranger}"
        self.tell(key, {k: v for k, v in vars(node).items() if k != "resources"})

    def _ask(self, method: str, *arguments: Any) -> Any:
        place = {} if method == "get_all_node_info" else {"namespace": _NAMESPACE}
        return self._guarded(lambda: getattr(self._client, method)(*arguments, timeout=4 * _ANSWER_S, **place))

    def _guarded(self, ask: Callable[[], Any]) -> Any:
        # Without this the client would wait for a head that is gone, and after a minute end this process.
        if not answers(self.address):
            raise ConnectionRefusedError(f"nobody answers at {self.address}")
        try:
            return ask()
        except (RayError, RuntimeError) as error:
            cause = "the token of this node is not the head's" if "AuthToken" in str(error) else str(error).strip()
            raise ConnectionError(cause.partition("\n")[0]) from error


def clusters_here() -> dict[str, list[int]]:
    """Address of the head -> the processes on this node that belong to its cluster."""
    marked: dict[int, str] = {}
    parents: dict[int, int] = {}
    ancestors, network = _ancestors(), os.readlink("/proc/self/ns/net")
    for process in _processes():
        # A process may have ended between two lines, or be another user's.
        with suppress(OSError):
            # Containers of this machine are other nodes.
            if os.readlink(process / "ns/net") != network or int(process.name) in ancestors:
                continue
            state, parent = (process / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:2]
            if state == "Z":
                continue
            parents[int(process.name)] = int(parent)
            for line in (process / "environ").read_bytes().split(b"\0"):
                if line.startswith(MARK.encode() + b"="):
                    marked[int(process.name)] = line.decode().partition("=")[2]
    clusters: dict[str, list[int]] = {}
    for pid in parents:
        # Ray's workers write their titles over their environment, but descend from a raylet that has not.
        above: int | None = pid
        while above is not None and above not in marked:
            above = parents.get(above)
        if above is not None:
            clusters.setdefault(marked[above], []).append(pid)
    return clusters


def program_of(pid: int) -> str:
    """The name of a process; empty where it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    return ""


def end_processes(address: str) -> int:
    """End the cluster of the head at `address` on this node; returns how many processes that were."""
    pids: set[int] = set()
    for signum in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + _END_S
        while (left := clusters_here().get(address, [])) and time.monotonic() < until:
            for pid in left:
                # SIGTERM once each: a second one tells a run to end without saving.
                if signum == signal.SIGKILL or pid not in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signum)
            pids |= set(left)
            time.sleep(0.2)
    return len(pids)


def group_is_alive(group: int) -> bool:
    """Whether any process of a process group runs still; one that nobody has waited for does not."""
    for process in _processes():
        with suppress(OSError):
            state, _, of = (process / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:3]
            if int(of) == group and state != "Z":
                return True
    return False


def _processes() -> Iterator[Path]:
    return (process for process in Path("/proc").iterdir() if process.name.isdigit())


def _ancestors() -> set[int]:
    """This process and those above it, which an end of the cluster must not take."""
    pids = {pid := os.getpid()}
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
        pids.add(pid)
    return pids
