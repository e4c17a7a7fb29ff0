"""Mini-batches of a step: samples per optimizer step, and the denominators of their loss.

Problem: if every rank cut its local samples, the number of devices would change the optimizer steps. Choice: the driver
cuts the whole batch by prompts before it is spread over ranks, and counts the denominators over the whole mini-batch.
Left out: micro-batches (`balance`), because they do not change the result of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rltrain.algorithms.aggregation import Denominators
from rltrain.common.columns import names as c
from rltrain.common.seeds import stream
from rltrain.runtime.samples import Samples
from rltrain.trainer.batching.balance import Ids, Layout
from rltrain.trainer.plan import Plan
from rltrain.workers.interface.tasks import MiniBatch


def cut_prompts(plan: Plan, prompts_per_mini_batch: int, epochs: int, step: int, seed: int | None) -> list[Ids]:
    """Return the sample ids of each optimizer step: whole prompt groups, every prompt once per epoch over the batch.

    seed: reshuffles the prompts in every step and epoch (None: no shuffling).
    """
    n = plan.answers_per_prompt
    mini_batches: list[Ids] = []
    for epoch in range(epochs):
        prompts = np.arange(plan.prompts_per_step)
        if seed is not None:
            # Sorts raw numbers instead of calling `permutation`, because NumPy guarantees only the raw stream across
            # versions. The sort is stable, so the order is unique even with equal keys.
            keys = stream(seed, "mini_batches", step, epoch)
            prompts = np.argsort(keys.random_raw(len(prompts)), kind="stable")
        chunks = prompts.reshape(-1, prompts_per_mini_batch)
        # Samples are prompt-major: the responses to prompt p are p * n to p * n + n - 1.
        mini_batches += [(chunk[:, None] * n + np.arange(n)).ravel() for chunk in chunks]
    return mini_batches


def denominators(loss_tokens: Ids, groups: Ids, loss_scale_factor: int) -> Denominators:
    """Return the denominators of a mini-batch from loss tokens and groups [n]. Samples without loss tokens are
    ignored."""
    counts = loss_tokens > 0
    return Denominators(int(loss_tokens.sum()), int(counts.sum()), loss_scale_factor, len(np.unique(groups[counts])))


def num_tokens(samples: Samples) -> Ids:
    """Return prompt and response tokens of each sample."""
    return samples[c.PROMPT_LENGTH] + samples[c.RESPONSE_LENGTH]


def per_rank(layout: Layout, counts: Sequence[Denominators], num_waiting: int = 0) -> list[list[MiniBatch]]:
    """Return the mini-batches of every rank. num_waiting: number of mini-batches, counted from the first, that have no
    old log-probs yet."""
    have = [number >= num_waiting for number in range(len(counts))]
    return [[MiniBatch(*part) for part in zip(sizes, counts, have, strict=True)] for sizes in layout.micro_sizes]
