"""Training state of a role, written while the role keeps training.

Problem: writing takes minutes, and optimizer steps change the tensors meanwhile. Choice: three calls, because each
depends on an event that only the driver observes.

- `stage` copies the tensors into host memory, which is kept for the next save. It waits for the end of a step, and the
  next step waits for it.
- `write` runs in a thread concurrent with the steps. It needs the folder, which a hanging disk may delay.
- `seal` combines the shards into a checkpoint. It needs all ranks, because offsets of tensors are known only after they
  were written.

Only the first `stage` of a run is a collective: it assigns the tensors to ranks. If the host lacks memory for the copy,
the original tensors are written and must not change meanwhile. Tensors are read where they are: offloaded tensors do
not pass through the device, which may lack room. Left out: a collective at the end of `write` instead of `seal`, which
would run concurrently with the steps' collectives and need separate connections; and copying while the next step
generates, which would have to end before weights are moved or changed.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from rltrain.common.device import DEVICES, Device, host_memory
from rltrain.common.env import memory_left
from rltrain.common.errors import write_error
from rltrain.models.files.hashed import Digests, HashingWriter, Planner
from rltrain.models.forward import PackedModel
from rltrain.models.optim import LossScale, moments_bytes
from rltrain.models.weights.shard import like, local_shard, reshard
from rltrain.models.weights.state import saved_weights, training_state
from rltrain.runtime.exchange import gather_json
from rltrain.workers.interface.tasks import SaveTask, Written

# Share of the free memory that copies may use; the rest is for the running step.
_SHARE = 0.7


class StateWriter:
    """Writer of a role's model, optimizer and loss scale as DCP checkpoints; one per rank, used for all saves."""

    def __init__(
        self,
        packed: PackedModel,
        optimizer: torch.optim.Optimizer | None,
        loss_scale: LossScale | None,
        device: Device,
    ) -> None:
        self._packed, self._optimizer, self._loss_scale, self._device = packed, optimizer, loss_scale, device
        self._planner = Planner()
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None  # on rank 0
        self._hosts: dict[str, torch.Tensor] = {}

    def reshard_and_synchronize(self) -> None:
        """Reshard the parameters and finish pending copies to the device. Call before tensors are read."""
        reshard(self._packed)
        self._device.synchronize()

    def room(self, copies: bool, more_bytes: int = 0) -> bool:
        """Return True if ``copies`` are requested and fit on every host with ``more_bytes`` of this rank (a
        collective). Call before each save, before any other allocation for it."""
        if not copies:
            return False
        # The memory of earlier copies is reused.
        weights = sum(local_shard(weight).nbytes for weight in saved_weights(self._packed).values())
        moments = moments_bytes(self._optimizer) if self._optimizer else 0
        num_bytes = more_bytes + (0 if self._hosts else weights + moments)
        free = min(DEVICES["cpu"].free_memory_bytes(), memory_left())
        everybody = gather_json((socket.gethostname(), num_bytes, free))
        of_host: Counter[str] = Counter()
        for host, size, _ in everybody:
            of_host[host] += size
        return all(of_host[host] < _SHARE * free for host, _, free in everybody)

    def stage(self, folder: str, copies: bool) -> bool:
        """Snapshot the state for `write` into ``folder`` (the first call is a collective). Returns ``copies``.

        copies: training may continue during `write`; `room` must have returned True.
        """
        self._folder = folder
        own_state = training_state(self._packed, self._optimizer, self._loss_scale)
        self._planner.set_up_planner(own_state, None, dist.get_rank() == 0)
        state = {name: value for name, value in self._planner.state_dict.items() if isinstance(value, torch.Tensor)}
        if self._plan is None:
            self._agree_on_plan()
        if copies:
            self._planner.state_dict = self._copy(state)
        return copies

    def _agree_on_plan(self) -> None:
        """Assign the tensors to ranks (a collective)."""
        writer, is_first = HashingWriter(""), dist.get_rank() == 0
        everybody: list[Any] = [None] * dist.get_world_size() if is_first else []
        own_plan = self._planner.create_local_plan()
        for item in own_plan.items:
            if item.tensor_data:  # whether memory is pinned must not be part of a checkpoint
                item.tensor_data.properties.pin_memory = False
        dist.gather_object(own_plan, everybody if is_first else None)
        plans: list[Any] = []
        if is_first:
            plans, self._metadata = self._planner.create_global_plan(everybody)
            plans = writer.prepare_global_plan(plans)
        plan: list[Any] = [None]
        dist.scatter_object_list(plan, plans or None)
        self._plan = self._planner.finish_plan(plan[0])

    def _copy(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not self._hosts:
            # Host memory is kept for later saves, so that its pages are already mapped: allocating new pages takes
            # longer than the copy.
            tensors = [local_shard(value) for value in state.values()]
            self._hosts = dict(zip(state, host_memory(tensors, not self._device.is_cpu), strict=True))
        for name, tensor in state.items():
            self._hosts[name].copy_(local_shard(tensor), non_blocking=True)
        self._device.synchronize()
        return {name: like(tensor, self._hosts[name]) for name, tensor in state.items()}

    def write(self) -> tuple[list[Any], Digests]:
        """Write the snapshot. Returns index data for `seal`, and the files' digests. Raises DiskError, like `seal`."""
        assert self._plan is not None, "stage comes first"
        writer = HashingWriter(self._folder)
        with told_as_disk_error(self._folder):
            writer.prepare_local_plan(self._plan)
            results = writer.write_data(self._plan, self._planner).wait()
        # Release the original tensors, but keep the copies.
        self._planner.drop()
        self._planner.state_dict = {}
        return results, writer.fs.digests

    def seal(self, places: list[list[Any]]) -> Digests:
        """Write the index ``.metadata`` on rank 0, after every rank has written."""
        writer = HashingWriter(self._folder)
        assert self._metadata is not None, "rank 0 has settled it"
        with told_as_disk_error(self._folder):
            writer.finish(self._metadata, places)
        return writer.fs.digests


@contextmanager
def told_as_disk_error(folder: str) -> Iterator[None]:
    """Convert an OSError of a file that cannot be written to a DiskError or a StorageError."""
    try:
        yield
    except OSError as error:
        sentence = f"{error.filename or folder} could not be written: {error.strerror or error}"
        raise write_error(sentence, error) from error


class SavesState:
    """Role whose checkpoint is written by its ``_writer``. Every method is called on all ranks."""

    _writer: StateWriter

    def stage(self, task: SaveTask) -> bool:
        """Snapshot the state (a collective)."""
        self._writer.reshard_and_synchronize()
        return self._writer.stage(task.folder, self._writer.room(task.copies))

    def write(self) -> tuple[list[Any], Written]:
        """Write this rank's shards. Raises DiskError."""
        places, digests = self._writer.write()
        return places, Written(digests, [])

    def seal(self, places: list[list[Any]]) -> dict[str, str]:
        """Write the index ``.metadata`` on rank 0."""
        return self._writer.seal(places)
