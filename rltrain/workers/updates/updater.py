"""Optimizer steps of one model: accumulate gradients over micro-batches, clip, check for finite values, step.

A step with a NaN destroys all weights, and a rank that alone skips a step diverges from the others. So loss and
gradient norm are checked before each step, and either all ranks take it or none does. In float16 the loss is scaled
(`LossScale`). If a gradient overflows although the loss is finite, the scale is lowered; that is not an error as long
as it can be lowered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rltrain.algorithms.losses import LossShare, Measured
from rltrain.algorithms.moments import Moments
from rltrain.common.columns.batch import Batch
from rltrain.common.device import Device, resolve_dtype
from rltrain.common.errors import NonFiniteError
from rltrain.config.schema.model import FSDPConfig, OptimConfig
from rltrain.config.schema.trainer import TrainerConfig
from rltrain.models.forward import PackedModel
from rltrain.models.optim import LossScale, clip_gradients, make_optimizer
from rltrain.workers.diagnostics.incidents import write_incident
from rltrain.workers.interface.results import Array, UpdateNumbers
from rltrain.workers.interface.tasks import MiniBatch

LossFunction = Callable[[Batch, MiniBatch], LossShare]
Preparation = Callable[[Sequence[Batch], MiniBatch], None]
Measurement = Callable[[Sequence[Measured]], dict[str, Moments]]
FollowUp = Callable[[], None]


class _Step(NamedTuple):
    share: LossShare
    grad_norm: float
    skipped: bool
    overflowed: bool


class Updater:
    """Optimizer of ``model``. ``num_steps`` counts the optimizer steps that were made.

    ``loss_scale``: None unless forward and backward run in float16.
    """

    def __init__(
        self,
        role: str,
        model: PackedModel,
        optim: OptimConfig,
        fsdp: FSDPConfig,
        trainer: TrainerConfig,
        device: Device,
    ) -> None:
        self.optimizer = make_optimizer(model.parameters(), optim, device)
        self.loss_scale = LossScale() if resolve_dtype(fsdp.compute_dtype, device) == torch.float16 else None
        self.num_steps = 0
        self._role = role
        self._model = model
        self._clip_grad = optim.clip_grad
        self._reduces_once = fsdp.use_no_sync_for_gradient_accumulation
        self._trainer = trainer
        self._device = device

    def run(
        self,
        batch: Batch,
        mini_batches: Sequence[MiniBatch],
        learning_rate: float,
        loss: LossFunction,
        prepare: Preparation | None = None,
        measure: Measurement | None = None,
        follow_up: FollowUp | None = None,
        terms: Mapping[str, float] | None = None,
    ) -> UpdateNumbers:
        """Run one optimizer step per mini-batch. ``batch`` holds their samples in order of the micro-batches.

        ``prepare`` gets all micro-batches of a mini-batch before its first backward pass. ``measure`` gets the data
        that the losses of the first mini-batch collected. ``follow_up`` runs after each optimizer step. ``terms``:
        further inputs of the loss, for an incident.
        """
        self._model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        micros = iter(batch.split([size for mini in mini_batches for size in mini.micro_sizes]))
        steps = []
        for mini in mini_batches:
            own_micros = [next(micros) for _ in mini.micro_sizes]
            if prepare:
                prepare(own_micros, mini)
            steps.append(self._step(own_micros, mini, loss, follow_up, terms or {}))
        self._device.synchronize()
        shares = [step.share for step in steps]
        return UpdateNumbers(
            grad_norm=np.array([step.grad_norm for step in steps]),
            skipped=np.array([float(step.skipped) for step in steps]),
            overflowed=np.array([float(step.overflowed) for step in steps]),
            loss_scale=self.loss_scale.value if self.loss_scale else None,
            shares=_stacked([_parts(share) for share in shares]),
            token_sums=_stacked([share.token_sums for share in shares]),
            measured=measure(shares[0].measured) if measure and shares else {},
        )

    def _step(
        self,
        micros: Sequence[Batch],
        mini: MiniBatch,
        loss: LossFunction,
        follow_up: FollowUp | None,
        terms: Mapping[str, float],
    ) -> _Step:
        total: LossShare | None = None
        scale = self.loss_scale.value if self.loss_scale else 1.0
        for number, micro in enumerate(micros, start=1):
            if self._reduces_once:
                assert isinstance(self._model, FSDPModule)
                self._model.set_requires_gradient_sync(number == len(micros))
            share = loss(micro, mini)
            # FSDP averages gradients over the ranks, but the denominators are global already: undo the average. Ranks
            # that share sequences have the same loss, and each holds a part of its gradient.
            (share.loss * (dist.get_world_size() * scale)).backward()
            share = replace(share, loss=share.loss.detach())
            total = share if total is None else total + share
        assert total is not None  # every rank has a micro-batch, possibly without samples
        if self.loss_scale:
            self.loss_scale.unscale(self._model.parameters())
        norm = clip_gradients(self._model.parameters(), self._clip_grad)
        health = torch.stack([total.loss, norm.to(total.loss.device)])
        own_norm = health[1].clone()
        # One non-finite number makes the sum non-finite on every rank, so all ranks take the same branch below.
        dist.all_reduce(health)
        # The only place where the host waits for the device: once per optimizer step.
        *sums, grad_norm = torch.cat([health, own_norm[None]]).tolist()
        finite, overflowed = all(map(math.isfinite, sums)), False
        if finite:
            # Without a loss token there is no gradient, but momentum and weight decay would still change the weights.
            if mini.denominators.tokens:
                self.optimizer.step()
                self.num_steps += 1
                if self.loss_scale:
                    self.loss_scale.made()
                if follow_up:
                    follow_up()
        elif self.loss_scale and math.isfinite(sums[0]) and self.loss_scale.lower():
            overflowed = True
        elif self._trainer.on_nonfinite == "stop":
            self._report_nonfinite(micros, mini, terms, total)
        self.optimizer.zero_grad(set_to_none=True)
        return _Step(total, grad_norm, not finite and not overflowed, overflowed)

    def _report_nonfinite(
        self, micros: Sequence[Batch], mini: MiniBatch, terms: Mapping[str, float], share: LossShare
    ) -> None:
        parts = ", ".join(f"{name}={float(value):.4g}" for name, value in _parts(share).items())
        sentence = write_incident(Path(self._trainer.default_local_dir), self._role, micros, mini, terms, self._model)
        raise NonFiniteError(
            f"{self._role}: loss or gradient is not finite on some rank (rank {dist.get_rank()} has {parts}); no "
            f"optimizer step was made. {self._of_float16()}{sentence} To go on past such batches set "
            "trainer.on_nonfinite=skip."
        )

    def _of_float16(self) -> str:
        if self.loss_scale is None:
            return ""
        if self.loss_scale.value <= LossScale.LOWEST:
            return (
                "Its gradients overflow float16 although the loss scale was halved, step after step, down to 1: "
                "compute in bfloat16 or float32 (fsdp_config.compute_dtype). "
            )
        return "In float16 a number beyond 65,504 may be the cause, which bfloat16 and float32 hold. "


def idle(*outputs: Tensor | None) -> LossShare:
    """Return the loss of a micro-batch without samples: 0, with a gradient of 0 for every parameter.

    outputs: every output that enters the loss of a micro-batch with samples. The order of collectives in a backward
    pass depends on the graph, so a rank whose loss lacks an output would deadlock the others.
    """
    return LossShare(torch.stack([output.sum() for output in outputs if output is not None]).sum())


def _parts(share: LossShare) -> dict[str, Tensor]:
    return {"loss": share.loss, **share.shares}


def _stacked(steps: Sequence[dict[str, Tensor]]) -> dict[str, Array]:
    """Stack the values per name: one entry per step; 0 if a step without samples lacks the name."""
    names = dict.fromkeys(name for step in steps for name in step)
    having = [(name, step) for name in names for step in steps]
    tensors = [step[name] for name, step in having if name in step]
    # As one tensor, so that they are copied from the device at once.
    values = iter(torch.stack(tensors).tolist() if tensors else ())
    numbers = [next(values) if name in step else 0.0 for name, step in having]
    return {name: np.array(numbers[i * len(steps) : (i + 1) * len(steps)]) for i, name in enumerate(names)}
