"""Driver side of the models of a step: input columns and results of their calls.

The trainer works on samples of a whole step, workers on batches per rank. This module translates between them: requests
per data-parallel rank, references to new columns, numbers per sample. It computes nothing: the equations are in the
classes that implement the roles (``roles.Actor.update``: `workers.actor_ref.ActorRefWorker.update`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from rltrain.algorithms.moments import Moments, join
from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch
from rltrain.config.step_passes import StepPasses
from rltrain.runtime.calls import Call, Stream, bind
from rltrain.runtime.group import WorkerGroup
from rltrain.runtime.samples import Request, Samples, StoredRows, whole
from rltrain.trainer.batching.balance import Ids, Layout
from rltrain.trainer.batching.pass_columns import columns_of_update, made_by_log_probs, made_by_rollout, old_log_probs
from rltrain.trainer.metrics.generation import OF_SYNC, generation_metrics
from rltrain.trainer.metrics.step import Metrics
from rltrain.trainer.progress import ResponseLengths
from rltrain.trainer.role_save import SavedRole
from rltrain.workers.interface import roles
from rltrain.workers.interface.results import GenerationNumbers, PassNumbers, UpdateNumbers, largest
from rltrain.workers.interface.tasks import Finished, GenerateTask, MiniBatch, TurnAdvantages, UpdateTask
from rltrain.workers.rollout.waiting import WRITTEN

# Longest time in seconds that a worker waits for a response to finish. Then it returns no response.
_POLL_S = 0.5
_Role = TypeVar("_Role")
_Argument = TypeVar("_Argument")


class Listener(Protocol):
    """Receiver of responses during generation."""

    def arrived(self, texts: Any, ids: Ids, rows: Ids) -> None:
        """Receive a list of texts (by reference): responses of the samples ``ids`` to the prompts ``rows``."""

    def tick(self) -> None:
        """Run periodically during generation."""


class _Remote:
    """Remote calls of a role on all ranks, with samples by reference.

    A data-parallel rank is a group of neighbouring workers that share sequences. A layout has one entry per
    data-parallel rank. All its workers get the same samples and return the same numbers, so only the first worker's
    numbers are used.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def nodes(self, num_ranks: int) -> list[int]:
        """Return the node of each of ``num_ranks`` data-parallel ranks: the node of its first worker."""
        return self._group.nodes[:: self._group.world // num_ranks]

    def _pass(
        self,
        method: Callable[[_Role, Batch, _Argument], tuple[Batch, PassNumbers]],
        arguments: Sequence[_Argument],
        samples: Samples,
        layout: Layout,
        columns: Sequence[str],
        made: Sequence[str],
        numbers: Sequence[str] = (),
    ) -> dict[str, Moments]:
        """Run ``method`` and return its moments. Adds its numbers and the columns ``made`` to the samples.

        arguments: one per data-parallel rank.
        """
        calls = [
            bind(method, samples.request(ids, columns, numbers).as_batch, argument)
            for ids, argument in zip(layout.ids, arguments, strict=True)
        ]
        # Workers that share sequences return the same numbers, so the first of each data-parallel rank is used.
        results = self._group.submit(calls).collect()[:: self._group.world // len(calls)]
        # A rank without samples only takes part in the collectives. It returns a batch without columns, so nothing can
        # be requested from it.
        parts = zip(layout.ids, self.nodes(len(calls)), results, strict=True)
        non_empty = [part for part in parts if len(part[0])]
        samples.attach([whole(ref, tuple(made), ids, node) for ids, node, (ref, _) in non_empty])
        for ids, _, (_, numbers_found) in non_empty:
            samples.put(ids, numbers_found.per_sample)
        return join(numbers_found.moments for _, _, (_, numbers_found) in non_empty)

    def _update(self, calls: Sequence[Call[UpdateNumbers]]) -> list[UpdateNumbers]:
        """Run the optimizer steps. Returns numbers per data-parallel rank, with the memory peaks of all its workers."""
        results, size = self._group.submit(calls).collect(), self._group.world // len(calls)
        groups = [results[first : first + size] for first in range(0, len(results), size)]
        return [replace(group[0], maxima=largest([result.maxima for result in group])) for group in groups]


class Policy(_Remote, SavedRole):
    """Actor, rollout engine and reference model."""

    role = roles.Actor

    def __init__(self, group: WorkerGroup, passes: StepPasses) -> None:
        super().__init__(group)
        self._calls = 0
        self.lengths = ResponseLengths()
        self._of_sync: Metrics = {}
        self.failure = ""
        """Error of the first failed trajectory of the newest generation."""
        self._passes = passes
        self._generated = made_by_rollout(passes)

    def generate(
        self,
        task: GenerateTask,
        listener: Listener | None = None,
        begun: Request | None = None,
    ) -> tuple[Samples, Metrics]:
        """Generate responses on the engine replicas. Returns samples, with their payload by reference, and metrics.

        listener: receives responses during generation (with ``task.stream``). begun: payload of partial responses to
        continue.
        """
        n = task.num_samples
        self._calls += 1
        task = replace(task, order=self.lengths.order(task.split, task.rows), call=self._calls)

        def arrived(_rank: int, texts: Any, answers: Finished) -> None:
            if listener and len(answers.prompt_index):
                listener.arrived(
                    texts, answers.prompt_index * n + answers.sample, task.rows[answers.prompt_index].astype(np.int64)
                )

        poll = bind(roles.Rollout.take_finished, _POLL_S)
        generate = roles.Rollout.generate
        call = bind(generate, task, begun.as_batch) if begun else bind(generate, task)
        stream = Stream(poll, arrived, listener.tick) if listener else None
        samples = Samples(len(task.rows) * n)
        places = np.arange(len(task.rows)).repeat(n)
        # Samples that no replica served keep these zeros: not served, not complete, no tokens.
        nothing = np.zeros(len(samples), dtype=np.int64)
        samples.update({c.GROUP: places, c.ROW: task.rows[places], c.SERVED: nothing.astype(bool), c.ENGINE: nothing})
        results = self._group.submit([call]).collect(stream=stream)
        for rank, result in enumerate(results):
            self._take_answers(samples, rank, result, with_images=task.is_learnt_from)
        # Number the replicas that served samples consecutively from 0.
        served = samples[c.SERVED]
        samples[c.ENGINE][served] = np.unique(samples[c.ENGINE][served], return_inverse=True)[1]
        # An aborted response counts as maximum length, so that it starts first the next time.
        lengths = np.where(samples[c.COMPLETE], samples[c.RESPONSE_LENGTH], task.sampling.max_tokens)
        # Exclude responses that were completed before this step: they are not served again, and would count as aborted.
        is_asked = np.ones(len(samples), dtype=bool) if task.pending_mask is None else task.pending_mask.ravel()
        self.lengths.observe(task.split, samples[c.ROW][is_asked], lengths[is_asked])
        metrics = self._of_sync | generation_metrics([finished for *_, finished in results])
        self.failure = next((finished.failure for *_, finished in results if finished.failure), "")
        # If a validation runs first, it syncs the new weights; its sync metrics are reported by the next step.
        self._of_sync = {} if task.is_learnt_from else {name: metrics[name] for name in OF_SYNC if name in metrics}
        return samples, metrics

    def _take_answers(
        self, samples: Samples, rank: int, result: tuple[Any, Any, GenerationNumbers], *, with_images: bool
    ) -> None:
        """Add the results of the replica with leader ``rank``. Other ranks return nothing."""
        payload, texts, finished = result
        if not finished.per_sample:
            return
        numbers = dict(finished.per_sample)
        ids = numbers.pop(c.SLOT)
        samples.attach(self._answers(rank, payload, texts, ids, with_images=with_images))
        flags = {c.SERVED: np.ones(len(ids), dtype=bool), c.COMPLETE: ~numbers.pop(c.ABORTED)}
        samples.put(ids, numbers | flags | {c.ENGINE: np.full(len(ids), rank)})

    def _answers(self, rank: int, payload: Any, texts: Any, ids: Ids, *, with_images: bool) -> list[StoredRows]:
        columns = (
            (*self._generated, c.IMAGES, c.RESPONSE_IMAGES) if self._passes.images and with_images else self._generated
        )
        node = self._group.nodes[rank]
        return [whole(payload, columns, ids, node), whole(texts, (c.TEXT,), ids, node)]

    def save_answers(self, answers: Samples, file: str) -> None:
        """Write responses that wait for a later step (`PendingPrompts.answers`). Raises DiskError or StorageError."""
        # The token columns are optional, because some responses have no token yet.
        request = answers.request(np.arange(len(answers)), (), WRITTEN, optional=c.ANSWER)
        call = bind(roles.Rollout.save_answers, request.as_batch, file)
        self._group.submit([call], range(1)).collect()

    def load_answers(self, file: str) -> Samples:
        """Load responses that `save_answers` wrote."""
        (reply,) = self._group.submit([bind(roles.Rollout.load_answers, file)], range(1)).collect()
        payload, texts, numbers = reply
        answers = Samples(len(numbers[c.SLOT]))
        answers.update(numbers)
        answers.attach(self._answers(0, payload, texts, np.arange(len(answers)), with_images=True))
        return answers

    def abort(self) -> None:
        """Abort the current generation and discard its responses."""
        self._group.run_concurrently(roles.Rollout.abort)

    def log_probs(self, samples: Samples, layout: Layout) -> dict[str, Moments]:
        """Attach ``old_log_probs`` and the rollout correction. Returns moments of entropy, mismatch and correction."""
        made, columns = made_by_log_probs(self._passes), self._generated
        # Tokens of earlier policies must not count as a gap between engine and trainer.
        numbers = [name for name in (c.CARRIED_LENGTH, c.AGENT_FAILED) if name in samples.numbers]
        return self._pass(roles.Actor.log_probs, layout.all_sizes(), samples, layout, columns, made, numbers)

    def ref_log_probs(self, samples: Samples, layout: Layout) -> None:
        """Attach ``ref_log_probs``; with a KL in the reward also ``ref_kl`` and the samples' ``kl_sum``."""
        old = [old_log_probs(self._passes)] if self._passes.kl_in_reward else []
        columns = [*c.PROMPT_AND_ANSWER, *old]
        made = [c.REF_LOG_PROBS] if self._passes.ref_log_probs else []
        made += [c.REF_KL] if self._passes.kl_in_reward else []
        self._pass(roles.Actor.ref_log_probs, layout.all_sizes(), samples, layout, columns, made)

    def token_advantages(self, samples: Samples, layout: Layout, kl_coef: float) -> dict[str, Moments]:
        """Attach ``advantages`` and ``returns``. Returns their moments over all ranks."""
        columns = [c.VALUES] if self._passes.values else []
        columns += [c.REF_KL] if self._passes.kl_in_reward else []
        columns += [c.LOSS_MASK] if self._passes.rejects_early else []
        numbers = [c.SCORE, c.POLICY_TOKENS, *([c.BASELINE] if self._passes.greedy_baseline else [])]
        if self._passes.estimator.sum_pi_squared:
            columns += [c.OLD_LOG_PROBS, c.SUM_PI_SQUARED, *([c.IS_WEIGHTS] if self._passes.importance_weights else [])]
            numbers += [c.GROUP]
        coefs = [kl_coef] * len(layout.ids)
        made = [c.ADVANTAGES, c.RETURNS]
        return self._pass(roles.Advantages.advantages, coefs, samples, layout, columns, made, numbers)

    def spread_over_turns(self, samples: Samples, layout: Layout, turns: list[TurnAdvantages]) -> dict[str, Moments]:
        """Attach ``advantages``. Returns their moments over all ranks. turns: per data-parallel rank."""
        columns, method = [c.LOSS_MASK] if self._passes.rejects_early else [], roles.Advantages.spread_over_turns
        return self._pass(method, turns, samples, layout, columns, [c.ADVANTAGES], [c.POLICY_TOKENS])

    def update(self, samples: Samples, layout: Layout, tasks: list[UpdateTask]) -> list[UpdateNumbers]:
        """Run the optimizer steps. Returns the numbers of each data-parallel rank."""
        passes = self._passes
        waits = not all(mini.has_old_log_probs for task in tasks for mini in task.mini_batches)
        columns, optional = columns_of_update(passes, waits=waits)
        # Advantages per response are sent with the call; advantages per token are a column in the store.
        numbers = [c.SAMPLE_ID] + [c.ADVANTAGE] * (not passes.token_advantages) + [c.GROUP] * passes.weighs_groups
        compares = passes.bypass or waits
        numbers += [c.CARRIED_LENGTH] if compares and c.CARRIED_LENGTH in samples.numbers else []
        return self._update(
            [
                bind(roles.Actor.update, samples.request(ids, columns, numbers, optional).as_batch, task)
                for ids, task in zip(layout.ids, tasks, strict=True)
            ]
        )

    @property
    def bytes_through_driver(self) -> int:
        """Bytes of arguments and results of all calls of the run so far, of every role."""
        return self._group.bytes_through_driver

    def bytes_between_nodes(self) -> Counter[str]:
        """Return the bytes of samples that moved between nodes in the run so far, by call."""
        return self._group.bytes_between_nodes()


class Critic(_Remote, SavedRole):
    """The value function."""

    role = roles.Critic

    def __init__(self, group: WorkerGroup, passes: StepPasses) -> None:
        super().__init__(group)
        self._with_mask = passes.rejects_early

    def values(self, samples: Samples, layout: Layout) -> None:
        """Attach ``values``."""
        sizes = layout.all_sizes()
        self._pass(roles.Critic.values, sizes, samples, layout, c.PROMPT_AND_ANSWER, [c.VALUES])

    def update(
        self, samples: Samples, layout: Layout, work: list[list[MiniBatch]], learning_rate: float
    ) -> list[UpdateNumbers]:
        """Run the optimizer steps. Returns the numbers of each data-parallel rank."""
        columns = [*c.PROMPT_AND_ANSWER, c.VALUES, c.RETURNS, *([c.LOSS_MASK] if self._with_mask else [])]
        return self._update(
            [
                bind(roles.Critic.update, samples.request(ids, columns).as_batch, mini_batches, learning_rate)
                for ids, mini_batches in zip(layout.ids, work, strict=True)
            ]
        )


class InferenceModels(_Remote):
    """Frozen policies that compute log-probs: teacher and reference."""

    def log_probs(self, name: str, column: str, samples: Samples, layout: Layout) -> dict[str, Moments]:
        """Attach ``column``, the log-probs of the pass ``name``. Returns their moments under that name."""
        tasks = [(name, column, sizes) for sizes in layout.all_sizes()]
        return self._pass(roles.InferenceModels.log_probs, tasks, samples, layout, c.PROMPT_AND_ANSWER, [column])


class Reference(_Remote, SavedRole):
    """Reference model that follows the policy."""

    role = roles.Reference

    def update_reference(self) -> None:
        """Update the reference from the policy."""
        self._group.call(roles.Reference.update_reference)


@dataclass(frozen=True)
class StepModels:
    """Models of a step, except the reward model (`Rewards`)."""

    policy: Policy
    critic: Critic | None
    inference_models: InferenceModels
    sizes: dict[str, float]
    """See `workers.interface.roles.Models`."""
    reference: Reference | None = None
    """Reference model that follows the policy."""


class RewardModel(_Remote):
    """The reward model. num_ranks: number of its data-parallel ranks."""

    def __init__(self, group: WorkerGroup, num_ranks: int) -> None:
        super().__init__(group)
        self._num_ranks = num_ranks

    def score(self, split: str, samples: Samples, at_once: int | None = None) -> np.ndarray:
        """Return a score per response [n], ``at_once`` responses per call (None: all). Every rank gets about the same
        number of tokens.
        """
        # The reward model may use another tokenizer, so the policy's lengths are only an estimate of the work, and its
        # workers form their micro-batches themselves.
        lengths, at_once = samples[c.PROMPT_LENGTH] + samples[c.RESPONSE_LENGTH], at_once or max(1, len(samples))
        scores = np.zeros(len(samples))
        for first in range(0, len(samples), at_once):
            shares = [first + ids for ids in deal_by_length(lengths[first : first + at_once], self._num_ranks)]
            calls = [
                bind(roles.RewardModel.score, samples.request(ids, [c.TEXT], [c.ROW]).as_batch, split) for ids in shares
            ]
            results = self._group.submit(calls).collect()[:: self._group.world // self._num_ranks]
            for ids, rank_scores in zip(shares, results, strict=True):
                scores[ids] = rank_scores
        return scores


def deal_by_length(lengths: np.ndarray, num_ranks: int) -> list[Ids]:
    """Deal samples to ranks, longest first, in alternating directions, so that token counts are about equal."""
    order = np.argsort(-lengths, kind="stable")
    place = np.arange(len(order))
    turn, offset = np.divmod(place, num_ranks)
    rank = np.where(turn % 2 == 0, offset, num_ranks - 1 - offset)
    return [np.sort(order[rank == number]) for number in range(num_ranks)]
