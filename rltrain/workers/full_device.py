"""What a device that is out of memory ends the run with: the phase, what was there by owner, and the keys to type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rltrain.config.budgets import longest_sequence
from rltrain.config.keys import get
from rltrain.config.schema import Config
from rltrain.device import Device
from rltrain.errors import WorkerLost
from rltrain.workers.residency import Residency

_A, _R, _REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
_FSDP = "fsdp_config."
_STEP = {"rollout": "gen", "log_prob": "old_log_prob", "train_actor": "update_actor", "train_critic": "update_critic"}
# What makes room in a phase, beside what rests on the device for others.
_OWN_KEYS = {
    "sync": (_R + "update_weights_bucket_megabytes",),
    "rollout": (_R + "gpu_memory_utilization", _R + "max_num_seqs"),
    "log_prob": (_R + "log_prob_max_token_len_per_gpu", _A + "ppo_max_token_len_per_gpu"),
    "ref": (_REF + "log_prob_max_token_len_per_gpu", _A + "ppo_max_token_len_per_gpu"),
    "values": ("critic.forward_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"),
    "train_actor": ("actor_rollout_ref.model.enable_gradient_checkpointing", _A + "ppo_max_token_len_per_gpu"),
    "train_critic": ("critic.model.enable_gradient_checkpointing", "critic.ppo_max_token_len_per_gpu"),
    "reward": ("reward_model.forward_max_token_len_per_gpu",),
}
_OFFLOADS = (
    _REF + _FSDP + "param_offload", _A + _FSDP + "optimizer_offload", _A + _FSDP + "param_offload",
    "critic.model.fsdp_config.optimizer_offload", "critic.model.fsdp_config.param_offload",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that a device had no room; not every back end has a type for it."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def device_is_full(error: Exception, cfg: Config, residency: Residency) -> WorkerLost:
    """The error that ends the run, in the phase that ``residency`` has entered."""
    device, phase = residency.device, residency.phase
    parameters = list({id(each): each for model in residency.models for each in model.parameters()}.values())
    states = [each for one in residency.optimizers for state in one.state.values() for each in state.values()]
    resting = {
        "weights": _bytes(parameters, device),
        "gradients": _bytes([each.grad for each in parameters], device),
        "optimizer": _bytes(states, device),
    }
    used = device.allocated_bytes()
    there = ", ".join(f"{name} {_gib(size)}" for name, size in resting.items() if size)
    rest = f"{there}, and {_gib(used - sum(resting.values()))} of engine, activations and gathered weights"
    keys = "\n  ".join(_ways_out(cfg, phase)) or "more devices"
    where, size = f"rank {dist.get_rank()}, {_STEP.get(phase, phase)}", _gib(device.total_memory_bytes())
    said = str(error).strip().splitlines()[0]
    return WorkerLost(
        f"{where}: the device ({size}) is out of memory. There were {rest}. ({said})\nMake room with one of\n  {keys}\n"
        "--dry-run tells what every phase needs. The same command then goes on from the newest checkpoint."
    )


def _bytes(tensors: Iterable[Any], device: Device) -> int:
    """Of the tensors that are on the device; one storage counts once."""
    own = [each.to_local() if isinstance(each, DTensor) else each for each in tensors if isinstance(each, Tensor)]
    storages = [each.untyped_storage() for each in own if each.device.type == device.kind]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"


def _ways_out(cfg: Config, phase: str) -> Iterator[str]:
    """KEY=VALUE, where the value is not that already."""
    group = cfg.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    for key in (*_OWN_KEYS.get(phase, ()), *_OFFLOADS):
        value = get(cfg, key)
        section = key.split(".")[0]
        if section == "critic" and not cfg.algorithm.needs_critic:
            continue
        if isinstance(value, bool):
            if value is False:
                yield f"{key}=True"
        elif value and key.endswith("token_len_per_gpu"):
            least = -(-longest_sequence(cfg) // group)
            if value > least:
                yield f"{key}={max(value // 2, least)}"
            else:
                yield f"{_A}ulysses_sequence_parallel_size={2 * group}"
        elif value:
            yield f"{key}={value / 2 if isinstance(value, float) else max(value // 2, 1)}"
