"""What the driver may ask of a worker process, role by role: the signatures of all remote methods.

The driver writes ``group.call(Actor.load, …)``. mypy checks the arguments against the Protocol here, and also the
classes that implement a role, because they name it as their base. A method that returns a tuple leaves all entries but
the last in Ray's object store, where other workers fetch them; the last entry alone travels to the driver. For a
`Batch` the driver passes ``request.as_batch``, and the batch is put together in the process that receives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rltrain.base.columns.batch import Batch
from rltrain.config.step_passes import StepPasses
from rltrain.rewards.judge.reply import Reply
from rltrain.workers.results import Array, GenerationNumbers, JudgeNumbers, PassNumbers, UpdateNumbers
from rltrain.workers.tasks import Finished, GenerateTask, MiniBatch, SaveTask, TurnAdvantages, UpdateTask, Written


class Models(Protocol):
    """All models of a process: `HybridWorker`."""

    def init_models(self, passes: StepPasses) -> dict[str, Any]:
        """Load the models of ``passes.roles`` and the rollout engine. Returns sizes."""


class Links(Protocol):
    """A device, and the lines between devices: `LinksWorker`."""

    def computes(self, size: int) -> float:
        """TFLOP/s of a product of matrices [size, size], a power of two, in the compute dtype; 0 where it is wrong."""

    def collectives(self, num_bytes: int) -> dict[str, float]:
        """GB/s of an all-reduce and of an all-gather (the second of two). Raises WorkerError where one is wrong."""

    def meets(self, num_bytes: int, turn: int) -> Array:
        """GB/s from and to the rank that this one meets in a round [world]; 0 where what arrived is wrong, else nan."""


class Profiled(Protocol):
    """A process with a profiler: `Profiler`."""

    def begin_profile(self, name: str) -> None:
        """Profile what comes. name: path of the files to write, without their ends."""

    def end_profile(self) -> list[str]:
        """Write what was profiled. Returns the files; none where nothing had begun."""


class Actor(Protocol):
    """The policy that is trained, and its reference: `ActorRefWorker`."""

    def log_probs(self, batch: Batch, micro_sizes: Sequence[int]) -> tuple[Batch, PassNumbers]:
        """log pi(answer) under the actor's own weights, and the rollout correction."""

    def ref_log_probs(self, batch: Batch, micro_sizes: Sequence[int]) -> tuple[Batch, PassNumbers]:
        """log pi_ref(answer) under the frozen reference, and the KL to it where the reward has one."""

    def update(self, batch: Batch, task: UpdateTask) -> UpdateNumbers:
        """Maximise the surrogate: one optimizer step per mini-batch."""

    def stage(self, task: SaveTask) -> bool:
        """Take model and optimizer as they are now. Returns whether training may go on while `write` runs."""

    def write(self) -> tuple[list[Any], Written]:
        """Write the staged tensors, in a thread beside other calls.

        Their places, which `seal` needs, stay in the store.
        """

    def seal(self, places: list[list[Any]]) -> dict[str, str]:
        """Rank 0, when all have written: make a checkpoint of the parts. Returns the digests of what it writes."""

    def load(self, folder: str, weights_only: bool) -> list[str]:
        """Read them back. Returns notes for the log."""


class Frozen(Protocol):
    """Policies that learn nothing: `FrozenWorker`."""

    def log_probs(self, batch: Batch, task: tuple[str, str, Sequence[int]]) -> tuple[Batch, PassNumbers]:
        """log pi(answer) under the policy of a pass. task: the pass, the column to make, and the micro-batches."""


class Reference(Protocol):
    """A reference that moves: `ReferenceWorker`."""

    def move(self) -> None:
        """Take over the policy, or a part of it."""

    def stage(self, task: SaveTask) -> bool:
        """Take the weights as they are now. Returns whether training may go on while `write` runs."""

    def write(self) -> tuple[list[Any], Written]:
        """Write the staged tensors, in a thread beside other calls.

        Their places, which `seal` needs, stay in the store.
        """

    def seal(self, places: list[list[Any]]) -> dict[str, str]:
        """Rank 0, when all have written: make a checkpoint of the parts. Returns the digests of what it writes."""

    def load(self, folder: str, weights_only: bool) -> list[str]:
        """Read them back, unless a new run begins from the weights of the policy alone. Returns notes for the log."""


class Rollout(Protocol):
    """The rollout engine: `RolloutWorker`."""

    def generate(self, task: GenerateTask, begun: Batch | None = None) -> tuple[Batch, list[str], GenerationNumbers]:
        """Sample answers with the current weights: payload columns, the answers as text, and numbers."""

    def take_finished(self, wait_s: float) -> tuple[list[str], Finished]:
        """The texts that `generate` has finished since the last call. Runs beside it."""

    def save_answers(self, batch: Batch, file: str) -> None:
        """Write answers that wait for a later step (`waiting.WRITTEN` and their tokens)."""

    def load_answers(self, file: str) -> tuple[Batch, list[str], dict[str, Array]]:
        """Read them back: payload columns, the answers as text, and numbers."""

    def give_up(self) -> None:
        """Have `generate` of all ranks end, now and from now on. Runs beside it."""


class Advantages(Protocol):
    """Token-level advantages, computed where the tokens are: `HybridWorker`."""

    def advantages(self, batch: Batch, kl_coef: float) -> tuple[Batch, PassNumbers]:
        """Advantages and returns of every token."""

    def spread_over_turns(self, batch: Batch, turns: TurnAdvantages) -> tuple[Batch, PassNumbers]:
        """Advantages of every token, from those of turns."""


class Critic(Protocol):
    """The value function: `CriticWorker`."""

    def values(self, batch: Batch, micro_sizes: Sequence[int]) -> tuple[Batch, PassNumbers]:
        """V of the state in which each answer token was chosen."""

    def update(self, batch: Batch, mini_batches: Sequence[MiniBatch], learning_rate: float) -> UpdateNumbers:
        """Fit V to the returns: one optimizer step per mini-batch."""

    def stage(self, task: SaveTask) -> bool:
        """Take model and optimizer as they are now. Returns whether training may go on while `write` runs."""

    def write(self) -> tuple[list[Any], Written]:
        """Write the staged tensors, in a thread beside other calls.

        Their places, which `seal` needs, stay in the store.
        """

    def seal(self, places: list[list[Any]]) -> dict[str, str]:
        """Rank 0, when all have written: make a checkpoint of the parts. Returns the digests of what it writes."""

    def load(self, folder: str, weights_only: bool) -> list[str]:
        """Read them back. Returns notes for the log."""


class Judge(Protocol):
    """A generative reward model: `JudgeWorker`."""

    def replies(self, batch: Batch, seed: int, reading: int) -> tuple[list[Reply], JudgeNumbers]:
        """Replies to the ``judge_message`` of each sample, in their order. reading: the number of earlier questions."""


class RewardModel(Protocol):
    """The reward model: `RewardModelWorker`."""

    def score(self, batch: Batch, split: str) -> Array:
        """Score of each sample [n]."""
