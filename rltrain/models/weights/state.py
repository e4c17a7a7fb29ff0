"""Training state on disk: sharded, and re-shardable on load (torch.distributed.checkpoint).

Only tensors go in, under Hugging Face names: the trained weights (with LoRA the adapters alone), and per weight the
moments and the step count of AdamW; the correction biases of routers, which move without an optimizer; in float16 also
the scale of the loss. A vision tower that is not trained is that
of the model, so it is not written; a run that trains its tower and one that does not can therefore not go on from each
other without a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from rltrain.base.errors import CheckpointError
from rltrain.models.files.safe import SafeReader, read_metadata
from rltrain.models.forward import PackedModel
from rltrain.models.optim import LossScale
from rltrain.models.routing import correction_biases
from rltrain.models.vision import tower
from rltrain.models.weights.names import huggingface_name

_SCALE = "loss_scale"


def save_training_state(packed: PackedModel, optimizer: torch.optim.Optimizer | None, folder: str) -> None:
    """Every rank writes its own shards (a collective)."""
    dcp.save(training_state(packed, optimizer), checkpoint_id=folder)


def load_training_state(
    packed: PackedModel,
    optimizer: torch.optim.Optimizer | None,
    folder: str,
    loss_scale: LossScale | None = None,
    *,
    texts_alone: bool = False,
) -> list[str]:
    """Read weights, and unless ``optimizer`` is None its state and ``loss_scale``, into this run (a collective).

    Weights alone may come from a run that did not train its vision tower: the tower then stays as the model's folder
    has it, as a returned note says; another one is of a run that did not compute in float16. texts_alone: nothing
    learns and nothing is seen, so a tower that was trained may stay in the folder. Raises CheckpointError for what does
    not fit.
    """
    for parameter in packed.parameters():
        if optimizer is not None and parameter.requires_grad:
            moments(optimizer, parameter)  # DCP loads into tensors that are there
    state, saved = training_state(packed, optimizer, loss_scale), read_metadata(folder).state_dict_metadata
    for name in _biases(packed):
        # Of a folder without them nobody has moved them: they are those of model.path.
        if f"model.{name}" not in saved:
            del state["model"][name]
    notes = [] if texts_alone else _settle_tower(packed, state, folder)
    if _SCALE in state and _SCALE not in saved:
        del state[_SCALE]
        notes.append(f"{folder} has no loss scale, because its run did not compute in float16: it starts anew")
    try:
        dcp.load(state, storage_reader=SafeReader(folder))
    except dcp.api.CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise CheckpointError(f"{folder} cannot be loaded into this model: {causes}") from error
    return notes


def _settle_tower(packed: PackedModel, state: dict[str, Any], folder: str) -> list[str]:
    """Take the weights of a tower that ``folder`` does not have out of ``state``, or refuse the folder."""
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
    if not missing or missing != names & state["model"].keys():  # what else is missing is told by the load
        return []
    if "optimizer" in state:
        raise CheckpointError(
            f"{folder} was saved by a run that did not train the vision tower, and this run does. Set "
            "actor_rollout_ref.actor.freeze_vision_tower=True, or start a new run from these weights with "
            "trainer.resume_mode=resume_path trainer.resume_weights_only=True, under another trainer.default_local_dir."
        )
    for name in missing:
        del state["model"][name]
    return [f"{folder} has no vision tower, because its run did not train it: it starts as model.path has it"]


def training_state(
    packed: PackedModel, optimizer: torch.optim.Optimizer | None, loss_scale: LossScale | None = None
) -> dict[str, Any]:
    """The tensors themselves, not copies: loading writes into them. Moments of which there are none yet are zeros."""
    parameters = saved_weights(packed)
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    state: dict[str, Any] = {"model": weights | _biases(packed)}
    if optimizer is not None:
        # Not kept: a save may find a weight and its moments to come on different devices.
        state["optimizer"] = {name: moments(optimizer, parameter, keep=False) for name, parameter in parameters.items()}
        if loss_scale:
            state[_SCALE] = loss_scale.state
    return state


def weights_by_name(packed: PackedModel) -> dict[str, nn.Parameter]:
    """All weights of a model by their Hugging Face names."""
    return {huggingface_name(name): parameter for name, parameter in packed.named_parameters()}


def _biases(packed: PackedModel) -> dict[str, torch.Tensor]:
    return {huggingface_name(name): bias for name, bias in correction_biases(packed).items()}


def saved_weights(packed: PackedModel) -> dict[str, nn.Parameter]:
    """By Hugging Face name the weights that learn; all of a model of which nothing learns: they may be moved all the
    same."""
    weights = weights_by_name(packed)
    return {name: weight for name, weight in weights.items() if weight.requires_grad} or weights


def moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, *, keep: bool = True) -> dict[str, torch.Tensor]:
    """AdamW's state of one weight.

    Before the first step it is made here: as AdamW would make it, or where it is not to be kept, on the host.
    """
    if state := optimizer.state[parameter]:
        return state
    device = parameter.device if keep else torch.device("cpu")
    # One kernel for all of a step reads the count where the weight is.
    state["step"] = torch.zeros((), dtype=torch.float32, device=device if optimizer.defaults["fused"] else "cpu")
    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter, device=device) for _ in range(2))
    return state if keep else optimizer.state.pop(parameter)
