"""What a device that is out of memory ends the run with: the phase, what was there by owner, and the keys to type."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist

from rltrain.base.device import resolve_dtype
from rltrain.base.errors import WorkerLost
from rltrain.config.budgets import smaller
from rltrain.config.passes import JUDGE_PHASE, PASSES
from rltrain.config.schema import Config
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.keys import get
from rltrain.config.step_passes import offloads
from rltrain.workers.residency import Residency

_R = "actor_rollout_ref.rollout."
_OF_ACTIVATIONS = ("enable_gradient_checkpointing", "enable_activation_offload")
# What makes room in a phase, beside its budget and what rests on the device for others.
_OWN_KEYS = {
    "sync": (_R + "update_weights_bucket_megabytes",),
    "gen": (_R + "max_num_seqs",),
    JUDGE_PHASE: tuple(f"reward_model.rollout.{name}" for name in ("max_num_seqs", "response_length")),
    "update_actor": tuple(f"actor_rollout_ref.model.{name}" for name in _OF_ACTIVATIONS),
    "update_critic": tuple(f"critic.model.{name}" for name in _OF_ACTIVATIONS),
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that a device had no room; not every back end has a type for it."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def device_is_full(error: Exception, cfg: Config, residency: Residency) -> WorkerLost:
    """The error that ends the run, in the phase that ``residency`` has entered."""
    device, phase = residency.device, residency.phase
    resting = residency.resting()
    allocated = device.allocated_bytes()
    parts = [f"{name} {_gib(size)}" for name, size in resting.items() if size]
    rest = ", ".join([*parts, f"{_gib(allocated - resting.total())} of engine, activations and gathered weights"])
    rollout, policy = cfg.actor_rollout_ref.rollout, [residency.models["actor"]] if residency.models else []
    elements = sum(each.numel() for model in policy for name, each in model.named_parameters() if ".lora_" not in name)
    engine = elements * resolve_dtype(rollout.dtype, device).itemsize // rollout.tensor_model_parallel_size
    least = 0.0 if ENGINES[rollout.name].embedded else least_share(engine, device.total_memory_bytes())
    keys = "\n  ".join(ways_out(cfg, phase, least)) or "more devices"
    where, size = f"rank {dist.get_rank()}, {phase}", _gib(device.total_memory_bytes())
    text = str(error).strip().splitlines()[0]
    return WorkerLost(
        f"{where}: the device ({size}) is out of memory. There were {rest}. ({text})\nMake room with one of\n  {keys}\n"
        "--dry-run tells what every phase needs."
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"


def least_share(engine: float, size: float) -> float:
    """The share of a device of ``size`` bytes with which an engine of so many starts."""
    # A fifth for keys and values is little, but it starts.
    return math.ceil(20 * 1.2 * engine / size) / 20


def ways_out(cfg: Config, phase: str, least: float) -> Iterator[str]:
    """KEY=VALUE, as far as it makes room in ``phase``. least: share of the device with which the engine starts."""
    rollout = cfg.actor_rollout_ref.rollout
    stays = not ENGINES[rollout.name].embedded and not rollout.free_cache_engine
    for key in _OWN_KEYS.get(phase, ()):
        value = get(cfg, key)
        if value is False:
            yield f"{key}=True"
        elif value is not True and value > 1:
            yield f"{key}={value // 2}"
    share = max(rollout.gpu_memory_utilization / 2, least)
    if (phase == "gen" or stays) and share < rollout.gpu_memory_utilization:
        yield f"{_R}gpu_memory_utilization={share:g}"
    for settings in islice(smaller(cfg, phase) if phase in PASSES else (), 1):
        yield " ".join(f"{key}={value}" for key, value in settings.items())
    if stays and phase not in ("sync", "gen"):
        yield f"{_R}free_cache_engine=True"
    yield from (f"{key}=True" for key, phases in offloads(cfg) if phase not in phases and get(cfg, key) is False)
