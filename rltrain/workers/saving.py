"""The training state of a role, written while the role goes on training.

Problem: writing takes minutes, and optimizer steps change the tensors meanwhile. Choice: `stage` copies them into host
memory that is kept for the next save, `write` runs in a thread beside the steps, and `seal` makes the shards of all
ranks a checkpoint. Each waits for what the driver alone hears of: `stage` for the end of a step, and the next one waits
for its answer; `write` for the folder, which a disk that does not answer may hold up; `seal` for all ranks, since the
place of a tensor is known only once it is written. Only the first `stage` of a run is a collective: which rank writes
what is settled once. Where the host lacks room for the copy, the tensors themselves are written, and nothing may change
them meanwhile. Everything is read where it is: what rests on the host does not go through the device, which may have no
room for it. Left out: a collective at the end of `write` in place of `seal`, which would run beside those of the steps
over connections of its own; copying while the next step generates, which would have to end before each of the things
that move or change weights.
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

from rltrain.base.device import DEVICES, Device, host_memory
from rltrain.base.env import memory_left
from rltrain.base.errors import unwritten
from rltrain.base.exchange import gather_json
from rltrain.models.files.hashed import Digests, HashingWriter, Planner
from rltrain.models.forward import PackedModel
from rltrain.models.optim import LossScale
from rltrain.models.weights.shard import reshard
from rltrain.models.weights.state import saved_weights, training_state
from rltrain.workers.residency import like, local
from rltrain.workers.tasks import SaveTask, Written

# What the copies may take of the memory that is free: the rest is for the step that goes on.
_SHARE = 0.7


class StateWriter:
    """Writes model, optimizer and loss scale of a role as a DCP checkpoint, again and again. Every rank has one."""

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
        self._metadata: Metadata | None = None  # rank 0 has it
        self._hosts: dict[str, torch.Tensor] = {}

    def reshard_and_synchronize(self) -> None:
        """Before anything is read: the parameters are shards, and what was on its way to the device has arrived."""
        reshard(self._packed)
        self._device.synchronize()

    def room(self, copies: bool, more_bytes: int = 0) -> bool:
        """Whether there shall be ``copies`` and every host has room for them and ``more_bytes`` of this rank's (a
        collective). Asked before each save, and before anything is taken for it."""
        if not copies:
            return False
        # Weights and two moments (AdamW). The memory of the last copies is used again.
        weights, copies_each = saved_weights(self._packed).values(), 3 if self._optimizer else 1
        num_bytes = more_bytes + (0 if self._hosts else sum(copies_each * local(weight).nbytes for weight in weights))
        free = min(DEVICES["cpu"].free_memory_bytes(), memory_left())
        everybody = gather_json((socket.gethostname(), num_bytes, free))
        of_host: Counter[str] = Counter()
        for host, size, _ in everybody:
            of_host[host] += size
        return all(of_host[host] < _SHARE * free for host, _, free in everybody)

    def stage(self, folder: str, copies: bool) -> bool:
        """Take the state as it is now (the first time a collective), to be written into ``folder``: with ``copies``,
        which `room` has found room for, training may go on while `write` runs. Returns ``copies``."""
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
        """Agree with the other ranks on who writes what."""
        writer, is_first = HashingWriter(""), dist.get_rank() == 0
        everybody: list[Any] = [None] * dist.get_world_size() if is_first else []
        own_plan = self._planner.create_local_plan()
        for item in own_plan.items:
            if item.tensor_data:  # where a tensor was is no part of a checkpoint
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
            # Memory that is kept is there already: to be given new pages takes longer than the copy.
            tensors = [local(value) for value in state.values()]
            self._hosts = dict(zip(state, host_memory(tensors, not self._device.is_cpu), strict=True))
        for name, tensor in state.items():
            self._hosts[name].copy_(local(tensor), non_blocking=True)
        self._device.synchronize()
        return {name: like(tensor, self._hosts[name]) for name, tensor in state.items()}

    def write(self) -> tuple[list[Any], Digests]:
        """Write what `stage` has taken. Returns where what is, for `seal`, and the digests of the files. Raises
        DiskError, as `seal`."""
        assert self._plan is not None, "stage comes first"
        writer = HashingWriter(self._folder)
        with told_as_disk_error(self._folder):
            writer.prepare_local_plan(self._plan)
            results = writer.write_data(self._plan, self._planner).wait()
        # The tensors are let go, except for the copies.
        self._planner.drop()
        self._planner.state_dict = {}
        return results, writer.fs.digests

    def seal(self, places: list[list[Any]]) -> Digests:
        """Rank 0, once every rank has written: say in ``.metadata`` where what is."""
        writer = HashingWriter(self._folder)
        assert self._metadata is not None, "rank 0 has settled it"
        with told_as_disk_error(self._folder):
            writer.finish(self._metadata, places)
        return writer.fs.digests


@contextmanager
def told_as_disk_error(folder: str) -> Iterator[None]:
    """What the system says of a file that cannot be written becomes a DiskError, or a StorageError."""
    try:
        yield
    except OSError as error:
        sentence = f"{error.filename or folder} could not be written: {error.strerror or error}"
        raise unwritten(sentence, error) from error


class SavesState:
    """A role whose part of a checkpoint is what its ``_writer`` writes. Every method is called on all ranks."""

    _writer: StateWriter

    def stage(self, task: SaveTask) -> bool:
        """Take the state as it is now (a collective)."""
        self._writer.reshard_and_synchronize()
        return self._writer.stage(task.folder, self._writer.room(task.copies))

    def write(self) -> tuple[list[Any], Written]:
        """Write this rank's shards. Raises DiskError."""
        places, digests = self._writer.write()
        return places, Written(digests, [])

    def seal(self, places: list[list[Any]]) -> dict[str, str]:
        """Rank 0: ``.metadata``, which says what is where."""
        return self._writer.seal(places)
