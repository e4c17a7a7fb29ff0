"""Weight sync from training shards to the rollout engine, verified by a canary.

Trainer and engine share a device, which has no memory for a second gathered model. So weights are gathered bucket by
bucket (`models.weights`), the engine loads each bucket before the next is gathered, and the training copy is offloaded
before the engine allocates its cache (the allgather-swap of MindSpeed RL). Adapters that the engine applies itself are
only megabytes: the frozen base weights are synced before the first adapters, and again only if they were dropped.

Canary: after the sync, engine and trainer compute the log-probs of a fixed text. In a run with images the text includes
an image, so that the vision tower is compared too. Left out: checksums. vLLM fuses and repacks its weights, so only the
sent tensors could be hashed, which would not show that the engine uses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.common.device import Device
from rltrain.common.errors import NonFiniteError, SyncError
from rltrain.data.images import EncodedPrompt
from rltrain.models.forward import PackedModel
from rltrain.models.weights.names import CheckpointNames, Part, Weight, exchangeable, gathered_weights
from rltrain.models.weights.partial import Parts, parts_of
from rltrain.workers.interface.results import SyncReport
from rltrain.workers.rollout.contract import RolloutEngine


@dataclass(frozen=True)
class EngineNames:
    """Names for error messages: the engine, the key of its model, and in brackets the key of the gap limit."""

    engine: str = "the rollout engine"
    path: str = "actor_rollout_ref.model.path"
    limit: str = " (actor_rollout_ref.rollout.log_prob_gap_limit)"


class WeightSync:
    """Weight sync that tracks the policy version of the engine.

    The version is the number of optimizer steps since the start of the process; None if the engine has no weights.
    canary: a fixed text. log_probs: returns the trainer's log-probs at temperature 1 of all tokens of a text, or of its
    last ones. gap_limit: maximum mean distance between these and `RolloutEngine.log_probs`. merge: merge adapters into
    their weights. names: for error messages.
    """

    def __init__(
        self,
        policy: PackedModel,
        engine: RolloutEngine,
        device: Device,
        dtype: torch.dtype,
        *,
        bucket_bytes: int,
        gap_limit: float,
        canary: EncodedPrompt,
        log_probs: Callable[[EncodedPrompt], Tensor],
        merge: bool = True,
        names: EngineNames = EngineNames(),
    ) -> None:
        self.version: int | None = None
        self._policy = policy
        self.engine = engine
        self._names = None if engine.names_in_memory else CheckpointNames(policy.model)
        self._parts: Parts | None = None
        self._observed = False
        self._device = device
        self._dtype = dtype
        self.bucket_bytes = bucket_bytes
        self._gap_limit = gap_limit
        self._canary = canary
        self._log_probs = log_probs
        self._merge = merge
        self._names_in_messages = names

    def run(self, version: int, free_training_copy: Callable[[], object]) -> SyncReport:
        """Sync the weights, wake the engine in stages, then compare it with the trainer (a collective).

        The order bounds memory: compute the trainer's log-probs of the canary, allocate the engine's weights, load
        them, offload the training copy, barrier over all ranks, allocate the engine's cache. Raises SyncError if the
        log-probs differ too much, NonFiniteError if the trainer's are not finite.
        """
        if version == self.version:
            raise SyncError(f"the rollout engine already has the weights of update {version}; a second sync is a bug")
        started = time.perf_counter()
        expected = self._log_probs(self._canary)
        self.engine.wake_weights()
        num_bytes = 0

        parts: tuple[Part, ...] = ("merged",)
        if not self._merge:
            parts = ("adapters",) if self.engine.holds_base else ("base", "adapters")

        def counted() -> Iterator[Weight]:
            nonlocal num_bytes
            for part in parts:
                found = gathered_weights(self._policy, self._dtype, self.bucket_bytes, self._names, part, self._parts)
                for weight in found:
                    num_bytes += weight.values.nbytes
                    yield weight

        self.engine.load_weights(counted())
        if (record := self.engine.record) and self._names and not self._observed:
            self._observed = True
            in_parts = {*exchangeable(self._policy, self._names).values()} & record.boxes.keys()
            boxes = {name: record.boxes[name] for name in sorted(in_parts)}
            self._parts = parts_of(boxes, record.num_ranks) if boxes else None
        free_training_copy()
        dist.barrier()
        self.engine.wake_cache()
        self.version = version
        gap = self._compare(expected, version)
        self._device.synchronize()
        return SyncReport(time.perf_counter() - started, num_bytes / 2**30, gap)

    def lost(self) -> None:
        """Record that the engine has dropped its weights, or only the trained ones."""
        self.version = None

    def _compare(self, expected: Tensor, version: int) -> float:
        if not bool(expected.isfinite().all()):
            raise NonFiniteError(
                f"the trainer's own log-probs of a fixed text are not finite after {version} updates: its weights are "
                "damaged, or too large for the dtype it computes in. At the first step, check the files of "
                f"{self._names_in_messages.path}; later, resume from an older checkpoint with "
                "trainer.resume_mode=resume_path."
            )
        log_probs = self.engine.log_probs(self._canary).float().cpu()[-len(expected) :]
        gap = float((log_probs - expected).abs().mean())
        # Do not write `gap > limit`, which is False for NaN and would accept a broken engine.
        if not gap <= self._gap_limit:
            with_image = " with an image" if self._canary.images else ""
            raise SyncError(
                f"after the sync of update {version} {self._names_in_messages.engine} differs from the trainer: mean "
                f"|log-prob gap| {gap:.3g} on a fixed text{with_image}, limit "
                f"{self._gap_limit:.3g}{self._names_in_messages.limit}. It does not generate with the current weights, "
                "or computes differently."
            )
        return gap
