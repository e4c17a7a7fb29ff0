"""A worker that computes nothing and returns columns of the right length, so that only the driver's time remains.

Tokens and log-probs are one byte each, so that many workers fit on one machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from queue import Empty, SimpleQueue

import numpy as np
import torch
import torch.distributed as dist

from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.workers.interface.results import GenerationNumbers, PassNumbers, UpdateNumbers
from rltrain.workers.interface.roles import Actor, Rollout
from rltrain.workers.interface.tasks import Finished, GenerateTask, UpdateTask


class IdleWorker(Actor, Rollout):
    """A worker whose responses have ``task.sampling.max_tokens`` tokens on average, plus or minus half.

    ranks: number of the driver's ranks for which this process stands, one after the other.
    """

    def __init__(self, prompt_tokens: int, ranks: int = 1) -> None:
        self.roles = [self]
        self._turns = itertools.cycle(range(dist.get_rank() * ranks, (dist.get_rank() + 1) * ranks))
        self._world, self._prompt_tokens = dist.get_world_size() * ranks, prompt_tokens
        self._finished: SimpleQueue[tuple[list[str], Finished]] = SimpleQueue()

    def generate(self, task: GenerateTask, begun: Batch | None = None) -> tuple[Batch, list[str], GenerationNumbers]:
        """Return the columns and numbers of `RolloutWorker.generate`, for a random fair share of the prompts."""
        rank = next(self._turns)
        drawn = np.random.default_rng(task.call).permutation(len(task.rows))
        places = np.sort(np.array_split(drawn, self._world)[rank])
        samples = np.tile(np.arange(task.num_samples), len(places))
        ids = (places[:, None] * task.num_samples + np.arange(task.num_samples)).ravel()
        mean = task.sampling.max_tokens
        lengths = np.random.default_rng(rank).integers(mean // 2, mean + mean // 2, len(ids), endpoint=True)
        texts = ["an answer"] * len(ids)
        self._finished.put((texts, Finished(places.repeat(task.num_samples), samples, True)))
        answers = Ragged(torch.zeros(int(lengths.sum()), dtype=torch.int8), torch.from_numpy(lengths))
        prompts = Ragged.from_rows([torch.zeros(self._prompt_tokens, dtype=torch.int8)] * len(places))
        index = torch.arange(len(places)).repeat_interleave(task.num_samples)
        payload = Batch({c.PROMPT: DictionaryColumn(prompts, index)})
        # Copies, because one tensor under several names would be sent once.
        payload.update({name: answers.like(answers.values.clone()) for name in c.ANSWER})
        numbers = {
            c.SLOT: ids,
            c.PROMPT_LENGTH: np.full(len(ids), self._prompt_tokens),
            c.RESPONSE_LENGTH: lengths,
            c.POLICY_TOKENS: lengths,
            c.LOSS_TOKENS: lengths,
            c.TRUNCATED: np.zeros(len(ids), bool),
            c.ABORTED: np.zeros(len(ids), bool),
            c.ENDED_S: np.ones(len(ids)),
        }
        return payload, texts, GenerationNumbers({"reshard": 1e-3, "generate_sequences": 1e-3}, None, numbers)

    def take_finished(self, wait_s: float) -> tuple[list[str], Finished]:
        """Return all texts at once, when they are ready."""
        try:
            return self._finished.get(timeout=wait_s)
        except Empty:
            nothing = np.zeros(0, dtype=np.int64)
            return [], Finished(nothing, nothing, False)

    def log_probs(self, batch: Batch, micro_sizes: Sequence[int]) -> tuple[Batch, PassNumbers]:
        """Return columns of the length of log-probs."""
        return self._column(batch, c.OLD_LOG_PROBS), PassNumbers()

    def ref_log_probs(self, batch: Batch, micro_sizes: Sequence[int]) -> tuple[Batch, PassNumbers]:
        """Return columns of the length of log-probs."""
        return self._column(batch, c.REF_LOG_PROBS), PassNumbers()

    def _column(self, batch: Batch, name: str) -> Batch:
        return Batch({name: batch.ragged(c.RESPONSE)} if len(batch) else {})

    def update(self, batch: Batch, task: UpdateTask) -> UpdateNumbers:
        """Return the numbers of the optimizer steps."""
        steps = np.zeros(len(task.mini_batches))
        shares = dict.fromkeys(("loss", "pg_loss", "kl_loss"), steps)
        token_sums = dict.fromkeys(("ppo_kl", "pg_clipfrac"), steps)
        return UpdateNumbers(steps, steps, shares, token_sums, maxima={"perf/cpu_memory_used_gb": 0.0})
