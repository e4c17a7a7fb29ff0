"""The models of a step as the trainer speaks of them: policy (actor, rollout, reference), critic, reward model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from rltrain.config.schema import Config
from rltrain.controller.group import Stream, WorkerGroup
from rltrain.controller.samples import Samples, whole
from rltrain.trainer import metrics as m
from rltrain.trainer.balance import Ids, Layout
from rltrain.trainer.metrics import Metrics
from rltrain.workers.tasks import GenerateTask, MiniBatch, UpdateTask

_PROMPT_AND_ANSWER = ("tokens", "prompt_length", "response_length")
_GENERATED = (*_PROMPT_AND_ANSWER, "rollout_log_probs")
Numbers = dict[str, Any]


class Listener(Protocol):
    """Who hears of answers as they finish."""

    def arrived(self, texts: Any, ids: Ids, rows: Ids) -> None:
        """A list of texts exists (by reference): the answers ``ids``, to the prompts in ``rows``."""

    def tick(self) -> None:
        """Called every now and then while generation goes on."""


class _Role:
    """Calls methods of one role on all ranks, with samples by reference.

    A layout has an entry for each data-parallel rank: the neighbouring workers that share sequences. All of them get the same
    samples and return the same numbers of them, and those of the first are taken.
    """

    def __init__(self, group: WorkerGroup, name: str) -> None:
        self._group = group
        self._name = name

    def _score(
        self,
        method: str,
        samples: Samples,
        layout: Layout,
        columns: Sequence[str],
        made: Sequence[str],
        arguments: Sequence[Any] | None = None,
        numbers: Sequence[str] = (),
    ) -> list[Numbers]:
        """Run a pass and attach the columns it made. Numbers that are arrays [n] become numbers of the samples."""
        work = [
            [
                samples.request(ids, columns, numbers),
                *(arguments if arguments is not None else [layout.flat_sizes(rank)]),
            ]
            for rank, ids in enumerate(layout.ids)
        ]
        results = self._group.call_with_payload(method, per_rank=self._to_all(work), num_objects=1)[
            :: self._share(work)
        ]
        having = [(ids, ref, found) for ids, (ref, found) in zip(layout.ids, results, strict=True) if len(ids)]
        samples.attach([whole(ref, tuple(made), ids) for ids, ref, _ in having])
        scalars: list[Numbers] = []
        placed: dict[str, np.ndarray] = {}
        for ids, _, found in having:
            scalars.append({name: value for name, value in found.items() if not isinstance(value, np.ndarray)})
            for name, values in found.items():
                if isinstance(values, np.ndarray):
                    placed.setdefault(name, np.zeros(len(samples), values.dtype))[ids] = values
        samples.update(placed)
        return scalars

    def _update(self, work: list[list[Any]]) -> list[Numbers]:
        """Run the optimizer steps of each data-parallel rank; returns what each summed."""
        results, size = self._group.call(f"{self._name}.update", per_rank=self._to_all(work)), self._share(work)
        groups = [results[first : first + size] for first in range(0, len(results), size)]
        return [group[0] | m.peak_memory(group) for group in groups]

    def _share(self, work: Sequence[Any]) -> int:
        """Workers of one data-parallel rank."""
        return self._group.world // len(work)

    def _to_all(self, work: Sequence[Any]) -> list[Any]:
        return [each for each in work for _ in range(self._share(work))]

    def save(self, folder: str) -> None:
        """Write model and optimizer."""
        self._group.call(f"{self._name}.save", [folder])

    def load(self, folder: str, weights_only: bool) -> None:
        """Read them back."""
        self._group.call(f"{self._name}.load", [folder, weights_only])


class Policy(_Role):
    """Actor, rollout engine and reference."""

    def __init__(self, group: WorkerGroup, cfg: Config) -> None:
        super().__init__(group, "actor")
        actor, algorithm = cfg.actor_rollout_ref.actor, cfg.algorithm
        self._correction = algorithm.rollout_correction
        self._old = "rollout_log_probs" if self._correction.bypass_mode else "old_log_probs"
        self._kl_in_reward = algorithm.use_kl_in_reward
        self._ref_in_loss = actor.use_kl_loss and actor.kl_loss_type != "full"
        self._exact_kl_only = algorithm.use_kl_in_reward and algorithm.kl_penalty == "full" and not self._ref_in_loss
        # The exact KL of the loss needs no pass of its own: the update runs the reference.
        self.has_reference_pass = self._kl_in_reward or self._ref_in_loss

    def generate(self, task: GenerateTask, listener: Listener | None = None) -> tuple[Samples, Metrics]:
        """Spread the prompts over the engines and collect what the driver needs to know of the answers.

        ``listener``: is told of answers while others are still being generated (with ``task.stream``).
        """
        n = task.sampling.num_samples
        shares = np.array_split(np.arange(len(task.rows)), self._group.world)
        tasks = [replace(task, rows=tuple(task.rows[i] for i in share)) for share in shares]

        def arrived(rank: int, texts: Any, numbers: Numbers) -> None:
            if listener and len(numbers["places"]):
                prompts = shares[rank][numbers["places"]]
                ids = (prompts[:, None] * n + np.arange(n)).ravel()
                listener.arrived(texts, ids, np.array(task.rows)[prompts].repeat(n))

        stream = Stream("actor.take_finished", arrived, listener.tick) if listener else None
        results = self._group.call_with_payload(
            "actor.generate", per_rank=[[each] for each in tasks], num_objects=2, stream=stream
        )
        samples = Samples(len(task.rows) * n)
        having = [
            ((share[:, None] * n + np.arange(n)).ravel(), *found) for share, found in zip(shares, results, strict=True)
        ]
        having = [each for each in having if len(each[0])]
        for ids, payload, texts, _ in having:
            samples.attach([whole(payload, _GENERATED, ids), whole(texts, ("text",), ids)])
        for name in ("prompt_length", "response_length", "truncated"):
            samples.update({name: np.concatenate([numbers[name] for *_, numbers in having])})
        places = np.arange(len(task.rows)).repeat(n)
        engine = np.arange(len(shares)).repeat([len(share) * n for share in shares])
        samples.update({"group": places, "row": np.array(task.rows)[places], "engine": engine})
        return samples, m.worker_timing([numbers for *_, numbers in results])

    def log_probs(self, samples: Samples, layout: Layout) -> Metrics:
        """Attach ``old_log_probs`` and the rollout correction; returns entropy, mismatch and correction metrics."""
        made = ["old_log_probs"]
        made += ["is_weights"] if self._correction.rollout_is else []
        made += ["loss_mask"] if self._correction.rollout_rs else []
        sums = m.add_up(self._score("actor.log_probs", samples, layout, _GENERATED, made))
        return {"actor/entropy": sums["entropy"] / max(sums["tokens"], 1)} | m.mismatch_metrics(sums)

    def ref_log_probs(self, samples: Samples, layout: Layout) -> None:
        """Attach ``ref_log_probs``, and with a KL in the reward ``ref_kl``; the samples get ``kl_sum``."""
        columns = [*_PROMPT_AND_ANSWER, self._old] if self._kl_in_reward else _PROMPT_AND_ANSWER
        made = [] if self._exact_kl_only else ["ref_log_probs"]
        made += ["ref_kl"] if self._kl_in_reward else []
        self._score("actor.ref_log_probs", samples, layout, columns, made)

    def token_advantages(self, samples: Samples, layout: Layout, kl_coef: float, columns: Sequence[str]) -> Numbers:
        """Attach ``advantages`` and ``returns``; returns their sums over all ranks. columns: payload the estimator needs."""
        wanted = ["response_length", *columns]
        wanted += ["ref_kl"] if self._kl_in_reward else []
        wanted += ["loss_mask"] if self._correction.masks_loss else []
        numbers = ["score", *(["baseline"] if "baseline" in samples.numbers else [])]
        return m.add_up(
            self._score("advantages", samples, layout, wanted, ["advantages", "returns"], [kl_coef], numbers)
        )

    def update(self, samples: Samples, layout: Layout, tasks: list[UpdateTask], *, token_level: bool) -> list[Numbers]:
        """Run the optimizer steps; returns what each data-parallel rank summed."""
        columns = [*_PROMPT_AND_ANSWER, self._old]
        columns += ["ref_log_probs"] if self._ref_in_loss else []
        columns += ["advantages"] if token_level else []
        if not self._correction.bypass_mode:
            columns += ["is_weights"] if self._correction.rollout_is else []
            columns += ["loss_mask"] if self._correction.masks_loss else []
        numbers = ["sample"] if token_level else ["sample", "advantage"]
        work = [[samples.request(ids, columns, numbers), task] for ids, task in zip(layout.ids, tasks, strict=True)]
        return self._update(work)

    def export(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder."""
        self._group.call("actor.export", [folder])

    def take_driver_bytes(self) -> int:
        """Bytes that went through the driver since the last call."""
        taken, self._group.bytes_through_driver = self._group.bytes_through_driver, 0
        return taken


