"""Weight sync to tensor-parallel engines: each rank receives only the part of each weight that its engine copies.

Each rank of an engine with T tensor-parallel ranks copies 1/T of most weights. vLLM's loaders decide which part, per
family, so the first load observes them: it gets complete weights as `PartialWeight`, which records the parts that are
read. Later loads get a `PartialWeight` again, with the complete shape but only the values of that part. A rank then
receives about 1/T of the bytes, and a bucket holds T times as many weights.

Always complete on every rank: weights whose layout in memory differs from the checkpoint's (fused experts), weights of
distributed experts, weights that are not sharded or that tensor parallelism has cut, adapters and buffers.

A gather in a ring sends each node one copy of the model. Here each rank fetches its part, so a node of D devices
fetches D / T copies. Therefore parts are used only within one node, or if an engine occupies a node (`parts_of`).
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from rltrain.common.errors import SyncError

Box = tuple[tuple[int, int], ...]
"""Part of a weight: first index and end in each dimension."""
Shards = Sequence[tuple[str, Tensor, torch.Size]]
"""(name, this rank's rows, shape of the weight)"""


class Record:
    """Parts of weights that an engine has copied, by name; empty parts of weights that it has not.

    num_ranks: tensor-parallel ranks of the engine.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.boxes: dict[str, Box] = {}
        self.complete = False
        """True after the first load."""

    def observed(self, name: str, values: Tensor) -> Tensor:
        """Return a complete weight that records which parts of it are read."""
        if torch.is_inference_mode_enabled():  # tensors of this class cannot be sliced in it
            return values
        self.boxes.setdefault(name, ((0, 0),) * values.dim())
        return PartialWeight.make(name, values, _all_of(values.shape), values.shape, self)

    def add(self, name: str, box: Box) -> None:
        """Enlarge the part of a weight by ``box``."""
        known = self.boxes[name]
        if _size(known) and known != box:
            box = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(known, box, strict=True))
        self.boxes[name] = box


class _Held(NamedTuple):
    name: str
    values: Tensor
    box: Box
    """Part of the weight that ``values`` holds."""
    shape: torch.Size
    record: Record | None


class PartialWeight(Tensor):
    """A weight, or a view of it, of which this rank holds only a part.

    Shape and strides are those of the complete weight, so loaders handle it like any tensor. Slicing and reshaping
    return a `PartialWeight`. Every other operation reads the values of the view, and raises SyncError if this rank does
    not hold them.
    """

    # The default would turn results of operations, such as the parameters written by `copy_`, into this class.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _on_meta: Tensor
    """Shape, strides and offset of the view, as a view of a contiguous weight on the meta device."""
    held: _Held

    @classmethod
    def make(
        cls, name: str, values: Tensor, box: Box, shape: torch.Size, record: Record | None = None
    ) -> PartialWeight:
        """Return the weight of ``shape`` with the ``values`` of ``box``."""
        layout = torch.empty(shape, dtype=values.dtype, device="meta")
        return cls._view(_Held(name, values, box, shape, record), layout)

    @classmethod
    def _view(cls, held: _Held, layout: Tensor) -> PartialWeight:
        made: PartialWeight = Tensor._make_wrapper_subclass(
            cls,
            layout.shape,
            strides=layout.stride(),
            storage_offset=layout.storage_offset(),
            dtype=held.values.dtype,
            device=held.values.device,
        )
        made.held, made._on_meta = held, layout
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.is_view:
            held = next(each for each in tree_leaves(args) if isinstance(each, cls)).held
            views = func(*tree_map_only(cls, lambda weight: weight._on_meta, args), **(kwargs or {}))
            if all(view.dtype == held.values.dtype for view in tree_leaves(views)):
                return tree_map_only(Tensor, lambda layout: cls._view(held, layout), views)
        return func(*tree_map_only(cls, cls._read, args), **(kwargs or {}))

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes that this rank holds of the weight."""
        return self.held.values.nbytes

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartialWeight({self.held.name}, box={self.held.box}, shape={tuple(self.held.shape)})"

    def _read(self) -> Tensor:
        """Return the values of this view."""
        name, values, box, shape, record = self.held
        if not self._on_meta.numel():
            return values.new_empty(self._on_meta.shape)
        part = _box_of(self._on_meta, shape)
        if record:
            record.add(name, part.box if part else _all_of(shape))
        if not part and box == _all_of(shape):
            values, view = values.contiguous(), self._on_meta
            return values.as_strided(view.shape, view.stride(), values.storage_offset() + view.storage_offset())
        if not part or any(first < a or end > b for (first, end), (a, b) in zip(part.box, box, strict=True)):
            raise SyncError(
                f"the rollout engine copies another part of {name} than at its first load, so this rank does not have "
                "its values. This is a bug of the weight sync; actor_rollout_ref.rollout.tensor_model_parallel_size=1 "
                "does not use parts."
            )
        offset = sum(
            (first - start) * stride
            for (first, _), (start, _), stride in zip(part.box, box, values.stride(), strict=True)
        )
        strides = [0 if dim is None else values.stride(dim) for dim in part.dims]
        return values.as_strided(self._on_meta.shape, strides, values.storage_offset() + offset)


class _Part(NamedTuple):
    box: Box
    dims: list[int | None]
    """For each dimension of the view, the dimension of the weight; None if its size is 1."""


def _box_of(view: Tensor, shape: torch.Size) -> _Part | None:
    """Return the part of a contiguous weight of ``shape`` that ``view`` (not empty) shows, or None if it is not one box
    whose dimensions are dimensions of the weight."""
    starts, offset = [], int(view.storage_offset())
    weight_strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for stride in weight_strides:
        start, offset = divmod(offset, stride)
        starts.append(start)
    dims: list[int | None] = []
    sizes = [1] * len(shape)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        fits = (dim for dim, other in enumerate(weight_strides) if other == stride and starts[dim] + size <= shape[dim])
        dim = next((dim for dim in fits if dim not in dims), None) if size > 1 else None
        if dim is None and size > 1:
            return None
        dims.append(dim)
        if dim is not None:
            sizes[dim] = size
    return _Part(tuple((start, start + size) for start, size in zip(starts, sizes, strict=True)), dims)


class _Plan(NamedTuple):
    """Exchange of one weight."""

    sent: list[Box]
    """Part of this rank's rows for each distinct set of boxes."""
    received: list[int]
    """Number of elements from each rank of the group."""
    most: int
    """Maximum number of elements that a rank sends plus receives."""


class Parts:
    """Parts of the weights that the ranks of the default group need.

    by_rank: the boxes of each rank, with the same names. Equal sets of boxes, of different engines, are stored once.
    """

    def __init__(self, by_rank: Sequence[Mapping[str, Box]]) -> None:
        keys = [tuple(boxes.items()) for boxes in by_rank]
        distinct = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        # For each rank, the index of its set in `_boxes`: the rank's place in its engine.
        self._member = [distinct[key] for key in keys]
        self._boxes = [dict(key) for key in distinct]
        self._plans: dict[str, _Plan] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._boxes[0]

    def numel(self, name: str, shape: Sequence[int], group: Any) -> int:
        """Return the maximum number of elements that a rank of ``group`` sends plus receives for a weight."""
        return self._plan(name, shape, group).most

    def _plan(self, name: str, shape: Sequence[int], group: Any) -> _Plan:
        if name not in self._plans:
            me = dist.get_rank(group)
            members = [self._member[rank] for rank in dist.get_process_group_ranks(group)]
            num, boxes, times = len(members), [each[name] for each in self._boxes], Counter(members)
            cuts = [[_rows_in(box, shape[0], num, rank) for box in boxes] for rank in range(num)]
            sent = [sum(times[member] * _size(cut) for member, cut in enumerate(of_rank)) for of_rank in cuts]
            received = [_size(of_rank[members[me]]) for of_rank in cuts]
            self._plans[name] = _Plan(cuts[me], received, max(sent) + max(map(_size, boxes)))
        return self._plans[name]

    def exchange(self, weights: Shards, dtype: torch.dtype, group: Any) -> Iterator[tuple[str, PartialWeight]]:
        """Yield weights with this rank's part in ``dtype``. A collective of ``group``, over which rows are sharded."""
        me, members = dist.get_rank(group), [self._member[rank] for rank in dist.get_process_group_ranks(group)]
        plans = [self._plan(name, shape, group) for name, _, shape in weights]
        splits = [[plan.received[source] for plan in plans] for source in range(len(members))]
        received = [sum(split) for split in splits]
        send, sent = _shares(weights, plans, members, me, dtype)
        receive = send.new_empty(sum(received))
        dist.all_to_all_single(receive, send, received, sent, group=group)
        del send
        by_rank = [each.split(split) for each, split in zip(receive.split(received), splits, strict=True)]
        for number, (name, _, shape) in enumerate(weights):
            # The rows of rank 0 come first, and each rank sent complete rows of the part.
            found = [each[number] for each in by_rank if each[number].numel()]
            values = found[0] if len(found) == 1 else torch.cat(found) if found else receive[:0]
            box = self._boxes[members[me]][name]
            yield name, PartialWeight.make(name, values.view([end - first for first, end in box]), box, shape)


def parts_of(boxes: Mapping[str, Box], num_ranks: int, node: str | None = None) -> Parts | None:
    """Return the parts of all ranks, or None if they would increase the traffic between nodes. A collective.

    boxes: of this rank, with the same names on every rank. num_ranks: tensor-parallel ranks of an engine. node:
    name of this rank's node (None: its host name).
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (node or socket.gethostname(), dict(boxes)))
    nodes = Counter(node for node, _ in found)
    if len(nodes) > 1 and num_ranks < max(nodes.values()):
        return None
    return Parts([each for _, each in found])


def _shares(
    weights: Shards, plans: Sequence[_Plan], members: Sequence[int], me: int, dtype: torch.dtype
) -> tuple[Tensor, list[int]]:
    """Return what this rank sends to the ranks of its group, and the number of elements for each of them."""
    sizes = {member: [_size(plan.sent[member]) for plan in plans] for member in members}
    sent = [sum(sizes[member]) for member in members]
    send = torch.empty(sum(sent), dtype=dtype, device=weights[0][1].device)
    done: dict[int, Tensor] = {}
    for member, share in zip(members, send.split(sent), strict=True):
        if member in done:  # the same place in another engine
            share.copy_(done[member])
            continue
        done[member] = share
        for piece, plan, (_, rows, shape) in zip(share.split(sizes[member]), plans, weights, strict=True):
            _copy(piece, rows, plan.sent[member], _shard(shape[0], len(members), me)[0])
    return send, sent


def _copy(piece: Tensor, rows: Tensor, box: Box, start: int) -> None:
    """Copy ``box`` of a weight into the flat ``piece``. rows: the rows of the weight from ``start``."""
    (first, end), *others = box
    within = [slice(first - start, end - start)] + [slice(*other) for other in others]
    part = rows[tuple(within)]
    piece.view(part.shape).copy_(part)


def _shard(rows: int, num: int, rank: int) -> tuple[int, int]:
    """Return first row and end of a rank's shard. FSDP2 shards like torch.chunk."""
    most = -(-rows // num)
    return min(rows, rank * most), min(rows, (rank + 1) * most)


def _rows_in(box: Box, rows: int, num: int, rank: int) -> Box:
    """Return the intersection of ``box`` with a rank's shard."""
    (first, end), *others = box
    start, stop = _shard(rows, num, rank)
    first = min(max(first, start), stop)
    return ((first, max(first, min(end, stop))), *others)


def _all_of(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def _size(box: Box) -> int:
    return math.prod(end - first for first, end in box)
