"""The roles of a step as the trainer speaks of them: the policy (actor, rollout, reference) and the scorers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rltrain.controller.group import WorkerGroup
from rltrain.controller.samples import Part, Samples
from rltrain.data.rows import Rows
from rltrain.rewards.pool import RewardPool
from rltrain.trainer import metrics as m
from rltrain.trainer.balance import Ids, Layout
from rltrain.trainer.metrics import Metrics
from rltrain.workers.actor_rollout_ref import GenerateTask, MiniBatch

_GENERATED = ("tokens", "prompt_length", "response_length", "rollout_log_probs")


class Policy:
    """Actor, rollout engine and reference: one worker group, addressed with samples and layouts."""

    def __init__(self, group: WorkerGroup, model: dict[str, Any], *, has_reference: bool, has_kl_loss: bool) -> None:
        self._group = group
        self.model = model
        self.has_reference = has_reference
        self._has_kl_loss = has_kl_loss
        self.generated_ids: list[Ids] = []

    def generate(self, task: GenerateTask) -> tuple[Samples, Metrics]:
        """Spread the prompts over the engines and collect what the driver needs to know of the answers."""
        n = task.sampling.num_samples
        shares = np.array_split(np.arange(len(task.rows)), self._group.world)
        tasks = [
            GenerateTask(task.split, tuple(task.rows[i] for i in share), task.sampling, task.seed, task.step)
            for share in shares
        ]
        results = self._group.call_with_payload("generate", per_rank=[[each] for each in tasks], num_objects=2)
        samples = Samples(len(task.rows) * n)
        self.generated_ids = [(share[:, None] * n + np.arange(n)).ravel() for share in shares]
        having = [(ids, result) for ids, result in zip(self.generated_ids, results, strict=True) if len(ids)]
        for ids, (payload, texts, _) in having:
            samples.attach([Part(payload, _GENERATED, ids), Part(texts, ("text",), ids)])
        for name in ("prompt_length", "response_length", "truncated"):
            samples.update({name: np.concatenate([numbers[name] for _, (_, _, numbers) in having])})
        places = np.arange(len(task.rows)).repeat(n)
        samples.update({"group": places, "row": np.array(task.rows)[places]})
        return samples, m.worker_timing([numbers for *_, numbers in results])

    def log_probs(self, samples: Samples, layout: Layout) -> Metrics:
        """Attach ``old_log_probs``; returns the entropy and the gap between engine and trainer."""
        results = self._score("log_probs", samples, layout, [*_GENERATED], "old_log_probs")
        tokens = int(samples["response_length"].sum())
        entropy = sum(result["entropy_sum"] for result in results) / max(tokens, 1)
        return {"actor/entropy": entropy} | m.engine_gap_metrics(results, tokens)

    def ref_log_probs(self, samples: Samples, layout: Layout) -> None:
        """Attach ``ref_log_probs``."""
        self._score("ref_log_probs", samples, layout, [*_GENERATED[:3]], "ref_log_probs")

    def _score(
        self, method: str, samples: Samples, layout: Layout, columns: Sequence[str], made: str
    ) -> list[dict[str, Any]]:
        work = [[samples.request(ids, columns), layout.flat_sizes(rank)] for rank, ids in enumerate(layout.ids)]
        results = self._group.call_with_payload(method, per_rank=work, num_objects=1)
        samples.attach([Part(ref, (made,), ids) for (ref, _), ids in zip(results, layout.ids, strict=True) if len(ids)])
        return [numbers for _, numbers in results]

    def update(
        self, samples: Samples, layout: Layout, work: list[list[MiniBatch]], learning_rate: float
    ) -> list[dict[str, Any]]:
        """Run the optimizer steps; returns what each rank summed."""
        columns = ["tokens", "prompt_length", "response_length", "old_log_probs"]
        columns += ["ref_log_probs"] if self._has_kl_loss else []
        args = [
            [samples.request(ids, columns, numbers=["advantage"]), mini_batches, learning_rate]
            for ids, mini_batches in zip(layout.ids, work, strict=True)
        ]
        return self._group.call("update", per_rank=args)

    def take_driver_bytes(self) -> int:
        """Bytes that went through the driver since the last call."""
        taken, self._group.bytes_through_driver = self._group.bytes_through_driver, 0
        return taken


class Scorers:
    """Rule rewards, computed in their own processes from texts that never pass through the driver."""

    def __init__(self, pool: RewardPool, rows: dict[str, Rows]) -> None:
        self._pool = pool
        self._rows = rows

    @property
    def has_validation(self) -> bool:
        return "val" in self._rows

    def num_rows(self, split: str) -> int:
        return len(self._rows[split])

    def data_sources(self, split: str) -> list[str]:
        return [row.data_source for row in self._rows[split]]

    def score(self, split: str, samples: Samples) -> dict[str, np.ndarray]:
        """``score`` and ``reward`` (the same until something is subtracted), failures, and the scorer's extra columns [n]."""
        parts = samples.parts_with("text")
        jobs = [(part.ref, samples["row"][part.ids], np.arange(len(part.ids))) for part in parts]
        ids = np.concatenate([part.ids for part in parts])
        results = self._pool.score(split, jobs)
        ordered = {name: _in_order(values, ids) for name, values in results.items()}
        return ordered | {"reward": ordered["score"]}


def _in_order(values: np.ndarray, ids: Ids) -> np.ndarray:
    placed = np.empty(len(values), dtype=np.float64)
    placed[ids] = values
    return placed
