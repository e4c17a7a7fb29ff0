"""FSDP2: shard a model over the ranks, and fill the shards from one copy of the weights on rank 0."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PretrainedConfig, PreTrainedModel

from rltrain.device import Device
from rltrain.models import attention
from rltrain.models.forward import PackedModel, PolicyModel, ScalarModel
from rltrain.models.load import (
    decoder_layers,
    empty_model,
    read_score_head,
    read_weights,
    recompute_activations,
    without_dropout,
)
from rltrain.models.lora import add_adapters, first_adapters
from rltrain.models.spec import ModelSpec
from rltrain.models.ulysses import sequence_group
from rltrain.models.vision import tower
from rltrain.models.weights import huggingface_name

Model = TypeVar("Model", PolicyModel, ScalarModel)


def make_mesh(device: Device, fsdp_size: int = -1) -> DeviceMesh:
    """All ranks in one shard group, or (``fsdp_size`` given) replicas of shard groups of that size (HSDP)."""
    world = dist.get_world_size()
    if fsdp_size in (-1, 0) or fsdp_size >= world:
        return init_device_mesh(device.kind, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device.kind, (world // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))


def empty_packed(kind: type[Model], spec: ModelSpec, config: PretrainedConfig) -> Model:
    """The packed model with empty adapters, on the meta device: no memory, no weights, no process group.

    config: of ``spec.load_config``. Raises ConfigError for every model that cannot be trained here, so a dry run knows
    of it too.
    """
    attention.register()
    attention.check_layers(config, spec.longest)
    kinds = {"decoder_only": issubclass(kind, ScalarModel), "trust_remote_code": spec.trust_remote_code}
    model = empty_model(without_dropout(config), attention.NAME, spec.master_dtype, **kinds)
    decoder_layers(model)
    if spec.lora:
        add_adapters(model, spec.lora)
    if spec.tower != "trained":
        for part in tower(model):
            # Where prompts are texts no gradient reaches the tower anyway: frozen, it needs no optimizer state.
            part.requires_grad_(False)
    packed = kind(model)
    packed.sees = spec.tower != "rests"
    if spec.lora and isinstance(packed, ScalarModel):
        packed.score.to(spec.lora.dtype)
    return packed


def sharded_model(kind: type[Model], spec: ModelSpec, device: Device) -> Model:
    """The model, one shard per rank. Only rank 0 reads the weights, on the host; devices get them one by one."""
    config = spec.load_config()
    key = f"{spec.role}.ulysses_sequence_parallel_size"
    group = sequence_group(config, spec.sequence_parallel_size, key)
    packed = empty_packed(kind, spec, config)
    packed.group, model = group, packed.model
    # Memory that is never written costs nothing: this reserves address space, and fully_shard touches only the shard.
    packed.to_empty(device="cpu")
    # to_empty gives tied weights a memory each.
    model.tie_weights()
    if spec.gradient_checkpointing:
        recompute_activations(model)
    mesh = make_mesh(device, spec.fsdp.fsdp_size)
    precision = MixedPrecisionPolicy(param_dtype=spec.compute_dtype, reduce_dtype=torch.float32)
    # Layers first: the root then takes the parameters that no layer holds.
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=spec.fsdp.reshard_after_forward)
    # Embedding and head stay gathered from the forward to the end of the backward pass, and over forward-only passes
    # until `reshard`; otherwise they would be gathered twice per micro-batch.
    fully_shard(packed, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    source: dict[str, Tensor] | None = None
    if dist.get_rank() == 0:
        kinds = {"decoder_only": issubclass(kind, ScalarModel), "trust_remote_code": spec.trust_remote_code}
        plain: PreTrainedModel = read_weights(spec.path, without_dropout(config), spec.master_dtype, **kinds)
        # Buffers too: those that are in no checkpoint, such as rotary frequencies, were emptied with the model.
        source = dict([*plain.named_parameters(), *plain.named_buffers()])
        if spec.lora:
            source |= first_adapters(model, spec.lora)
        if isinstance(packed, ScalarModel):
            head = read_score_head(spec.path)
            # A new critic says 0 of every state; random weights would make advantages of noise.
            source["score.weight"] = torch.zeros(packed.score.weight.shape) if head is None else head
    _fill(packed, source, device)
    return packed


def reshard(packed: PackedModel) -> None:
    """Free gathered weights: to be called after forward-only passes, before anything looks at or changes the shards."""
    for module in packed.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _fill(packed: PackedModel, source: dict[str, Tensor] | None, device: Device) -> None:
    """Shard by shard from rank 0, which alone has ``source``."""
    with torch.no_grad():
        for name, parameter in packed.named_parameters():
            assert isinstance(parameter, DTensor)
            # distribute_tensor sends what rank 0 has; on the others only the shape counts.
            full = source[huggingface_name(name)] if source else torch.empty(parameter.shape)
            full = full.detach().to(device.torch_device, parameter.dtype)
            shard = distribute_tensor(full, parameter.device_mesh, parameter.placements)
            parameter.to_local().copy_(shard.to_local())
        for name, buffer in packed.named_buffers():
            if source:
                buffer.copy_(source[huggingface_name(name)])
            dist.broadcast(buffer, src=0)
