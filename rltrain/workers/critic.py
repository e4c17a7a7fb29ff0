"""Critic: V(prompt, response up to a token) of every response token, trained on the returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rltrain.algorithms.aggregation import loss_mask, token_weights
from rltrain.algorithms.losses import LossShare, aggregate, make_loss_share, value_loss
from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch
from rltrain.config.schema.declarations import TOKEN_MEAN
from rltrain.config.schema.model import CriticConfig
from rltrain.config.schema.trainer import TrainerConfig
from rltrain.config.step_passes import StepPasses
from rltrain.models.attention.packing import pack, per_policy_token
from rltrain.models.weights.spec import Specs
from rltrain.models.weights.state import load_training_state
from rltrain.runtime.samples import take_fetch_seconds
from rltrain.workers.inference_models import load_role, measure
from rltrain.workers.interface.results import PassNumbers, UpdateNumbers
from rltrain.workers.interface.roles import Critic
from rltrain.workers.interface.tasks import MiniBatch
from rltrain.workers.state.offload_manager import OffloadManager
from rltrain.workers.state.saving import SavesState, StateWriter
from rltrain.workers.updates.updater import Updater, empty_loss, split_mini_batches


class CriticWorker(SavesState, Critic):
    """Shard of the critic. Every method is called on all ranks."""

    def __init__(
        self,
        cfg: CriticConfig,
        trainer: TrainerConfig,
        specs: Specs,
        passes: StepPasses,
        offloader: OffloadManager,
    ) -> None:
        self._cfg = cfg
        self.offloader = offloader
        self._device = offloader.device
        self.model = load_role("critic", specs, passes, offloader)
        fsdp = cfg.model.fsdp_config
        self.updater = Updater("critic", self.model, cfg.optim, fsdp, trainer, self._device)
        self._writer = StateWriter(self.model, self.updater.optimizer, self.updater.loss_scale, self._device)
        offloader.add_optimizer(self.updater.optimizer, offload=fsdp.optimizer_offload)

    def values(self, batch: Batch, micro_sizes: Sequence[int]) -> tuple[Batch, PassNumbers]:
        """Compute V of the state before each response token."""
        self.offloader.enter_phase("values")
        (values,) = measure(self.model, batch.split(micro_sizes), self._device)
        return Batch({c.VALUES: per_policy_token(values, batch)}), PassNumbers()

    def update(self, batch: Batch, mini_batches: Sequence[MiniBatch], learning_rate: float) -> UpdateNumbers:
        """Run one optimizer step per mini-batch."""
        self.offloader.enter_phase("update_critic")
        steps = []
        self.updater.begin(learning_rate)
        for mini, micros in split_mini_batches(batch, mini_batches):
            share = self.updater.forward_backward(micros, partial(self._loss, mini=mini))
            steps.append(self.updater.optim_step(share, micros, mini))
        return replace(self.updater.numbers(steps), maxima=self.offloader.memory_gb() | take_fetch_seconds())

    def _loss(self, micro: Batch, mini: MiniBatch) -> LossShare:
        device = self._device.torch_device
        values = self.model(pack(micro, device))
        if not len(micro):
            return empty_loss(values)
        columns = {name: micro[name] for name in (c.VALUES, c.RETURNS, c.LOSS_MASK) if name in micro}
        micro = Batch(columns).to(device)
        # The old values are from the values pass, not from the current weights: the clip keeps the critic close to
        # them.
        old, returns = micro.ragged(c.VALUES), micro.ragged(c.RETURNS).values
        mask = loss_mask(micro, old)
        losses, statistics = value_loss(values, old.values, returns, self._cfg.cliprange_value)
        loss = aggregate(losses, token_weights(self._cfg.loss_agg_mode or TOKEN_MEAN, mask, mini.denominators))
        return make_loss_share(loss, {"vf_loss": loss}, statistics, mask)

    def load(self, folder: str, weights_only: bool) -> list[str]:
        """Load model and optimizer, on any number of ranks (a collective). Returns notes for the log."""
        self.offloader.enter_phase("update_critic", whole=True)
        optimizer = None if weights_only else self.updater.optimizer
        return load_training_state(self.model, optimizer, folder, self.updater.loss_scale if optimizer else None)
