"""Tests of devices and their links: correct collectives, and bandwidth between every pair of ranks.

`collectives` runs at the start of every run, because otherwise the first collective would be one of FSDP, whose error
for a dead link is unhelpful. `p2p_bandwidth` is for `python -m rltrain.doctor`: every pair of ranks exchanges data
once. All pairs of a round run at the same time, as in a round-robin tournament.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist

from rltrain.common.device import get_device
from rltrain.common.errors import WorkerError
from rltrain.models.weights.names import all_gather
from rltrain.workers.interface.results import Array
from rltrain.workers.interface.roles import Links


class LinksWorker(Links):
    """Link tests: a separate worker in the doctor, and a role of every worker in a run. device: ``trainer.device``."""

    def __init__(self, device: str) -> None:
        self.roles: list[object] = [self]
        self._device = get_device(device)

    @property
    def _rank(self) -> int:
        return dist.get_rank()

    @property
    def _world(self) -> int:
        return dist.get_world_size()

    def computes(self, size: int) -> float:
        """Return TFLOP/s of a product of two [size, size] matrices in the compute dtype, or 0 if the result is wrong.

        size: a power of two.
        """
        self._device.activate()
        ones = torch.ones(size, size, device=self._device.torch_device, dtype=self._device.compute_dtype)
        ones @ ones
        started = self._now()
        product = ones @ ones
        seconds = self._now() - started
        # The result is a power of two, which bf16 represents exactly; sums are in fp32.
        return 2 * size**3 / seconds / 1e12 if bool((product == size).all()) else 0.0

    def collectives(self, num_bytes: int) -> dict[str, float]:
        """Return GB/s of an all-reduce and an all-gather, after a warm-up. Raises WorkerError if a result is wrong."""
        self._device.activate()
        size = max(num_bytes // 4 // self._world, 1) * self._world
        for _ in range(2):
            summed = self._filled(size, self._rank + 1.0)
            started = self._now()
            dist.all_reduce(summed)
            reduced = self._now() - started
            part, gathered = self._filled(size // self._world, float(self._rank)), self._filled(size, -1.0)
            started = self._now()
            all_gather(gathered, part)
            seconds = self._now() - started
        expected = torch.arange(self._world, device=gathered.device).repeat_interleave(size // self._world)
        total = self._world * (self._world + 1) / 2
        if not bool((summed == total).all()) or not bool((gathered == expected).all()):
            raise WorkerError(
                f"rank {self._rank}: a collective returned wrong values. Do not train on these devices: python -m "
                "rltrain.doctor tests them pair by pair."
            )
        # Count the bytes that each rank sends in a ring, so that the result is the link bandwidth for any number of
        # ranks.
        share = 4 * size * (self._world - 1) / max(self._world, 1) / 1e9
        return {"all-reduce": 2 * share / reduced, "all-gather": share / seconds}

    def p2p_bandwidth(self, num_bytes: int, turn: int) -> Array:
        """Return GB/s to this rank's peer of the round, in an array [world] over ranks.

        The peer's entry is 0 if the received data is wrong. All other entries are nan.
        """
        self._device.activate()
        speeds = np.full(self._world, np.nan)
        peer = _partner(self._rank, turn, self._world + self._world % 2)
        # With an odd world size one rank is idle in each round: its peer does not exist.
        if peer == self._world:
            return speeds
        self._exchange(self._filled(1, float(self._rank)), peer)
        sent = self._filled(num_bytes // 4, float(self._rank))
        started = self._now()
        arrived = self._exchange(sent, peer)
        seconds = self._now() - started
        speeds[peer] = num_bytes / seconds / 1e9 if bool((arrived == peer).all()) else 0.0
        return speeds

    def _exchange(self, sent: torch.Tensor, peer: int) -> torch.Tensor:
        arrived = torch.full_like(sent, -1.0)
        # A batch uses the connections of the whole group. Single operations would open a connection for each pair.
        work = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, arrived, peer)]
        for request in dist.batch_isend_irecv(work):
            request.wait()
        return arrived

    def _filled(self, size: int, value: float) -> torch.Tensor:
        return torch.full((size,), value, device=self._device.torch_device)

    def _now(self) -> float:
        self._device.synchronize()
        return time.perf_counter()


def _partner(rank: int, turn: int, players: int) -> int:
    """Return the peer of ``rank`` in a round, by the circle method: the last rank is fixed, the others rotate."""
    last = players - 1
    if rank == last:
        # The last rank's peer is the rank i that would otherwise be its own peer: 2 i = turn (mod last); last is odd.
        return turn * (last + 1) // 2 % last
    peer = (turn - rank) % last
    return last if peer == rank else peer
