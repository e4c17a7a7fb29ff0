"""Ray actors as processes: their hosts, their stacks, and killing actors that do not respond."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Container, Sequence
from contextlib import suppress
from typing import Any

import ray

from rltrain.runtime.slots.limits import send
from rltrain.runtime.stacks import stacks_here

# Calls of this group are served while another call runs.
CONTROL = "control"
# Timeout for the stacks of all actors.
_STACKS_S = 5.0
# Maximum number of actors that a message names.
_NAMED = 4


class ActorProcess:
    """Methods of every actor that `Actors` describes, in the group CONTROL."""

    @ray.method(concurrency_group=CONTROL)
    def identity(self) -> dict[str, Any]:
        """Return process id, host name and address, and Ray's node id."""
        address, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "node": socket.gethostname(), "address": address, "node_id": node_id}

    @ray.method(concurrency_group=CONTROL)
    def stacks(self) -> str:
        """Return the stacks of this process and its descendants, also while a call runs."""
        return stacks_here()


class Actors:
    """Actors of one class, by number. unit: the name of one in messages, after ``role``."""

    def __init__(self, actors: Sequence[Any], unit: str, role: str = "") -> None:
        self._actors, self._unit, self._role = actors, unit, role
        self.identities = [actor.identity.remote() for actor in actors]
        """References, requested now because a dead process can no longer report its own."""

    def place(self, numbers: Sequence[int], phase: str) -> str:
        """Describe role, numbers, processes, nodes and the call."""
        known, unknown = _answers(self.identities), {"pid": "?", "node": "?"}
        named = [(number, known.get(number, unknown)) for number in numbers[:_NAMED]]
        total = len(self._actors)
        names = [f"{self._unit} {number} of {total} (pid {at['pid']} on {at['node']})" for number, at in named]
        remainder = f" and {len(numbers) - len(names)} more" if len(numbers) > len(names) else ""
        return f"{self._role}{', '.join(names) or f'a {self._unit}'}{remainder}, in {phase}"

    def stacks(self) -> dict[int, str]:
        """Return the stacks of the responding actors and their processes, by number."""
        return _answers([actor.stacks.remote() for actor in self._actors], _STACKS_S)

    def kill_here(self, numbers: Container[int]) -> None:
        """Kill the processes that run on this host. Ray only requests an exit, to which a stopped process does not
        react."""
        here = [each for number, each in _answers(self.identities).items() if number in numbers]
        send([each["pid"] for each in here if each["node"] == socket.gethostname()], signal.SIGKILL)


def _answers(calls: list[Any], within_s: float = 0.0) -> dict[int, Any]:
    """Return the results that arrive in time, by number. A dead process has none."""
    answered, _ = ray.wait(calls, num_returns=len(calls), timeout=within_s) if calls else ([], [])
    results: dict[int, Any] = {}
    for number, call in enumerate(calls):
        with suppress(ray.exceptions.RayError):
            results |= {number: ray.get(call)} if call in answered else {}
    return results
