"""Optimizer steps of one model: `forward_backward` over micro-batches, then `optim_step`.

An optimizer step with a NaN destroys all weights, and a single rank that skips a step diverges from the others. So loss
and gradient norm are checked before each step, and either all ranks make it or none does. In float16 the loss is scaled
(`LossScale`). If a gradient overflows although the loss is finite, the scale is lowered; this is an error only if it
cannot be lowered further.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rltrain.algorithms.losses import LossShare
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


class OptimStep(NamedTuple):
    """Result of one optimizer step."""

    share: LossShare
    """This rank's part of the loss, detached."""
    grad_norm: float
    """Norm of the gradient over all ranks, before clipping."""
    made: bool
    """False if the weights did not change: there was no loss token, or one of the next two fields is True."""
    skipped: bool
    """Loss or gradient was not finite."""
    overflowed: bool
    """The gradient overflowed float16, and the loss scale was lowered."""


class Updater:
    """Optimizer of ``model``. ``num_steps``: number of optimizer steps so far.

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
        offload = fsdp.optimizer_offload and not device.is_cpu
        self.optimizer = make_optimizer(model, optim, device, offload=offload)
        self.loss_scale = LossScale() if resolve_dtype(fsdp.compute_dtype, device) == torch.float16 else None
        self.num_steps = 0
        self._role = role
        self._model = model
        self._clip_grad = optim.clip_grad
        self._reduces_once = fsdp.use_no_sync_for_gradient_accumulation
        self._trainer = trainer
        self._device = device

    def begin(self, learning_rate: float) -> None:
        """Prepare model and optimizer for the optimizer steps of one update."""
        self._model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def forward_backward(self, micros: Sequence[Batch], loss: Callable[[Batch], LossShare]) -> LossShare:
        """Add the gradients of a mini-batch, one micro-batch after another. Returns the detached sum of their losses.

        Every rank has a micro-batch, possibly without samples (`empty_loss`).
        """
        shares = []
        scale = self.loss_scale.value if self.loss_scale else 1.0
        for number, micro in enumerate(micros, start=1):
            if self._reduces_once:
                assert isinstance(self._model, FSDPModule)
                self._model.set_requires_gradient_sync(number == len(micros))
            share = loss(micro)
            # FSDP averages gradients over the ranks, but the denominators are already global, so undo the average.
            # Ranks that share sequences have the same loss, and each has a part of its gradient. Ranks that share
            # matrices have the whole gradient.
            (share.loss * (dist.get_world_size() / self._model.tensor_size * scale)).backward()
            shares.append(replace(share, loss=share.loss.detach()))
        return reduce(add, shares)

    def optim_step(
        self, share: LossShare, micros: Sequence[Batch], mini: MiniBatch, terms: Mapping[str, float] | None = None
    ) -> OptimStep:
        """Clip the gradients and update the weights, on all ranks or on none.

        share: result of `forward_backward` for ``micros``, the micro-batches of ``mini``. terms: additional inputs of
        the loss, written to disk if it is not finite. Raises NonFiniteError.
        """
        if self.loss_scale:
            self.loss_scale.unscale(self._model.parameters())
        norm = clip_gradients(self._model.parameters(), self._clip_grad)
        health = torch.stack([share.loss, norm.to(share.loss.device)])
        own_norm = health[1].clone()
        # One non-finite number makes the sum non-finite on every rank, so all ranks take the same branch below.
        dist.all_reduce(health)
        # The host waits for the device only here, once per optimizer step.
        *sums, grad_norm = torch.cat([health, own_norm[None]]).tolist()
        finite = all(map(math.isfinite, sums))
        # Without a loss token there is no gradient, but momentum and weight decay would still change the weights.
        made, overflowed = finite and bool(mini.denominators.tokens), False
        if made:
            self.optimizer.step()
            self.num_steps += 1
            if self.loss_scale:
                self.loss_scale.made()
        elif not finite and self.loss_scale and math.isfinite(sums[0]) and self.loss_scale.lower():
            overflowed = True
        elif not finite and self._trainer.on_nonfinite == "stop":
            self._report_nonfinite(micros, mini, terms or {}, share)
        self.optimizer.zero_grad(set_to_none=True)
        return OptimStep(share, grad_norm, made, not finite and not overflowed, overflowed)

    def numbers(self, steps: Sequence[OptimStep]) -> UpdateNumbers:
        """Return the results of the optimizer steps of an update."""
        self._device.synchronize()
        return UpdateNumbers(
            grad_norm=np.array([step.grad_norm for step in steps]),
            skipped=np.array([float(step.skipped) for step in steps]),
            overflowed=np.array([float(step.overflowed) for step in steps]),
            loss_scale=self.loss_scale.value if self.loss_scale else None,
            shares=_stacked([_parts(step.share) for step in steps]),
            token_sums=_stacked([step.share.token_sums for step in steps]),
        )

    def _report_nonfinite(
        self, micros: Sequence[Batch], mini: MiniBatch, terms: Mapping[str, float], share: LossShare
    ) -> None:
        parts = ", ".join(f"{name}={float(value):.4g}" for name, value in _parts(share).items())
        sentence = write_incident(Path(self._trainer.default_local_dir), self._role, micros, mini, terms, self._model)
        raise NonFiniteError(
            f"{self._role}: loss or gradient is not finite on some rank (rank {dist.get_rank()} has {parts}); no "
            f"optimizer step was made. {self._of_float16()}{sentence} To skip such batches, set "
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


def split_mini_batches(batch: Batch, mini_batches: Sequence[MiniBatch]) -> Iterator[tuple[MiniBatch, list[Batch]]]:
    """Yield each mini-batch with its micro-batches. ``batch`` holds their samples in order of the micro-batches."""
    micros = iter(batch.split([size for mini in mini_batches for size in mini.micro_sizes]))
    for mini in mini_batches:
        yield mini, [next(micros) for _ in mini.micro_sizes]


def empty_loss(*outputs: Tensor | None) -> LossShare:
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
    non_empty = [(name, step) for name in names for step in steps]
    tensors = [step[name] for name, step in non_empty if name in step]
    # The values are stacked into one tensor, so that a single copy from the device suffices.
    values = iter(torch.stack(tensors).tolist() if tensors else ())
    numbers = [next(values) if name in step else 0.0 for name, step in non_empty]
    return {name: np.array(numbers[i * len(steps) : (i + 1) * len(steps)]) for i, name in enumerate(names)}
