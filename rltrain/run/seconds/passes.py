"""Time of the passes over samples, with a run's layout code and the FLOPs of its metrics. Ranks synchronise at every
micro-batch, so each micro-batch takes as long as the rank with the most work. The weights of a layer are gathered while
the previous layer computes, so only the longer of the two times is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rltrain.config.passes import PASSES
from rltrain.config.schema import ActorConfig
from rltrain.run.seconds.assumptions import Assumptions
from rltrain.run.seconds.lengths import Ints
from rltrain.trainer.batching.balance import Workload, cost_of, lay_out
from rltrain.trainer.batching.mini_batches import cut_prompts
from rltrain.trainer.metrics.timing import flops_metrics
from rltrain.trainer.plan import Plan

# Transfers of a pass, by whether it is an update: an update gathers weights for the forward and again for the backward
# pass, and sends as many gradients. Its samples also have three times as much data.
_ROUNDS = {True: 3, False: 1}


@dataclass(frozen=True)
class PassSpeed:
    """Speed of the devices in a pass, and fixed times."""

    flops: float
    """FLOP/s of all devices of a data-parallel rank."""
    token_s: float
    """Time to write and read the activations of a token between the matrix products."""
    gather_s: float
    """Time to gather the weights of a micro-batch."""
    micro_batch_s: float
    sample_s: float
    optimizer_s: float
    """Fixed time of an optimizer step. (The two times above are per micro-batch and per sample.)"""


def time_pass(
    name: str, mini_batches: Sequence[Ints], work: Workload, plan: Plan, sizes: Mapping[str, float], speed: PassSpeed
) -> tuple[float, str]:
    """Return the seconds of the pass ``name`` over the samples of ``mini_batches``, and their parts as text.

    sizes: sizes of the models, as reported by workers.
    """
    mini_batches = [ids for ids in mini_batches if len(ids)]
    if not mini_batches:
        return 0.0, ""
    ranks = plan.ranks[PASSES[name].role]
    nodes = [rank * plan.num_nodes // ranks for rank in range(ranks)]
    layout = lay_out(mini_batches, work, ranks, plan.budgets[name], nodes)
    cost = cost_of(layout, work)
    metrics = flops_metrics({name: cost}, {f"timing_s/{name}": 1.0}, sizes, 1)
    per_cost = metrics[f"perf/tflops/{PASSES[name].rate}"] * 1e12 / max(cost.cost, 1e-9)

    def micro_batch_s(ids: Ints) -> float:
        return work.cost(ids) * per_cost / speed.flops + work.tokens(ids) * speed.token_s

    turns = zip(*(layout.micro_batches(rank) for rank in range(ranks)), strict=True)
    slowest = np.array([max(map(micro_batch_s, turn)) for turn in turns])
    learning = PASSES[name].updates
    fixed = len(slowest) * speed.micro_batch_s + (len(mini_batches) * speed.optimizer_s if learning else 0.0)
    fixed += max(map(len, layout.ids)) * speed.sample_s * _ROUNDS[learning]
    together = float(np.maximum(slowest, speed.gather_s * _ROUNDS[learning]).sum())
    compute = (cost.cost * per_cost / speed.flops + cost.tokens * speed.token_s) / ranks
    # Compute time with equally busy ranks; time waiting for slower ranks, and for weights.
    parts = f"compute {compute:,.2f}, waiting {together - compute:,.2f}, fixed {fixed:,.2f} s"
    return together + fixed, f"{len(slowest):,} micro-batch{'es' * (len(slowest) != 1)} of a rank: {parts}"


def mini_batches_of(
    name: str, actor: ActorConfig, critic_epochs: int, seed: int, plan: Plan, assumed: Assumptions
) -> list[Ints]:
    """Return the samples of each optimizer step of an update, or all samples for another pass."""
    everything = np.arange(plan.samples_per_step)
    if name == "update_critic":
        return cut_prompts(plan, plan.critic_prompts_per_mini_batch, critic_epochs, 1, seed)
    cut = cut_prompts(plan, plan.prompts_per_mini_batch, actor.ppo_epochs, 1, seed if actor.shuffle else None)
    if name == "old_log_prob" and plan.passes.waits_for_update(max(1, plan.passes.first_actor_step)):
        return [np.setdiff1d(everything, cut[0])]
    if name != "update_actor":
        return [everything]
    if not plan.passes.skips_silent:
        return cut
    # Groups without a gradient: every n-th prompt.
    zero_advantage = np.arange(plan.prompts_per_step) < round(assumed.silent_share * plan.prompts_per_step)
    zero_advantage = np.random.default_rng(0).permutation(zero_advantage).repeat(plan.answers_per_prompt)
    return [ids[~zero_advantage[ids]] for ids in cut]
