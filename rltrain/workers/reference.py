"""Reference model that follows the policy: every K steps it becomes the policy, or is mixed with it.

This follows TR-DPO (Gorbatovski et al. 2024, eq. 6 and 7) and ProRL (Liu et al. 2025, section 2.3), because a KL to the
initial model would eventually limit a long run.
"""

from __future__ import annotations

import torch

from rltrain.config.schema import RefConfig
from rltrain.models.forward import PolicyModel
from rltrain.models.routing import correction_biases
from rltrain.models.weights.shard import local_shard
from rltrain.models.weights.state import load_training_state, weights_by_name
from rltrain.workers.interface.roles import Reference
from rltrain.workers.state.offload_manager import OffloadManager
from rltrain.workers.state.saving import SavesState, StateWriter


class ReferenceWorker(SavesState, Reference):
    """Shard of the reference. Every method is called on all ranks."""

    def __init__(self, cfg: RefConfig, policy: PolicyModel, reference: PolicyModel, offloader: OffloadManager) -> None:
        self._mix = cfg.update_mix
        self._policy, self._reference, self._offloader = policy, reference, offloader
        self._writer = StateWriter(reference, None, None, offloader.device)

    @torch.no_grad()
    def update_reference(self) -> None:
        """Set reference <- a policy + (1 - a) reference, a = ref.update_mix, for each shard of a weight."""
        # The weights are not onloaded for this: frozen weights are never copied back to the host, so a change on the
        # device would be lost.
        self._offloader.enter_phase("gen", whole=True)
        self._writer.reshard_and_synchronize()
        policy, reference = (
            {**weights_by_name(packed), **correction_biases(packed)} for packed in (self._policy, self._reference)
        )
        for name, weight in reference.items():
            # Policy and reference are sharded alike, because the reference's specification is derived from the
            # policy's.
            source, target = local_shard(policy[name]), local_shard(weight)
            if self._mix == 1:
                target.copy_(source)
            else:
                target.lerp_(source.to(target), self._mix)

    def load(self, folder: str, weights_only: bool) -> list[str]:
        """Load the weights, on any number of ranks (a collective). Returns notes for the log."""
        if weights_only:  # from another run: the reference keeps the loaded weights
            return []
        self._offloader.enter_phase("gen", whole=True)
        return load_training_state(self._reference, None, folder)
