"""Training state on disk: sharded, and re-shardable on load (torch.distributed.checkpoint).

It contains only tensors, under Hugging Face names: the trained weights (with LoRA only the adapters); the moments and
step count of AdamW per weight; the correction biases of routers, which change without an optimizer; and in float16 the
loss scale. An untrained vision tower equals the model's and is not saved. Therefore a run that trains its tower refuses
a checkpoint of a run that does not, and vice versa.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from rltrain.common.errors import CheckpointError
from rltrain.models.files.safe import SafeReader, read_metadata
from rltrain.models.forward import PackedModel
from rltrain.models.layerwise_adamw import LayerwiseAdamW
from rltrain.models.optim import LossScale
from rltrain.models.routing import correction_biases
from rltrain.models.vision import tower
from rltrain.models.weights.names import huggingface_name

_SCALE = "loss_scale"


def save_training_state(packed: PackedModel, optimizer: torch.optim.Optimizer | None, folder: str) -> None:
    """Write this rank's shards (a collective)."""
    dcp.save(training_state(packed, optimizer), checkpoint_id=folder)


def load_training_state(
    packed: PackedModel,
    optimizer: torch.optim.Optimizer | None,
    folder: str,
    loss_scale: LossScale | None = None,
    *,
    texts_alone: bool = False,
) -> list[str]:
    """Load the weights into this run, and with ``optimizer`` also its state and ``loss_scale`` (a collective).

    Without ``optimizer``, the checkpoint may lack the vision tower. The tower then keeps the weights of the model's
    folder, which a note reports. Another note reports a missing loss scale. texts_alone: the run does not train and its
    prompts have no images, so a tower in the folder is ignored. Raises CheckpointError for incompatible folders.
    """
    for parameter in packed.parameters():
        if optimizer is not None and parameter.requires_grad:
            moments(optimizer, parameter)  # DCP loads into existing tensors
    state, saved = training_state(packed, optimizer, loss_scale), read_metadata(folder).state_dict_metadata
    for name in _biases(packed):
        # If the folder has no biases, the biases of model.path are kept.
        if f"model.{name}" not in saved:
            del state["model"][name]
    notes = [] if texts_alone else _settle_tower(packed, state, folder)
    if _SCALE in state and _SCALE not in saved:
        del state[_SCALE]
        notes.append(f"{folder} has no loss scale, as its run did not compute in float16: the initial one is used")
    try:
        dcp.load(state, storage_reader=SafeReader(folder))
    except dcp.api.CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise CheckpointError(f"{folder} cannot be loaded into this model: {causes}") from error
    return notes


def _settle_tower(packed: PackedModel, state: dict[str, Any], folder: str) -> list[str]:
    """Remove tower weights that ``folder`` does not have from ``state``, or raise CheckpointError."""
    inside = {id(parameter) for part in tower(packed.model) for parameter in part.parameters()}
    names = {
        huggingface_name(name)
        for name, parameter in packed.named_parameters()
        if id(parameter) in inside and ".lora_" not in name
    }
    saved = read_metadata(folder).state_dict_metadata
    missing = {name for name in state["model"] if f"model.{name}" not in saved}
    if not names & state["model"].keys() and any(f"model.{name}" in saved for name in names):
        raise CheckpointError(
            f"{folder} was saved by a run that trained the vision tower, and this run does not: its prompts have no "
            "images, or actor_rollout_ref.actor.freeze_vision_tower=True, or it trains adapters. A new run starts from "
            f"all of these weights with actor_rollout_ref.model.path={Path(folder).with_name('huggingface')}."
        )
    if not missing or missing != names & state["model"].keys():  # DCP reports other missing weights
        return []
    if "optimizer" in state:
        raise CheckpointError(
            f"{folder} was saved by a run that did not train the vision tower, and this run does. Set "
            "actor_rollout_ref.actor.freeze_vision_tower=True, or start a new run from these weights with "
            "trainer.resume_mode=resume_path trainer.resume_weights_only=True, under another trainer.default_local_dir."
        )
    for name in missing:
        del state["model"][name]
    return [f"{folder} has no vision tower, because its run did not train it: the tower is loaded from model.path"]


def training_state(
    packed: PackedModel, optimizer: torch.optim.Optimizer | None, loss_scale: LossScale | None = None
) -> dict[str, Any]:
    """Return the state to save or load: the tensors themselves, not copies, because loading writes into them. Missing
    moments are zeros."""
    parameters = saved_weights(packed)
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    state: dict[str, Any] = {"model": weights | _biases(packed)}
    if optimizer is not None:
        # Newly created moments are not stored in the optimizer, because during a save a weight and its moments may be
        # on different devices.
        state["optimizer"] = {name: moments(optimizer, parameter, keep=False) for name, parameter in parameters.items()}
        if loss_scale:
            state[_SCALE] = loss_scale.state
    return state


def weights_by_name(packed: PackedModel) -> dict[str, nn.Parameter]:
    """Return all weights of a model by their Hugging Face names."""
    return {huggingface_name(name): parameter for name, parameter in packed.named_parameters()}


def _biases(packed: PackedModel) -> dict[str, torch.Tensor]:
    return {huggingface_name(name): bias for name, bias in correction_biases(packed).items()}


def saved_weights(packed: PackedModel) -> dict[str, nn.Parameter]:
    """Return the trained weights by Hugging Face name, or all weights of a frozen model, which may be changed too."""
    weights = weights_by_name(packed)
    return {name: weight for name, weight in weights.items() if weight.requires_grad} or weights


def moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, *, keep: bool = True) -> dict[str, torch.Tensor]:
    """Return AdamW's state of one weight.

    Before the first step it is created here: as AdamW would create it, or on the host if ``keep`` is False.
    """
    dtype = None
    if isinstance(optimizer, LayerwiseAdamW):
        dtype = optimizer.dtype
        if keep:
            optimizer.allocate()
    if state := optimizer.state[parameter]:
        return state
    device = parameter.device if keep else torch.device("cpu")
    # The fused kernel reads the step count on the weight's device.
    state["step"] = torch.zeros((), dtype=torch.float32, device=device if optimizer.defaults["fused"] else "cpu")
    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter, device=device, dtype=dtype) for _ in range(2))
    return state if keep else optimizer.state.pop(parameter)
