"""The weights of a training model, whole and under their Hugging Face names: what export and weight sync iterate.

A rank holds a part of every weight, names carry a prefix of ours and one of peft, and LoRA keeps its adapters beside
the weights. One generator undoes all three. Small weights share the all-gather of a bucket, because a gather per weight
would wait for the network hundreds of times; a weight larger than half a bucket has a gather to itself. Beside the
model there are at most one bucket and one weight.

Left out: weights in parts. A large embedding would then need no memory of its own, but every engine loads whole
weights, so each would have to put the parts together again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rltrain.models.lora import lora_layers, merged

_PREFIX = "model."  # of `PackedModel`, which holds the Hugging Face model under this name
_BASE_LAYER = ".base_layer."  # peft puts it before the parameters of a layer that has adapters
# For an export; a sync has rollout.update_weights_bucket_megabytes.
_BUCKET_BYTES = 512 << 20
# Its name since torch 2.13.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Weight(NamedTuple):
    """One weight or buffer, whole and on the device.

    values: may be the training weight itself, so nobody may write into them. in_checkpoint: False for a buffer that is
    computed from the configuration, such as rotary frequencies.
    """

    name: str
    values: Tensor
    in_checkpoint: bool = True


def huggingface_name(name: str) -> str:
    """The name that a parameter or buffer of a `PackedModel` has in the Hugging Face model without adapters."""
    return name.removeprefix(_PREFIX).replace(_BASE_LAYER, ".")


def whole_weights(packed: nn.Module, dtype: torch.dtype, bucket_bytes: int = _BUCKET_BYTES) -> Iterator[Weight]:
    """Every parameter in ``dtype``, then every buffer as it is. A collective: every rank must exhaust the iterator.

    The order is the same on all ranks. Tied weights come once, under their first name; LoRA adapters come merged. A
    weight that this rank holds whole and in ``dtype`` is not copied.
    """
    # Asked for its state, FSDP2 frees the weights that a forward pass has gathered; the parameters are shards from here
    # on.
    in_checkpoint = packed.state_dict().keys()
    # Half a bucket is received; the other half is room for this rank's share of it, which is sent.
    for bucket in _buckets(packed, dtype, bucket_bytes // 2):
        yield from _gathered(bucket, dtype)
    for name, buffer in packed.named_buffers():
        yield Weight(huggingface_name(name), buffer, name in in_checkpoint)


def _buckets(packed: nn.Module, dtype: torch.dtype, most_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Weights that take at most ``most_bytes`` together, or a single one."""
    layers = {f"{name}{_BASE_LAYER}weight": layer for name, layer in lora_layers(packed)}
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, parameter in packed.named_parameters():
        if ".lora_" in name:
            continue
        size = _num_shards(parameter) * _shard_size(parameter) * dtype.itemsize
        if bucket and filled + size > most_bytes:
            yield bucket
            bucket, filled = [], 0
        # Merged while its bucket is filled, so that merged copies never take more than a bucket.
        weight = merged(layers[name], parameter) if name in layers else parameter
        bucket.append((huggingface_name(name), weight.detach()))
        filled += size
    if bucket:
        yield bucket


def _gathered(bucket: list[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[Weight]:
    # All weights of a model are sharded over one mesh, so the first speaks for its bucket.
    first, ranks = bucket[0][1], _num_shards(bucket[0][1])
    if ranks == 1:
        yield from (Weight(name, _local(weight).to(dtype)) for name, weight in bucket)
        return
    assert isinstance(first, DTensor)
    sizes = [_shard_size(weight) for _, weight in bucket]
    send = torch.zeros(sum(sizes), dtype=dtype, device=_local(first).device)
    offset = 0
    for (_, weight), size in zip(bucket, sizes, strict=True):
        shard = _local(weight).reshape(-1)
        send[offset : offset + len(shard)].copy_(shard)
        offset += size
    received = send.new_empty(ranks, len(send))
    _ALL_GATHER(received.view(-1), send, group=first.device_mesh.get_group(_shard_dim(first)))
    del send
    for (name, weight), shards in zip(bucket, received.split(sizes, 1), strict=True):
        # Padding is at the end, because only the last shards can be shorter. A single weight is a view: no second copy.
        yield Weight(name, shards.reshape(-1)[: weight.numel()].view(weight.shape))


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _shard_dim(weight: DTensor) -> int:
    """The mesh dimension over which rows are sharded: the last (with HSDP, the first one has the replicas)."""
    return weight.device_mesh.ndim - 1


def _num_shards(weight: Tensor) -> int:
    return weight.device_mesh.size(_shard_dim(weight)) if isinstance(weight, DTensor) else 1


def _shard_size(weight: Tensor) -> int:
    """Elements of the largest shard. FSDP2 cuts rows as torch.chunk: full shards, then a shorter one, then none."""
    return -(-weight.shape[0] // _num_shards(weight)) * math.prod(weight.shape[1:]) if weight.dim() else 1
