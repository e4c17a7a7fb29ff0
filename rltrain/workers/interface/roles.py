"""Signatures of all remote methods of a worker process, by role.

The driver writes ``group.call(Actor.load, …)``. mypy checks the arguments against the Protocol here, and the classes
that implement a role, because they name it as their base. A method that returns a tuple leaves all entries but the last
in Ray's object store, where other workers fetch them; only the last entry is sent to the driver. For a `Batch` the
driver passes ``request.as_batch``, and the receiving process assembles the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rltrain.common.columns.batch import Batch
from rltrain.config.step_passes import StepPasses
from rltrain.rewards.judge.reply import Reply
from rltrain.workers.interface.results import Array, GenerationNumbers, JudgeNumbers, PassNumbers, UpdateNumbers
from rltrain.workers.interface.tasks import (
    Finished,
    GenerateTask,
    MiniBatch,
    SaveTask,
    TurnAdvantages,
    UpdateTask,
    Written,
)


class Models(Protocol):
    """All models of a process: `HybridWorker`."""

    def init_models(self, passes: StepPasses) -> dict[str, Any]:
        """Load the models of ``passes.roles`` and the rollout engine. Returns sizes of the models and rates of the
        device."""


class Links(Protocol):
    """Tests of a device and of the links between devices: `LinksWorker`."""

    def computes(self, size: int) -> float:
        """Return TFLOP/s of a product of [size, size] matrices in the compute dtype, or 0 if the result is wrong."""

    def collectives(self, num_bytes: int) -> dict[str, float]:
        """Return GB/s of an all-reduce and an all-gather, after a warm-up. Raises WorkerError if a result is wrong."""

    def p2p_bandwidth(self, num_bytes: int, turn: int) -> Array:
        """Return GB/s to this rank's peer of the round, in an array [world]: 0 if the data is wrong, nan for other
        ranks."""


class Profiled(Protocol):
    """A process with a profiler: `Profiler`."""

    def begin_profile(self, name: str) -> None:
        """Start profiling. name: path of the output files, without suffix."""

    def end_profile(self) -> list[str]:
        """Stop profiling and write the results. Returns the files; empty if profiling was not started."""


class Actor(Protocol):
    """Trained policy and its reference: `ActorRefWorker`."""

    def log_probs(self, batch: Batch, micro_sizes: Sequence[int]) -> tuple[Batch, PassNumbers]:
        """Compute log pi(response) with the actor's weights, and the rollout correction."""

    def ref_log_probs(self, batch: Batch, micro_sizes: Sequence[int]) -> tuple[Batch, PassNumbers]:
        """Compute log pi_ref(response) with the frozen reference, and the KL to it if the reward has one."""

    def update(self, batch: Batch, task: UpdateTask) -> UpdateNumbers:
        """Maximise the surrogate: one optimizer step per mini-batch."""

    def stage(self, task: SaveTask) -> bool:
        """Snapshot model and optimizer. Returns True if training may continue during `write`."""

    def write(self) -> tuple[list[Any], Written]:
        """Write the snapshot, in a thread concurrent with other calls.

        The index data for `seal` stays in the store.
        """

    def seal(self, places: list[list[Any]]) -> dict[str, str]:
        """Write the checkpoint's index on rank 0, after all ranks have written. Returns the digests of its files."""

    def load(self, folder: str, weights_only: bool) -> list[str]:
        """Load the saved state. Returns notes for the log."""


class InferenceModels(Protocol):
    """Frozen policies that compute log-probs: `InferenceWorker`."""

    def log_probs(self, batch: Batch, task: tuple[str, str, Sequence[int]]) -> tuple[Batch, PassNumbers]:
        """Compute log pi(response) with the policy of a pass. task: pass, output column, micro-batch sizes."""


class Reference(Protocol):
    """Reference model that follows the policy: `ReferenceWorker`."""

    def update_reference(self) -> None:
        """Copy the policy into the reference, or mix it in."""

    def stage(self, task: SaveTask) -> bool:
        """Snapshot the weights. Returns True if training may continue during `write`."""

    def write(self) -> tuple[list[Any], Written]:
        """Write the snapshot, in a thread concurrent with other calls.

        The index data for `seal` stays in the store.
        """

    def seal(self, places: list[list[Any]]) -> dict[str, str]:
        """Write the checkpoint's index on rank 0, after all ranks have written. Returns the digests of its files."""

    def load(self, folder: str, weights_only: bool) -> list[str]:
        """Load the saved state, unless a new run starts from the policy's weights only. Returns notes for the log."""


class Rollout(Protocol):
    """The rollout engine: `RolloutWorker`."""

    def generate(self, task: GenerateTask, begun: Batch | None = None) -> tuple[Batch, list[str], GenerationNumbers]:
        """Generate responses with the current weights. Returns payload columns, texts, and numbers."""

    def take_finished(self, wait_s: float) -> tuple[list[str], Finished]:
        """Return texts that `generate` has finished since the last call. Runs concurrently with it."""

    def save_answers(self, batch: Batch, file: str) -> None:
        """Write responses that wait for a later step (`waiting.WRITTEN` and their tokens)."""

    def load_answers(self, file: str) -> tuple[Batch, list[str], dict[str, Array]]:
        """Load responses that `save_answers` wrote. Returns payload columns, texts, and numbers."""

    def abort(self) -> None:
        """Abort `generate` on all ranks: the current call and all later ones. Runs concurrently with it."""


class Advantages(Protocol):
    """Token-level advantages, computed where the tokens are stored: `HybridWorker`."""

    def advantages(self, batch: Batch, kl_coef: float) -> tuple[Batch, PassNumbers]:
        """Compute advantages and returns of every token."""

    def spread_over_turns(self, batch: Batch, turns: TurnAdvantages) -> tuple[Batch, PassNumbers]:
        """Spread turn advantages over tokens."""


class Critic(Protocol):
    """Value function: `CriticWorker`."""

    def values(self, batch: Batch, micro_sizes: Sequence[int]) -> tuple[Batch, PassNumbers]:
        """Compute V of the state before each response token."""

    def update(self, batch: Batch, mini_batches: Sequence[MiniBatch], learning_rate: float) -> UpdateNumbers:
        """Fit V to the returns: one optimizer step per mini-batch."""

    def stage(self, task: SaveTask) -> bool:
        """Snapshot model and optimizer. Returns True if training may continue during `write`."""

    def write(self) -> tuple[list[Any], Written]:
        """Write the snapshot, in a thread concurrent with other calls.

        The index data for `seal` stays in the store.
        """

    def seal(self, places: list[list[Any]]) -> dict[str, str]:
        """Write the checkpoint's index on rank 0, after all ranks have written. Returns the digests of its files."""

    def load(self, folder: str, weights_only: bool) -> list[str]:
        """Load the saved state. Returns notes for the log."""


class Judge(Protocol):
    """Generative reward model: `JudgeWorker`."""

    def replies(self, batch: Batch, seed: int, reading: int) -> tuple[list[Reply], JudgeNumbers]:
        """Reply to the ``judge_message`` of each sample, in order. reading: the number of earlier attempts."""


class RewardModel(Protocol):
    """The reward model: `RewardModelWorker`."""

    def score(self, batch: Batch, split: str) -> Array:
        """Return the score of each sample [n]."""
