"""Gathered weights of a training model under their Hugging Face names, for export and weight sync.

Each rank has a part of every weight, names have prefixes of rltrain and peft, and LoRA stores adapters separately. One
generator handles all of this; for an engine that applies adapters itself, they stay separate. Small weights share the
all-gather of a bucket, because a gather per weight would wait for the network hundreds of times. A weight larger than
half a bucket has a separate gather. The peak memory beyond the model is one bucket and one weight.

For some families, transformers' names and layouts in memory differ from its checkpoints: for example, the experts of a
layer are one weight. Engines and folders need the names of checkpoints. `CheckpointNames` restores them one weight at a
time, with the conversion of save_pretrained, which adds a copy of the largest weight if its layout differs.

The ranks of a tensor-parallel vLLM get only parts of most weights after the first sync (`models.weights.partial`).
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion

from rltrain.models.tensor_layers import local
from rltrain.models.weights.lora import adapted_weights, lora_layers, merged, times_scale
from rltrain.models.weights.partial import Parts

# For a model with adapters: all weights with merged adapters, the weights without adapters, or adapters only.
Part = Literal["merged", "base", "adapters"]
_PREFIX = "model."  # name of the Hugging Face model in `PackedModel`
_BASE_LAYERS = re.compile(r"(\.base_layer)+\.")  # peft's infix in parameters of layers with adapters
ADAPTER = ".lora_"  # follows the layer's name in all names of adapters
# Bucket size of an export. A sync uses rollout.update_weights_bucket_megabytes.
_BUCKET_BYTES = 512 << 20
# The function was renamed in torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Weight(NamedTuple):
    """One gathered weight, adapter or buffer, on the device."""

    name: str
    values: Tensor
    """Read-only, because it may be the training weight itself. A `PartialWeight` if this rank needs only a part."""
    in_checkpoint: bool = True
    """False for a buffer that is computed from the configuration, such as rotary frequencies."""


def huggingface_name(name: str) -> str:
    """Return the name of a parameter or buffer of a `PackedModel` in the Hugging Face model without adapters.

    Names of adapters are kept.
    """
    name = name.removeprefix(_PREFIX)
    return name if ADAPTER in name else _BASE_LAYERS.sub(".", name)


class CheckpointNames:
    """Names and layouts of the weights of ``model`` in a checkpoint of save_pretrained."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        conversions: list[Any] | None = getattr(model, "_weight_conversions", None)
        if conversions is None:
            # Like save_pretrained for a model that was not loaded from a file: ambiguous conversions, such as a prefix
            # that some files lack, are skipped. Cached, because they would otherwise be computed for every weight.
            rules = get_model_conversion_mapping(model, add_legacy=False)
            conversions = [copy.deepcopy(each) for each in rules if type(each).__name__ != "PrefixChange"]
            _undo_turns(model, conversions)
            vars(model)["_weight_conversions"] = conversions
        # Since transformers 5.6, save_pretrained undoes conversions in reverse order.
        self._order: dict[str, Any] = (
            {"reverse": True} if "reverse" in inspect.signature(rename_source_key).parameters else {}
        )
        undone = [conversion.reverse_transform() for conversion in (conversions[::-1] if self._order else conversions)]
        self._renamings = [transform for transform in undone if isinstance(transform, WeightRenaming)]
        self._converters = [transform for transform in undone if isinstance(transform, WeightConverter)]

    def unit(self, name: str) -> str:
        """Return a key for grouping: weights in memory with the same key form one weight in a checkpoint."""
        return rename_source_key(name, self._renamings, self._converters, **self._order)[0]

    def renamed(self, name: str) -> str | None:
        """Return the checkpoint's name of a weight with the same layout in memory, or None if its layout differs."""
        name, converter = rename_source_key(name, self._renamings, self._converters, **self._order)
        return None if converter else name

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert complete units from names in memory to the weights of a checkpoint."""
        return revert_weight_conversion(self._model, dict(weights))


def _undo_turns(model: PreTrainedModel, conversions: Iterable[Any]) -> None:
    """Make shape-dependent transpositions of transformers reversible.

    transformers transposes some weights only if their shape does not match the model. The reverse conversion has the
    same check, finds a match, and would export them in the in-memory layout. Engines know only the layout of published
    files. Therefore weights are transposed back unless they are square, because a reader could not detect the layout of
    a square weight.
    """
    for conversion in conversions:
        for step in getattr(conversion, "operations", ()):
            if getattr(step, "check_dims", False):
                names = conversion.target_patterns
                turned = [weight for name, weight in model.named_parameters() if any(each in name for each in names)]
                step.check_dims = any(weight.shape[step.dim0] == weight.shape[step.dim1] for weight in turned)


def gathered_weights(
    packed: nn.Module,
    dtype: torch.dtype,
    bucket_bytes: int = _BUCKET_BYTES,
    names: CheckpointNames | None = None,
    part: Part = "merged",
    parts: Parts | None = None,
) -> Iterator[Weight]:
    """Yield every parameter in ``dtype``, then every buffer unchanged. A collective: every rank must exhaust it.

    The order is the same on all ranks. Tied weights appear once, under their first name. A complete weight in ``dtype``
    is not copied, unless its layout changes. names: names of a checkpoint, in which adapters are called
    LAYER.lora_A.weight and LAYER.lora_B.weight (the latter multiplied by their scale). None: names in memory. part:
    "adapters" has no buffers. parts: the parts of the weights that each rank needs, by names of a checkpoint.
    """
    # state_dict makes FSDP2 free gathered weights, so the parameters are shards from here on.
    in_checkpoint = packed.state_dict().keys()
    for bucket, units, partial in _buckets(packed, dtype, bucket_bytes, names, part, parts):
        if parts and partial:
            rows = [(name, local(weight), weight.shape) for name, weight in bucket]
            for name, values in parts.exchange(rows, dtype, _shard_group(bucket[0][1])):
                yield Weight(name, values)
            continue
        weights = _gathered(bucket, dtype)
        yield from _renamed(weights, units, names) if names and part != "adapters" else weights
    if part == "adapters":
        return
    for name, buffer in packed.named_buffers(remove_duplicate=False):
        weight = Weight(huggingface_name(name), buffer, name in in_checkpoint)
        yield from _renamed([weight], [1], names) if names and weight.in_checkpoint else [weight]


def _renamed(weights: Iterable[Weight], units: Iterable[int], names: CheckpointNames) -> Iterator[Weight]:
    """Convert weights in groups of the sizes ``units``."""
    left = iter(weights)
    for size in units:
        converted_weights = names({weight.name: weight.values for weight in islice(left, size)})
        while converted_weights:  # drops each reference before the next weight
            name = next(iter(converted_weights))
            yield Weight(name, converted_weights.pop(name))


Bucket = list[tuple[str, Tensor]]


def _buckets(
    packed: nn.Module,
    dtype: torch.dtype,
    most_bytes: int,
    names: CheckpointNames | None,
    part: Part,
    parts: Parts | None,
) -> Iterator[tuple[Bucket, list[int], bool]]:
    """Yield buckets of at most ``most_bytes`` (more only for a single larger unit), the number of weights in each unit,
    and whether they are exchanged in parts, under their names in a checkpoint."""
    layers = dict(lora_layers(packed)) if part == "adapters" else adapted_weights(packed)
    units: dict[str, list[tuple[str, Tensor]]] = {}
    for name, parameter in packed.named_parameters():
        if (ADAPTER in name) == (part == "adapters"):
            short = huggingface_name(name)
            key = names.unit(short) if names and part != "adapters" else short
            units.setdefault(key, []).append((name, parameter))
    bucket: Bucket = []
    sizes: list[int] = []
    filled = 0
    layout: tuple[bool, int, bool] | None = None
    candidates = exchangeable(packed, names) if parts and names else {}
    for unit in units.values():
        name, weight = unit[0]
        known = candidates.get(name)
        if parts and known and known in parts:
            size = parts.numel(known, weight.shape, _shard_group(weight))
        else:
            known = None
            # Half of a bucket holds the received weights, the other half this rank's share, which is sent.
            size = 2 * sum(max(_num_shards(weight) * _shard_size(weight), weight.numel()) for _, weight in unit)
        size *= dtype.itemsize
        found = (*_layout(weight), bool(known))
        if bucket and (filled + size > most_bytes or found != layout):
            yield bucket, sizes, bool(layout and layout[-1])
            bucket, sizes, filled = [], [], 0
        layout = found
        # Adapters are merged while the bucket is filled, so that merged copies never exceed a bucket.
        handed = [_handed_over(name, weight, layers, names, part) for name, weight in unit]
        bucket += [(known, weight) for _, weight in handed] if known else handed
        sizes.append(len(unit))
        filled += size
    if bucket:
        yield bucket, sizes, bool(layout and layout[-1])


def exchangeable(packed: nn.Module, names: CheckpointNames) -> dict[str, str]:
    """Return the weights that can be exchanged in parts: name in ``packed`` -> name in the checkpoint."""
    return {
        name: renamed
        for name, weight in packed.named_parameters()
        if ADAPTER not in name and weight.dim() and _num_shards(weight) > 1
        if not _is_of_rank(weight) and _tensor_dim(weight) is None
        if (renamed := names.renamed(huggingface_name(name)))
    }


def _handed_over(
    name: str, weight: Tensor, layers: Mapping[str, Any], names: CheckpointNames | None, part: Part
) -> tuple[str, Tensor]:
    """Return the new name of a sharded parameter, and the tensor to gather."""
    if part == "adapters" and names:
        path, _, kind = name.partition(ADAPTER)
        layer = names.unit(f"{huggingface_name(path)}.weight").removesuffix(".weight")
        return f"{layer}{ADAPTER}{kind[0]}.weight", times_scale(layers[path], weight) if kind[0] == "B" else weight
    if part == "merged" and name in layers:
        weight = merged(layers[name], weight)
    # A model in memory that gets base weights and adapters separately contains peft's layers, so peft's names are kept.
    return name.removeprefix(_PREFIX) if part == "base" and not names else huggingface_name(name), weight.detach()


def _gathered(bucket: Bucket, dtype: torch.dtype) -> Iterator[Weight]:
    first, ranks = bucket[0][1], _num_shards(bucket[0][1])
    if _is_of_rank(first):
        for name, weight in bucket:
            assert isinstance(weight, DTensor)
            cast: Any = weight.to(dtype)
            yield Weight(name, cast.full_tensor())
        return
    if ranks == 1:
        yield from _joined([(name, weight, local(weight).to(dtype)) for name, weight in bucket])
        return
    sizes = [_shard_size(weight) for _, weight in bucket]
    send = torch.zeros(sum(sizes), dtype=dtype, device=local(first).device)
    offset = 0
    for (_, weight), size in zip(bucket, sizes, strict=True):
        shard = local(weight).reshape(-1)
        send[offset : offset + len(shard)].copy_(shard)
        offset += size
    received = send.new_empty(ranks, len(send))
    all_gather(received.view(-1), send, group=_shard_group(first))
    del send
    parts = []
    for (name, weight), shards in zip(bucket, received.split(sizes, 1), strict=True):
        # Padding is at the end, because only the last shards can be shorter than the others. A single weight is
        # returned as a view.
        shape = _part_shape(weight)
        parts.append((name, weight, shards.reshape(-1)[: math.prod(shape)].view(shape)))
    yield from _joined(parts)


def _joined(parts: list[tuple[str, Tensor, Tensor]]) -> Iterator[Weight]:
    """Gather weights that tensor parallelism has cut, given (name, weight, this rank's part)."""
    cut = [part for _, weight, part in parts if _tensor_dim(weight) is not None]
    mesh = next((weight.device_mesh for _, weight, _ in parts if _tensor_dim(weight) is not None), None)  # type: ignore[attr-defined]
    received = torch.empty(0)
    if mesh is not None:
        send = torch.cat([part.reshape(-1) for part in cut])
        received = send.new_empty(mesh["tensor"].size(), len(send))
        all_gather(received.view(-1), send, group=mesh.get_group("tensor"))
        del send
    gathered = iter(received.split([part.numel() for part in cut], 1) if cut else ())
    for name, weight, part in parts:
        dim = _tensor_dim(weight)
        whole = part if dim is None else torch.cat([each.view(part.shape) for each in next(gathered)], dim)
        yield Weight(name, whole)


def _layout(weight: Tensor) -> tuple[bool, int]:
    """Return a key for bucketing: weights with the same key are gathered over the same ranks and may share a bucket."""
    return _is_of_rank(weight), _num_shards(weight)


def _is_of_rank(weight: Tensor) -> bool:
    """Return whether the weight belongs to experts that `models.experts` distributed, and is thus sharded in two
    directions."""
    return isinstance(weight, DTensor) and "expert" in (weight.device_mesh.mesh_dim_names or ())


def _tensor_dim(weight: Tensor) -> int | None:
    """Return the dimension in which tensor parallelism has cut the weight, or None."""
    if not isinstance(weight, DTensor) or "tensor" not in (weight.device_mesh.mesh_dim_names or ()):
        return None
    placement: Any = weight.placements[-1]
    return int(placement.dim)


def _part_shape(weight: Tensor) -> list[int]:
    """Return the shape of this rank's tensor-parallel part of a weight, before FSDP shards it."""
    shape = list(weight.shape)
    if isinstance(weight, DTensor) and (dim := _tensor_dim(weight)) is not None:
        shape[dim] //= weight.device_mesh.size(weight.device_mesh.ndim - 1)
    return shape


def _shard_dim(weight: DTensor) -> int:
    """Return the mesh dimension over which rows are sharded: the last one, not counting the dimension of tensor
    parallelism. With HSDP, the first dimension has the replicas."""
    return weight.device_mesh.ndim - (1 if _tensor_dim(weight) is None else 2)


def _shard_group(weight: Any) -> Any:
    """Return the process group over which the rows of a DTensor are sharded."""
    return weight.device_mesh.get_group(_shard_dim(weight))


def _num_shards(weight: Tensor) -> int:
    return weight.device_mesh.size(_shard_dim(weight)) if isinstance(weight, DTensor) else 1


def _shard_size(weight: Tensor) -> int:
    """Return the number of elements of the largest shard. FSDP2 shards like torch.chunk: full, one shorter, then empty
    ones."""
    rows, *others = _part_shape(weight) or [1]
    return -(-rows // _num_shards(weight)) * math.prod(others)
