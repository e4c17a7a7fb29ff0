"""Training state on disk: sharded, and re-shardable on load (torch.distributed.checkpoint).

Only tensors go in, under Hugging Face names: the trained weights (with LoRA the adapters alone), and per weight the
moments and the step count of AdamW.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from rltrain.errors import CheckpointError
from rltrain.models.forward import PackedModel
from rltrain.models.weights import huggingface_name


def save_training_state(packed: PackedModel, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Every rank writes its own shards (a collective)."""
    dcp.save(_state(packed, optimizer), checkpoint_id=folder)


def load_training_state(packed: PackedModel, optimizer: torch.optim.Optimizer | None, folder: str) -> None:
    """Read weights, and unless ``optimizer`` is None its state, into the shards of this run (a collective)."""
    try:
        dcp.load(_state(packed, optimizer), checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {failure}" for rank, failure in error.failures.items())
        raise CheckpointError(f"{folder} cannot be loaded into this model: {causes}") from error


def _state(packed: PackedModel, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The tensors themselves, not copies: loading writes into them."""
    trained = ((name, parameter) for name, parameter in packed.named_parameters() if parameter.requires_grad)
    parameters = {huggingface_name(name): parameter for name, parameter in trained}
    state: dict[str, Any] = {"model": {name: parameter.detach() for name, parameter in parameters.items()}}
    if optimizer is not None:
        state["optimizer"] = {name: _moments(optimizer, parameter) for name, parameter in parameters.items()}
    return state


def _moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """AdamW's state of one weight.

    Before the first step it is made here as AdamW would make it, so that it can be loaded.
    """
    state = optimizer.state[parameter]
    # DCP loads into tensors that are there, and AdamW makes its state only in its first step.
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return state
