"""Checks of `trainer.overlap`: each group of devices holds all weights, and no answer is dropped later."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rltrain.config.schema import Config
from rltrain.config.schema.keys import get
from rltrain.config.step_passes import make_step_passes

_ROLES = "actor_rollout_ref."
_ENGINE = _ROLES + "rollout.tensor_model_parallel_size"
_SHARDS = _ROLES + "actor.fsdp_config.fsdp_size"
_SEQUENCE = _ROLES + "actor.ulysses_sequence_parallel_size"
_REF_SEQUENCE = _ROLES + "ref.ulysses_sequence_parallel_size"


def ranks_with_all_weights(config: Config) -> int:
    """So many neighbouring devices are whole engines, and have all weights and sequences among them."""
    return math.lcm(*_sizes(config).values())


def _sizes(config: Config) -> dict[str, int]:
    """By key: the devices of an engine, of a copy of the weights, and of a sequence in each pass."""
    devices, shards = config.trainer.nnodes * config.trainer.n_gpus_per_node, get(config, _SHARDS)
    sizes = {_ENGINE: get(config, _ENGINE), _SHARDS: shards if 0 < shards < devices else devices}
    sizes[_SEQUENCE] = get(config, _SEQUENCE)
    # Without a pass of its own a reference has no sequences to share, and mostly its size is the actor's.
    if make_step_passes(config).ref and (size := get(config, _REF_SEQUENCE)) != sizes[_SEQUENCE]:
        sizes[_REF_SEQUENCE] = size
    return {key: max(size, 1) for key, size in sizes.items()}


def overlap_problems(config: Config) -> Iterator[str]:
    """What `trainer.overlap` cannot stand beside."""
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    devices, engine = config.trainer.nnodes * config.trainer.n_gpus_per_node, rollout.tensor_model_parallel_size
    if not config.trainer.overlap or devices == 1:
        return
    if ranks_with_all_weights(config) >= devices > engine:
        # Those that make it more than an engine.
        sizes = {key: size for key, size in _sizes(config).items() if engine % size}
        over = dict.fromkeys(sizes, "sequence is spread over") | {_SHARDS: "layer is gathered from"}
        why = " and ".join(
            f"with {key}={get(config, key)} a {over[key]} {'all ' if size == devices else ''}{size} of them"
            for key, size in sizes.items()
        )
        yield (
            f"trainer.overlap=True has devices compute log-probs while others still generate, but {why}. Set "
            f"{' and '.join(f'{key}={engine}' for key in sizes)}, as many as an engine has (--dry-run says what a "
            "device then holds), or leave overlap out."
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
