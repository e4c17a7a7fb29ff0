"""Models of a rank: loading, passes without gradients, frozen policies, and full reference distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rltrain.algorithms.distillation import Divergence
from rltrain.algorithms.moments import Moments
from rltrain.common.columns.batch import Batch
from rltrain.common.device import Device
from rltrain.config.passes import PASSES, Role, passes_of, updates_of
from rltrain.config.step_passes import StepPasses
from rltrain.models.attention.packing import PackedInputs, pack, per_policy_token
from rltrain.models.forward import PackedModel, PolicyModel, final_logits
from rltrain.models.head import REVERSE_KL, ReferenceStates
from rltrain.models.weights.lora import adapters_off
from rltrain.models.weights.shard import reshard, sharded_model
from rltrain.models.weights.spec import Specs
from rltrain.workers.interface.results import PassNumbers
from rltrain.workers.interface.roles import InferenceModels
from rltrain.workers.state.offload_manager import OffloadManager


def load_role(role: Role, specs: Specs, passes: StepPasses, offloader: OffloadManager) -> Any:
    """Load the model of ``role`` (a collective). Freeze it if the role has no updates."""
    kind, spec = specs[role]
    model = sharded_model(kind, spec, offloader.device)
    if not updates_of(role):
        model.requires_grad_(False).eval()
    offloader.add_model(role, model, *passes.needs(role), offload=spec.rests_on_host)
    return model


@torch.no_grad()
def measure(model: PackedModel, micros: Sequence[Batch], device: Device, *arguments: Any) -> list[Tensor]:
    """Run ``model`` without gradients. Returns its outputs for all policy tokens, on the host: values, or log-probs and
    others."""
    model.eval()
    return _on_host(model, [model(pack(micro, device.torch_device), *arguments) for micro in micros])


@torch.no_grad()
def measure_known(model: PolicyModel, micros: Sequence[Batch], device: Device, temperature: float) -> Tensor:
    """Run `measure` on a model whose vocabulary may lack tokens of the policy. These tokens get log-prob NaN; as
    context they are replaced by the model's last token."""
    model.eval()
    rows, outputs = model.model.config.get_text_config().vocab_size, []
    for micro in micros:
        inputs = pack(micro, device.torch_device)
        known = replace(inputs, tokens=inputs.tokens.clamp(max=rows - 1), labels=inputs.labels.clamp(max=rows - 1))
        log_probs = model(known, temperature).log_probs
        outputs.append(log_probs.masked_fill(inputs.labels >= rows, torch.nan))
    return _on_host(model, outputs)[0]


def _on_host(model: PackedModel, outputs: Sequence[Any]) -> list[Tensor]:
    reshard(model)
    parts = [(output,) if isinstance(output, Tensor) else output for output in outputs]
    # Outputs are copied once at the end, so that the host does not wait for the device between micro-batches.
    return [torch.cat(kind).cpu() for kind in zip(*parts, strict=True) if kind[0] is not None]


class InferenceWorker(InferenceModels):
    """Frozen policies of a rank, by role in ``models``. ``models`` excludes the reference of an actor with adapters,
    and a judge, which generates text and runs no pass over the samples.
    """

    def __init__(self, specs: Specs, passes: StepPasses, offloader: OffloadManager, temperature: float) -> None:
        self._offloader, self._temperature = offloader, temperature
        self.models: dict[Role, PolicyModel] = {
            role: load_role(role, specs, passes, offloader)
            for role, (kind, _) in specs.items()
            if kind is PolicyModel and passes_of(role) and not updates_of(role)
        }

    def log_probs(self, batch: Batch, task: tuple[str, str, Sequence[int]]) -> tuple[Batch, PassNumbers]:
        """Compute log pi(response) with the policy of a pass. task: pass, output column, micro-batch sizes."""
        name, column, micro_sizes = task
        self._offloader.enter_phase(name)
        model, micros = self.models[PASSES[name].role], batch.split(micro_sizes)
        log_probs = measure_known(model, micros, self._offloader.device, self._temperature)
        known = Moments.of(log_probs[~log_probs.isnan()])
        return Batch({column: per_policy_token(log_probs, batch)}), PassNumbers({}, {name: known})


class ReferenceDistribution:
    """Full distribution of ``model``, without adapters, during the forward pass of a policy on the same samples.

    The hidden states of a micro-batch are computed just before, and the logits chunk by chunk along with the policy's.
    No logits are stored or sent. The cost is one forward pass.
    """

    def __init__(self, model: PolicyModel, divergence: Divergence = REVERSE_KL) -> None:
        self._model, self._divergence = model, divergence

    def states(self, inputs: PackedInputs) -> ReferenceStates:
        """Compute the hidden states for the comparison in `models.head`. Call `free` afterwards."""
        # The model uses its own router, even if the policy replays another routing.
        with torch.no_grad(), adapters_off(self._model):
            hidden = self._model(replace(inputs, experts=None), states_only=True)
        # The head stays gathered until `free`: it is used outside of its forward pass, and again when the backward pass
        # recomputes logits.
        self._model.unshard()  # type: ignore[operator]
        return ReferenceStates(hidden, self._logits, self._divergence)

    def free(self) -> None:
        """Reshard the gathered head, which nothing else frees."""
        reshard(self._model)

    def _logits(self, states: Tensor, temperature: float) -> Tensor:
        with adapters_off(self._model):
            return final_logits(self._model.model, states, temperature)
