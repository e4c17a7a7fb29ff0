"""Expert balance over a whole mini-batch: an auxiliary loss, and router biases updated after each step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.expert_balance import balance_weights, bias_steps, load_of
from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch
from rltrain.common.device import Device
from rltrain.config.step_passes import StepPasses
from rltrain.models.forward import PolicyModel
from rltrain.models.routing import correction_biases, unseen
from rltrain.workers.inference_models import measure


class ExpertBalance:
    """Auxiliary loss on expert balance in the forward passes of ``policy`` (``actor.router_aux_loss_coef``), and
    updates of its routers' correction biases (``actor.router_bias_update_rate``).

    With routing replay the samples contain the routing that the loss needs. Otherwise an additional forward pass
    without gradients computes it.
    """

    def __init__(self, policy: PolicyModel, device: Device, passes: StepPasses, bias_update_rate: float) -> None:
        self._policy, self._device, self._replayed = policy, device, passes.router_replay != "disabled"
        self._weighs, self._rate = passes.balances_experts, bias_update_rate
        self._counted: Tensor | None = None
        """Tokens per expert in this update, before its newest mini-batch."""

    def begin(self, micros: Sequence[Batch]) -> None:
        """Prepare for a mini-batch, given all its micro-batches on this rank (a collective)."""
        if self._rate and (routing := self._policy.routing):
            self._counted = routing.load_so_far()
        if self._weighs:
            self._weigh(micros)

    @torch.no_grad()
    def move_biases(self) -> None:
        """Update the biases after an optimizer step, by the load of its mini-batch over all ranks (a collective)."""
        if not self._rate:
            return
        counted = self._policy.routing.load_so_far() if self._policy.routing else None
        if counted is None:
            raise unseen(f"actor_rollout_ref.actor.router_bias_update_rate={self._rate:g}")
        load = counted - (0 if self._counted is None else self._counted)
        dist.all_reduce(load)
        biases = correction_biases(self._policy.model).values()
        for bias, step in zip(biases, bias_steps(load, self._rate), strict=True):
            bias += step

    @torch.no_grad()
    def _weigh(self, micros: Sequence[Batch]) -> None:
        routing = self._policy.routing
        assert routing is not None  # otherwise the config was rejected
        load = torch.zeros(routing.num_layers, routing.num_experts, dtype=torch.long)
        if len(choices := self._choices(micros)):
            load = load_of(choices, routing.num_experts)
        # A rank without samples does not know this number; another rank does.
        chosen = torch.tensor([choices.shape[2] if len(choices) else 0])
        dist.all_reduce(chosen, dist.ReduceOp.MAX)
        dist.all_reduce(load)
        # Every rank that shares sequences or matrices counted the whole row.
        load //= self._policy.tensor_size * (self._policy.group.size() if self._policy.group else 1)
        self._policy.balance(balance_weights(load, int(chosen)).float().to(self._device.torch_device))

    def _choices(self, micros: Sequence[Batch]) -> Tensor:
        """Return the routing [tokens, layers, experts per token]. If there are no samples, it is empty and its shape is
        arbitrary."""
        if self._replayed:
            parts = [micro.ragged(c.ROUTED_EXPERTS).values for micro in micros if len(micro)]
            return torch.cat(parts) if parts else torch.zeros(0)
        # Empty micro-batches run too, because the forward pass is a collective.
        *_, choices = measure(self._policy, micros, self._device, 1.0, False, None, False, True)
        # `measure` leaves the model in eval mode, in which transformers does not recompute activations.
        self._policy.train()
        return choices