class Critic(_Role):
    """The value function."""

    def __init__(self, group: WorkerGroup, cfg: Config) -> None:
        super().__init__(group, "critic")
        self._with_mask = cfg.algorithm.rollout_correction.masks_loss

    def values(self, samples: Samples, layout: Layout) -> None:
        """Attach ``values``."""
        self._score("critic.values", samples, layout, _PROMPT_AND_ANSWER, ["values"])

    def update(
        self, samples: Samples, layout: Layout, work: list[list[MiniBatch]], learning_rate: float
    ) -> list[Numbers]:
        """Run the optimizer steps; returns what each data-parallel rank summed."""
        columns = [*_PROMPT_AND_ANSWER, "values", "returns", *(["loss_mask"] if self._with_mask else [])]
        return self._update(
            [
                [samples.request(ids, columns), mini_batches, learning_rate]
                for ids, mini_batches in zip(layout.ids, work, strict=True)
            ]
        )


class RewardModel(_Role):
    """The reward model."""

    def __init__(self, group: WorkerGroup) -> None:
        super().__init__(group, "reward_model")

    def score(self, split: str, samples: Samples) -> np.ndarray:
        """Score of each answer [n], whose text is spread over the ranks by length."""
        shares = _deal(samples["prompt_length"] + samples["response_length"], self._group.world)
        work = [[samples.request(ids, ["text"], ["row"]), split] for ids in shares]
        scores = np.zeros(len(samples))
        for ids, numbers in zip(shares, self._group.call("reward_model.score", per_rank=work), strict=True):
            scores[ids] = numbers["model_score"]
        return scores


def _deal(lengths: np.ndarray, num_ranks: int) -> list[Ids]:
    """Samples dealt out from the longest, back and forth, so that every rank gets about as many tokens."""
    order = np.argsort(-lengths, kind="stable")
    place = np.arange(len(order))
    turn, seat = np.divmod(place, num_ranks)
    rank = np.where(turn % 2 == 0, seat, num_ranks - 1 - seat)
    return [np.sort(order[rank == each]) for each in range(num_ranks)]
