"""FSDP2 sharding of a model over the ranks, and loading of each shard's rows from the checkpoint."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from rltrain.common.device import COLLECTIVE_TIMEOUT, Device
from rltrain.models.attention import packed as attention
from rltrain.models.attention.ring import ring_of
from rltrain.models.attention.ulysses import sequence_group
from rltrain.models.experts import keep_experts
from rltrain.models.files.entries import NoEntries, files_of, read_entries
from rltrain.models.forward import PackedModel, PolicyModel, ScalarModel
from rltrain.models.kernels import fuse, kernels_of
from rltrain.models.load import (
    decoder_layers,
    empty_model,
    read_score_head,
    read_weights,
    recompute_activations,
    without_dropout,
)
from rltrain.models.tensor_parallel import split
from rltrain.models.vision import tower
from rltrain.models.weights.finite import check_finite
from rltrain.models.weights.key_mapping import KeyMapping
from rltrain.models.weights.lora import add_adapters, first_adapters
from rltrain.models.weights.missing_keys import notes, refuse
from rltrain.models.weights.names import huggingface_name
from rltrain.models.weights.slices import NotSliceable, SlicedCheckpoint
from rltrain.models.weights.spec import ModelSpec

Model = TypeVar("Model", PolicyModel, ScalarModel)
log = logging.getLogger(__name__)
# Bytes per broadcast when rank 0 reads for all.
_PIECE_BYTES = 256 << 20


class Mesh(NamedTuple):
    """Meshes over which a model is sharded."""

    weights: DeviceMesh
    """[shards of a copy], or [copies, shards of a copy] (HSDP)."""
    experts: DeviceMesh | None
    """Mesh of the experts over the same ranks: [copies (HSDP), ranks that share an expert, ranks among which experts
    are distributed]. None: experts are not distributed.
    """
    tensor: DeviceMesh | None = None
    """[ranks that share each matrix]. ``weights`` are then the ranks that have the same parts."""
    all_shards: DeviceMesh | None = None
    """With ``tensor``, the mesh of weights that it does not split: like ``weights``, over all ranks."""


def make_mesh(
    device: Device, fsdp_size: int = -1, expert_parallel_size: int = 1, tensor_parallel_size: int = 1
) -> Mesh:
    """Return a mesh: all ranks in one shard group, or replicas of shard groups of size ``fsdp_size`` (HSDP).

    expert_parallel_size: number of neighbouring ranks that share the experts of each layer. tensor_parallel_size:
    number of neighbouring ranks that share each matrix.
    """
    world = dist.get_world_size()
    ranks = torch.arange(world)
    copies = ["replicate"] if 0 < fsdp_size < world else []
    if copies:
        ranks = ranks.view(-1, fsdp_size)
    mesh = Mesh(_mesh(device, ranks, [*copies, "shard"]), None)
    if expert_parallel_size > 1:
        grid = ranks.view(*ranks.shape[:-1], -1, expert_parallel_size)
        mesh = mesh._replace(experts=_mesh(device, grid, [*copies, "shard", "expert"]))
    if tensor_parallel_size > 1:
        grid = ranks.view(*ranks.shape[:-1], -1, tensor_parallel_size)
        parts = _mesh(device, grid, [*copies, "shard", "tensor"])
        equal = (*copies, "shard")
        mesh = Mesh(parts[equal], mesh.experts, parts["tensor"], mesh.weights)
    return mesh


def _mesh(device: Device, ranks: Tensor, names: list[str]) -> DeviceMesh:
    if len(names) == 1:
        return init_device_mesh(device.kind, (len(ranks),), mesh_dim_names=tuple(names))
    # Create the groups here: groups that a mesh creates itself have a timeout of minutes, much shorter than a call's
    # deadline.
    groups = [
        dist.new_subgroups_by_enumeration(ranks.movedim(dim, -1).flatten(0, -2).tolist(), COLLECTIVE_TIMEOUT)[0]
        for dim in range(ranks.dim())
    ]
    return DeviceMesh.from_group(groups, device.kind, ranks, mesh_dim_names=tuple(names))


def empty_packed(kind: type[Model], spec: ModelSpec, config: PretrainedConfig) -> Model:
    """Build the packed model with empty adapters on the meta device, without memory, weights or process group.

    config: from ``spec.load_config``. Raises ConfigError for every unsupported model, so that a dry run detects it too.
    """
    attention.check_layers(config, spec.longest)
    model = _plain(kind, spec, without_dropout(config))
    decoder_layers(model)
    if how := spec.gradient_checkpointing:
        recompute_activations(model, spec.section, how, offload=spec.activation_offload)
    if spec.lora:
        add_adapters(model, spec.lora)
    if spec.tower != "trained":
        for part in tower(model):
            # With text-only prompts no gradient reaches the tower. It is frozen, so that it needs no optimizer state.
            part.requires_grad_(False)
    packed = kind(model)
    packed.sees = spec.tower != "rests"
    if spec.lora and isinstance(packed, ScalarModel):
        packed.score.to(spec.lora.dtype)
    return packed


def check_weight_files(kind: type[PackedModel], spec: ModelSpec, config: PretrainedConfig) -> list[str]:
    """Check the headers of the weight files. Returns notes. Raises ConfigError if one is missing or wrong.

    config: from ``spec.load_config``. Hub models are checked only if they are downloaded.
    """
    key = f"{spec.section}.path"
    if getattr(config, "quantization_config", None):
        return []
    try:
        entries = read_entries(spec.path)
    except NoEntries as error:
        return [f"{key}={spec.path}: not checked ({error})"] if Path(spec.path).is_dir() else []
    key_mapping = KeyMapping(entries.empty, _plain(kind, spec, without_dropout(config)))
    refuse(key, entries, key_mapping)
    return list(notes(key, entries, key_mapping))


def _plain(kind: type[PackedModel], spec: ModelSpec, config: PretrainedConfig) -> PreTrainedModel:
    attention.register()
    kinds = {"trust_remote_code": spec.trust_remote_code, "decoder_only": issubclass(kind, ScalarModel)}
    return empty_model(config, attention.NAME, spec.master_dtype, **kinds)


def sharded_model(kind: type[Model], spec: ModelSpec, device: Device) -> Model:
    """Load the model, one shard per rank. No rank holds a complete weight, except for files that cannot be sliced."""
    config = spec.load_config()
    packed = empty_packed(kind, spec, config)
    join_sequences(packed, spec, config)
    model = packed.model
    if kernels := kernels_of(device, spec.fused_kernels):
        fuse(model, kernels)
    if spec.compiled:
        _compile_layers(model)
    sizes = spec.fsdp.expert_parallel_size, spec.tensor_size
    spread(packed, spec, make_mesh(device, spec.fsdp.fsdp_size, *sizes))
    # The model was sharded on the meta device, so memory is allocated only for its shards.
    packed.to_empty(device=device.torch_device)
    # to_empty allocates separate memory for tied weights, so they are tied again.
    model.tie_weights()
    _load(packed, spec, config)
    return packed


def _compile_layers(model: PreTrainedModel) -> None:
    """Compile every block for any number of tokens, except attention and gated delta nets, which read the plan."""
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.packed_attention))
    for layer in decoder_layers(model):
        if net := getattr(layer, "linear_attn", None):
            net.forward = torch.compiler.disable(net.forward)
        # Compile only the forward, because FSDP's hooks must not be compiled.
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _load(packed: PackedModel, spec: ModelSpec, config: PretrainedConfig) -> None:
    weights = first_adapters(packed.model, spec.lora) if spec.lora else {}
    if isinstance(packed, ScalarModel):
        head = read_score_head(spec.path)
        # A new critic returns 0 for every state, because random values would add noise to the advantages.
        weights["score.weight"] = torch.zeros(packed.score.weight.shape) if head is None else head
    config = without_dropout(config)
    adapters = f"{spec.lora.path}'s adapter_model" if spec.lora else ""
    try:
        plain = _plain(type(packed), spec, config)
        checkpoint, why = SlicedCheckpoint(spec.path, plain, f"{spec.section}.path"), ""
    except NotSliceable as error:
        checkpoint, why = None, str(error)
    # All ranks use the same method, even if the files of one node differ.
    whole = torch.tensor(int(bool(why)))
    dist.all_reduce(whole, dist.ReduceOp.MAX)
    if checkpoint and not whole:
        _copy_rows(packed, weights, checkpoint)
    else:
        if dist.get_rank() == 0:
            why = why or "another rank finds no such files"
            log.warning("note: ranks cannot read slices of %s (%s): rank 0 reads it whole, for all", spec.path, why)
            kinds: Any = {"trust_remote_code": spec.trust_remote_code, "decoder_only": isinstance(packed, ScalarModel)}
            model = read_weights(spec.path, config, spec.master_dtype, **kinds)
            # Broadcast buffers too: `to_empty` also emptied buffers that are not in checkpoints, such as rotary
            # frequencies.
            weights |= dict([*model.named_parameters(), *model.named_buffers()]) | weights
        _hand_out(packed, weights if dist.get_rank() == 0 else None)

    def files(name: str) -> str:
        if ".lora_" in name:
            return adapters
        inside = checkpoint.files(name) if checkpoint and name not in weights else files_of(spec.path, fetch=True)
        return ", ".join(file.name for file in inside)

    check_finite(packed, spec.compute_dtype, f"{spec.section}.path={spec.path}", files)


@torch.no_grad()
def _copy_rows(packed: PackedModel, weights: dict[str, Tensor], checkpoint: SlicedCheckpoint) -> None:
    for name, parameter in packed.named_parameters():
        name, (rows, *others) = huggingface_name(name), _place_here(parameter)
        within = (slice(None), *others)
        if name in weights:
            values = weights[name][rows]
        else:
            values = checkpoint.rows(name, rows.start, rows.stop, parameter.dtype)
        local_shard(parameter).copy_(values[within])
    for name, buffer in packed.named_buffers():
        buffer.copy_(checkpoint.buffers[huggingface_name(name)])


def join_sequences(packed: PackedModel, spec: ModelSpec, config: PretrainedConfig) -> None:
    """Set the groups of ranks that share sequences in ``packed``. A collective. Raises ConfigError if the model cannot
    be split.
    """
    size, ring = spec.sequence_parallel_size, spec.ring_size
    packed.group = sequence_group(config, size, spec.ulysses_key, ring, spec.tensor_size)
    if ring > 1:
        packed.ring = ring_of(dist.group.WORLD, size // ring, ring)


def spread(packed: PackedModel, spec: ModelSpec, mesh: Mesh) -> None:
    """Shard the weights over ``mesh``, on any device."""
    precision = MixedPrecisionPolicy(param_dtype=spec.compute_dtype, reduce_dtype=torch.float32)
    held: dict[str, Any] = {"mp_policy": precision, "reshard_after_forward": spec.fsdp.reshard_after_forward}
    if mesh.experts:
        _spread_experts(packed, mesh, held)
    # Call `split` after the expert exchange is set up. It then wraps the exchange, so that only this rank's share of
    # the tokens is sent to the experts.
    shared = split(packed.model, mesh.tensor) if mesh.tensor else []
    packed.tensor_size = mesh.tensor.size() if mesh.tensor else 1
    for part in shared if not mesh.experts else ():
        group: Any = fully_shard(part, mesh=mesh.all_shards, **held)
        # Each rank has only the gradient of its share of the tokens, but the loss is scaled for whole gradients.
        # (`models.experts` divides gradients itself, because FSDP divides twice on a mesh of one rank.)
        group.set_gradient_divide_factor(dist.get_world_size() / packed.tensor_size)
        # Otherwise FSDP would reduce with a factor (PREMUL_SUM), which only NCCL supports.
        group.set_force_sum_reduction_for_comms(True)
    # A tower is not split by tensor parallelism, so it is sharded over all ranks.
    whole = {id(module) for part in tower(packed.model) for module in part.modules()} if mesh.tensor else set()
    # Layers are sharded first, so that the root gets the remaining parameters.
    for layer in decoder_layers(packed.model):
        fully_shard(layer, mesh=mesh.all_shards if id(layer) in whole else mesh.weights, **held)
    # Embedding and head stay gathered until the end of the backward pass, and in forward-only passes until `reshard`.
    # Otherwise they would be gathered twice per micro-batch.
    fully_shard(packed, mesh=mesh.weights, mp_policy=precision, reshard_after_forward=False)


def _spread_experts(packed: PackedModel, mesh: Mesh, held: dict[str, Any]) -> None:
    assert mesh.experts
    *others, _ = mesh.experts.mesh_dim_names or ()
    tensor_size = mesh.tensor.size() if mesh.tensor else 1
    for part in keep_experts(packed.model, mesh.experts["expert"], tensor_size):
        # Shard the rows within an expert instead of the experts, because there may be more ranks than experts.
        fully_shard(part, mesh=mesh.experts[tuple(others)], shard_placement_fn=lambda _: Shard(1), **held)


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, detached."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def like(tensor: Tensor, shard: Tensor) -> Tensor:
    """Return a tensor sharded like ``tensor``, with ``shard`` as this rank's part."""
    # Do not use `from_local`, which would move host tensors to the device.
    return DTensor(shard, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else shard


def reshard(packed: PackedModel) -> None:
    """Free gathered weights. Call it after forward-only passes, before shards are read or changed."""
    for module in packed.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def _hand_out(packed: PackedModel, source: dict[str, Tensor] | None) -> None:
    """Broadcast ``source`` from rank 0 into the shards, some rows at a time. It is None on other ranks."""
    for name, parameter in packed.named_parameters():
        shard, (rows, *others) = local_shard(parameter), _place_here(parameter)
        step = max(1, _PIECE_BYTES // max(math.prod(parameter.shape[1:]) * parameter.element_size(), 1))
        for at in range(0, parameter.shape[0], step):
            end = min(at + step, parameter.shape[0])
            piece = torch.empty(end - at, *parameter.shape[1:], dtype=parameter.dtype, device=shard.device)
            if source:
                piece.copy_(source[huggingface_name(name)][at:end])
            dist.broadcast(piece, src=0)
            first, last = max(at, rows.start), min(end, rows.stop)
            if first < last:
                within = (slice(first - at, last - at), *others)
                shard[first - rows.start : last - rows.start] = piece[within]
    for name, buffer in packed.named_buffers():
        if source:
            buffer.copy_(source[huggingface_name(name)])
        dist.broadcast(buffer, src=0)


def _place_here(parameter: nn.Parameter) -> list[slice]:
    """Return this rank's slice of each dimension of a weight."""
    assert isinstance(parameter, DTensor)
    sizes, starts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
