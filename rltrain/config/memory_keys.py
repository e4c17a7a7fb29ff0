"""Keys that reduce the memory of a device, by phase and owner.

The dry run suggests them for a phase that does not fit, and so does the out-of-memory error. They do not search for
values that fit; rerun the dry run with the changed key.
"""

from __future__ import annotations

from collections.abc import Iterator

from rltrain.config.budgets import decide, longest_sequence, ranks_per_sequence
from rltrain.config.passes import JUDGE_PHASE, PASSES
from rltrain.config.schema import Config
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.keys import get
from rltrain.config.step_passes import offloads

_R = "actor_rollout_ref.rollout."
_SWITCHES = ("enable_gradient_checkpointing", "enable_activation_offload")
# Phase -> owner -> keys, without the budgets of passes, the offloads and the keys of the engine.
_KEYS: dict[str, dict[str, tuple[str, ...]]] = {
    "sync": {"gathered": (_R + "update_weights_bucket_megabytes",)},
    "gen": {"cache": (_R + "max_num_seqs",)},
    JUDGE_PHASE: {"cache": ("reward_model.rollout.max_num_seqs", "reward_model.rollout.response_length")},
    "update_actor": {"activations": tuple(f"actor_rollout_ref.model.{name}" for name in _SWITCHES)},
    "update_critic": {"activations": tuple(f"critic.model.{name}" for name in _SWITCHES)},
}


def memory_keys(config: Config, phase: str) -> Iterator[tuple[str, str]]:
    """Yield the owner of memory, as in the forecast, and the change of a key that reduces it in ``phase``."""
    rollout = config.actor_rollout_ref.rollout
    stays = not ENGINES[rollout.name].embedded and not rollout.free_cache_engine
    for owner, keys in _KEYS.get(phase, {}).items():
        yield from ((owner, change) for key in keys for change in _own(config, key))
    if phase == "gen" or stays:
        yield "cache", _less(config, _R + "gpu_memory_utilization")
    if stays and phase not in ("sync", "gen"):
        yield "engine weights", f"{_R}free_cache_engine=True"
    if phase in PASSES:
        yield from (("activations", change) for change in _budget(config, phase))
    for key, phases in offloads(config):
        if phase not in phases and get(config, key) is False:
            yield "optimizer" if key.endswith("optimizer_offload") else "weights", f"{key}=True"


def _own(config: Config, key: str) -> Iterator[str]:
    value = get(config, key)
    if value is False or (value is not True and key.endswith("enable_gradient_checkpointing")):
        yield f"{key}=True"
    elif value is not True and value > 1:
        yield _less(config, key)


def _less(config: Config, key: str) -> str:
    return f"{key} less than {get(config, key)}"


def _budget(config: Config, name: str) -> Iterator[str]:
    """Yield the key that sets the budget of a forward of the pass, or the parallelism if the budget is minimal."""
    keys = PASSES[name].keys
    key, group = decide(config, keys)[1], ranks_per_sequence(config, keys)
    by_tokens = key.endswith("max_token_len_per_gpu")
    if key and get(config, key) > (-(-longest_sequence(config) // group) if by_tokens else 1):
        yield _less(config, key)
    elif keys.sharing and config.trainer.nnodes * config.trainer.n_gpus_per_node % (2 * group) == 0:
        # The number of tokens is per device, so more devices reduce memory only if it is lowered.
        tokens = f" with {_less(config, key)}" if by_tokens else ""
        size = get(config, f"{keys.sharing}.ulysses_sequence_parallel_size")
        yield f"{keys.sharing}.ulysses_sequence_parallel_size={2 * size}{tokens}"
