"""Training shards -> rollout engine, bucket by bucket, and the proof that they arrived.

Every rank gathers every weight, in the engine's dtype, through buffers that together never hold more than one bucket; the engine
copies each piece into its own weights before the next one overwrites the buffers (the allgather-swap of MindSpeed RL, without
a second copy of the model).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rltrain.device import Device
from rltrain.errors import SyncError
from rltrain.models.forward import PackedModel
from rltrain.models.lora import PlainWeight, plain_weights
from rltrain.models.shard import PREFIX
from rltrain.workers.rollout.base import RolloutEngine, WeightPiece, fingerprint_of

# What is sent, what was received, and one weight put together from it: a third of a bucket each.
_PARTS_OF_A_BUCKET = 3
# Its name since torch 2.13.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class SyncReport:
    """One sync: its wall clock, the bytes that the engine of this rank took over, and how far it is from the trainer.

    canary_gap: mean |log pi_engine - log pi_trainer| over the tokens of a fixed text, both at temperature 1.
    """

    seconds: float
    gigabytes: float
    canary_gap: float


class WeightSync:
    """Knows which policy version the engine holds, and brings it the current one.

    The version is the number of optimizer updates since the start of the process; an engine that lost its weights has none.
    canary: token ids of a fixed text; score: its log-probs by the trainer, at temperature 1, as `RolloutEngine.score`; gap_limit:
    SyncError where engine and trainer differ by more on it.
    """

    def __init__(
        self,
        policy: PackedModel,
        engine: RolloutEngine,
        device: Device,
        dtype: torch.dtype,
        *,
        bucket_bytes: int,
        gap_limit: float,
        canary: Sequence[int],
        score: Callable[[Sequence[int]], Tensor],
    ) -> None:
        self.version: int | None = None
        self._policy = policy
        self._engine = engine
        self._device = device
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._gap_limit = gap_limit
        self._canary = list(canary)
        self._score = score

    def run(self, version: int, free_training_copy: Callable[[], object]) -> SyncReport:
        """Bring the weights over and wake the engine in stages, then compare it with the trainer (a collective).

        Order: the trainer's answer to the canary, memory for weights, weights, training copy off the device, all ranks, memory for
        the cache. Raises SyncError where the engine does not hold what was sent, or answers otherwise than the trainer.
        """
        if version == self.version:
            raise SyncError(
                f"the rollout engine has the weights of update {version} already; a second sync is a mistake"
            )
        started = time.perf_counter()
        expected = self._score(self._canary)
        self._engine.wake_weights()
        counted = _Counted(pieces(self._policy, self._bucket_bytes, self._dtype))
        held = self._engine.load_weights(iter(counted))
        sent = fingerprint(self._policy, self._dtype)
        if held != sent:
            raise SyncError(
                f"the weights that the rollout engine holds after the sync of update {version} are not those of the trainer "
                f"(fingerprint {held:#x} instead of {sent:#x}, rank {dist.get_rank()})."
            )
        free_training_copy()
        dist.barrier()
        self._engine.wake_cache()
        self.version = version
        gap = self._compare(expected, version)
        self._device.synchronize()
        return SyncReport(time.perf_counter() - started, counted.num_bytes / 2**30, gap)

    def lost(self) -> None:
        """The engine has given its weights back."""
        self.version = None

    def _compare(self, expected: Tensor, version: int) -> float:
        found = self._engine.score(self._canary).float().cpu()
        gap = float((found - expected).abs().mean())
        if not gap <= self._gap_limit:
            raise SyncError(
                f"after the sync of update {version} the rollout engine answers otherwise than the trainer: mean |log-prob gap| "
                f"{gap:.3g} on a fixed text, limit {self._gap_limit:.3g} (actor_rollout_ref.rollout.log_prob_gap_limit). It does "
                "not generate with the current weights, or computes with them in another way."
            )
        return gap


class _Counted:
    """Counts the bytes that pass."""

    def __init__(self, source: Iterator[WeightPiece]) -> None:
        self.num_bytes = 0
        self._source = source

    def __iter__(self) -> Iterator[WeightPiece]:
        for piece in self._source:
            self.num_bytes += piece.values.nbytes
            yield piece


@dataclass(frozen=True)
class _Slab:
    """Rows ``first`` to ``last`` of this rank's shard of one weight, and the same of every other rank's."""

    name: str
    parameter: DTensor
    first: int
    last: int

    @property
    def row_size(self) -> int:
        return math.prod(self.parameter.shape[1:])  # a row of a DTensor itself would be gathered

    @property
    def num_elements(self) -> int:
        return (self.last - self.first) * self.row_size


def pieces(packed: PackedModel, bucket_bytes: int, dtype: torch.dtype) -> Iterator[WeightPiece]:
    """Every weight and buffer of the model (a collective: all ranks run the whole iterator), tied weights once, LoRA merged.

    At most ``bucket_bytes`` are taken beside the model (more only for a single row that is larger). Weights that are on this
    rank as a whole, in ``dtype`` already, are handed out themselves.
    """
    sharded: list[PlainWeight] = []
    for weight in plain_weights(packed):
        if isinstance(weight.parameter, DTensor) and _num_shards(weight.parameter) > 1:
            sharded.append(weight)
            continue
        merged = weight.merged()
        local = merged.to_local() if isinstance(merged, DTensor) else merged
        lasting = local.dtype == dtype and weight.layer is None
        yield from _unsharded(weight.name.removeprefix(PREFIX), local, bucket_bytes, dtype, lasting)
    if sharded:
        # Merged one by one, as the buckets fill.
        weights = ((weight.name.removeprefix(PREFIX), _sharded(weight.merged())) for weight in sharded)
        num_shards = _num_shards(_sharded(sharded[0].parameter))
        for bucket in _buckets(weights, num_shards, bucket_bytes, dtype):
            yield from _gathered(bucket, dtype)
    persistent = packed.state_dict().keys() if any(True for _ in packed.buffers()) else ()
    for name, buffer in packed.named_buffers():
        short = name.removeprefix(PREFIX)
        yield WeightPiece(
            short, tuple(buffer.shape), 0, buffer, lasting=True, buffer=True, persistent=name in persistent
        )


def _unsharded(
    name: str, weight: Tensor, bucket_bytes: int, dtype: torch.dtype, lasting: bool
) -> Iterator[WeightPiece]:
    shape = tuple(weight.shape)
    if lasting:
        yield WeightPiece(name, shape, 0, weight, lasting=True)
        return
    row_bytes = weight[0].numel() * dtype.itemsize if weight.dim() else dtype.itemsize
    rows = max(1, bucket_bytes // _PARTS_OF_A_BUCKET // row_bytes)
    for start in range(0, max(len(weight), 1), rows):
        yield WeightPiece(name, shape, start, weight[start : start + rows].to(dtype))


def _buckets(
    weights: Iterable[tuple[str, DTensor]], num_shards: int, bucket_bytes: int, dtype: torch.dtype
) -> Iterator[list[_Slab]]:
    """Slabs that fit together into the share of a bucket that one gather may receive."""
    room = bucket_bytes // _PARTS_OF_A_BUCKET // dtype.itemsize // num_shards
    bucket: list[_Slab] = []
    filled = 0
    for name, parameter in weights:
        rows = _rows_per_rank(parameter)
        whole = _Slab(name, parameter, 0, rows)
        step = rows if whole.num_elements <= room else max(1, room // whole.row_size)
        for first in range(0, rows, step):
            slab = _Slab(name, parameter, first, min(first + step, rows))
            if bucket and filled + slab.num_elements > room:
                yield bucket
                bucket, filled = [], 0
            bucket.append(slab)
            filled += slab.num_elements
    yield bucket


def _gathered(bucket: Sequence[_Slab], dtype: torch.dtype) -> Iterator[WeightPiece]:
    """One all-gather, then the weights in it one by one."""
    group, ranks = _shard_group(bucket[0].parameter), _num_shards(bucket[0].parameter)
    size = sum(slab.num_elements for slab in bucket)
    device = bucket[0].parameter.to_local().device
    send = torch.zeros(size, dtype=dtype, device=device)
    offset = 0
    for slab in bucket:
        mine = slab.parameter.to_local().detach()[slab.first : slab.last]
        send[offset : offset + mine.numel()].copy_(mine.reshape(-1))
        offset += slab.num_elements
    received = torch.empty(ranks, size, dtype=dtype, device=device)
    _ALL_GATHER(received.view(-1), send, group=group)
    del send
    offset = 0
    for slab in bucket:
        shape = tuple(slab.parameter.shape)
        rows = _rows_per_rank(slab.parameter)
        parts = []
        for rank in range(ranks):
            # torch.chunk's cut: the last ranks may have fewer rows, or none.
            have = min(max(shape[0] - rank * rows - slab.first, 0), slab.last - slab.first)
            part = received[rank, offset : offset + have * slab.row_size].view(have, *shape[1:])
            parts.append((rank * rows + slab.first, part))
        offset += slab.num_elements
        if slab.last - slab.first == rows:
            yield WeightPiece(slab.name, shape, 0, torch.cat([part for _, part in parts]))
        else:
            yield from (WeightPiece(slab.name, shape, start, part) for start, part in parts if len(part))


def fingerprint(packed: PackedModel, dtype: torch.dtype) -> int:
    """A number that depends on every bit of every weight, on its row and its name (a collective; equal on all ranks)."""
    total = 0
    for weight in plain_weights(packed):
        local, start = weight.merged(), 0
        if isinstance(local, DTensor):
            sharded = _num_shards(local) > 1
            start = _shard_rank(local) * _rows_per_rank(local) if sharded else 0
            local = local.to_local()
        total += fingerprint_of(weight.name.removeprefix(PREFIX), start, local, dtype)
    box = torch.tensor([_signed(total)], dtype=torch.int64)
    first = next(packed.parameters())
    if isinstance(first, DTensor) and _num_shards(first) > 1:
        dist.all_reduce(box, group=_shard_group(first))
    return int(box) % 2**64


def _signed(number: int) -> int:
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number


def _sharded(weight: Tensor) -> DTensor:
    assert isinstance(weight, DTensor)
    return weight


def _shard_dim(parameter: DTensor) -> int:
    """Place of the sharding dimension in the mesh: the last one (before it, with HSDP, the replicas)."""
    return parameter.device_mesh.ndim - 1


def _num_shards(parameter: DTensor) -> int:
    return parameter.device_mesh.size(_shard_dim(parameter))


def _shard_rank(parameter: DTensor) -> int:
    return parameter.device_mesh.get_local_rank(_shard_dim(parameter))


def _shard_group(parameter: DTensor) -> dist.ProcessGroup:
    return parameter.device_mesh.get_group(_shard_dim(parameter))


def _rows_per_rank(parameter: DTensor) -> int:
    """Rows of the first rank's shard."""
    return -(-parameter.shape[0] // _num_shards(parameter))
