"""When `trainer.overlap` can be: devices that can do without the others, and a batch that is known as it is made."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rltrain.config.schema import Config

_SHARDS = "actor_rollout_ref.actor.fsdp_config.fsdp_size"


def ranks_with_all_weights(config: Config) -> int:
    """So many neighbouring devices are whole engines, and have all weights and sequences among them."""
    roles, devices = config.actor_rollout_ref, config.trainer.nnodes * config.trainer.n_gpus_per_node
    shards = roles.actor.fsdp_config.fsdp_size
    sizes = [roles.rollout.tensor_model_parallel_size, shards if 0 < shards < devices else devices]
    sizes += [roles.actor.ulysses_sequence_parallel_size, roles.ref.ulysses_sequence_parallel_size]
    return math.lcm(*(max(size, 1) for size in sizes))


def overlap_problems(config: Config) -> Iterator[str]:
    """What `trainer.overlap` cannot stand beside."""
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    devices, size = config.trainer.nnodes * config.trainer.n_gpus_per_node, rollout.tensor_model_parallel_size
    if not config.trainer.overlap or devices == 1:
        return
    if ranks_with_all_weights(config) >= devices > size:
        yield (
            "trainer.overlap=True has devices compute log-probs while others still generate, but with "
            f"{_SHARDS}={config.actor_rollout_ref.actor.fsdp_config.fsdp_size} a layer is gathered from all {devices} "
            f"of them. Set {_SHARDS}={size}, as many as an engine has (--dry-run says what a device then holds), or "
            "leave overlap out."
        )
    later = {
        f"actor_rollout_ref.rollout.tail={rollout.tail} chooses answers after they have ended": rollout.stops_early,
        "algorithm.filter_groups.enable=True chooses answers after they have ended": algorithm.filter_groups.enable,
        f"algorithm.adv_estimator={algorithm.adv_estimator} generates once more before any log-prob": (
            algorithm.estimator.greedy_baseline
        ),
    }
    for why in (why for why, so in later.items() if so):
        yield f"trainer.overlap=True: {why}. Keep one of them."
