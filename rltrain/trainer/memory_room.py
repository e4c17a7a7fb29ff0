"""Whether the phases of a step fit a device: the table that a dry run prints, and the keys that would make them fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import reduce
from typing import Any

from rltrain.config.budgets import longest_sequence
from rltrain.config.schema import Config
from rltrain.device import get_device
from rltrain.errors import RltrainError
from rltrain.models.shadow import Owners
from rltrain.models.ulysses import heads_problem
from rltrain.trainer.memory import OWNERS, forecast
from rltrain.trainer.plan import Plan, make_plan

# Of a device, what its driver, communicators and the gaps between blocks take.
_KEPT_FREE = 0.08
_A, _R, _C = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "critic."
_GIB = 2**30


def device_bytes(cfg: Config) -> int | None:
    """Memory of one device: of ``trainer.device_memory_gb``, else of the device here; None where neither is known."""
    if cfg.trainer.device_memory_gb:
        return round(cfg.trainer.device_memory_gb * _GIB)
    device = get_device(cfg.trainer.device)
    return None if device.is_cpu or not device.count else device.memory_bytes


def look_at_memory(cfg: Config, plan: Plan) -> tuple[list[str], str]:
    """The table of phases, and what is wrong with it ("" where it fits or nobody knows)."""
    if get_device(cfg.trainer.device).is_cpu:
        return [], ""
    size = device_bytes(cfg)
    try:
        found = forecast(cfg, plan, size)
    except RuntimeError as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        return [f"memory of a device: not foretold, as this model's forward depends on numbers ({said})"], ""
    over = too_large(found, size)
    problem = f"{_over(found, over, size)} {_way_out(cfg, plan, size)}" if size and over else ""
    return [table(found, size)], problem


def table(found: Mapping[str, Owners], size: int | None) -> str:
    """A row per phase, a column per owner."""
    owners = [owner for owner in OWNERS if any(row[owner] for row in found.values())]
    lines = [["", *owners, "together"]]
    lines += [
        [phase, *(f"{row[owner] / _GIB:,.2f}" for owner in owners), f"{row.total() / _GIB:,.2f}"]
        for phase, row in found.items()
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rows = [row[: widths[0]].strip().ljust(widths[0]) + row[widths[0] :] for row in rows]
    has = f"it has {size / _GIB:,.1f}, of which {_KEPT_FREE:.0%} are for driver and communicators" if size else (
        "set trainer.device_memory_gb to its size to be told whether it fits"
    )  # fmt: skip
    return "\n  ".join([f"memory of a device in GiB, at the fullest micro-batch ({has})", *rows])


def too_large(found: Mapping[str, Owners], size: int | None) -> list[str]:
    """The phases that do not fit."""
    return [phase for phase, row in found.items() if size and row.total() > (1 - _KEPT_FREE) * size]


def _over(found: Mapping[str, Owners], phases: list[str], size: int) -> str:
    needs = ", ".join(f"{phase} needs {found[phase].total() / _GIB:,.1f} GiB" for phase in phases)
    return f"{needs} of a device's {(1 - _KEPT_FREE) * size / _GIB:,.1f}."


def _way_out(cfg: Config, plan: Plan, size: int) -> str:
    """The keys with which all phases fit, as computed: one that is enough, or several together."""
    alone, together, all_ = [], [], deepcopy(cfg)
    before = forecast(cfg, plan, size)
    for key, value in _changes(cfg):
        changed = _with(cfg, key, value)
        found = _again(changed, plan, size)
        if found is None or not any(found[phase].total() < before[phase].total() for phase in too_large(before, size)):
            continue
        if not too_large(found, size):
            most = max(found.values(), key=lambda row: row.total()).total()
            alone.append(f"{key}={_text(value)} ({most / _GIB:,.1f})")
            continue
        all_ = _with(all_, key, value)
        together = [each for each in together if each[0] != key] + [(key, value)]
        found = _again(all_, plan, size)
        if not alone and found is not None and not too_large(found, size):
            words = " ".join(f"{name}={_text(setting)}" for name, setting in together)
            return f"These together make it fit: {words}."
    if alone:
        return f"Any one of these makes it fit (GiB then): {', '.join(alone)}."
    return "No key that keeps the algorithm makes it fit: use more devices, or a smaller model."


def _again(cfg: Config, plan: Plan, size: int) -> dict[str, Owners] | None:
    try:
        return forecast(cfg, make_plan(cfg, plan.num_prompts, images=plan.images), size)
    except (RltrainError, RuntimeError):
        return None


def _changes(cfg: Config) -> Iterator[tuple[str, Any]]:
    """Settings that need less memory, the ones that cost least time first."""
    roles, critic = cfg.actor_rollout_ref, cfg.algorithm.needs_critic
    yield "actor_rollout_ref.model.enable_gradient_checkpointing", True
    offloads = [f"{_A}fsdp_config.optimizer_offload", "actor_rollout_ref.ref.fsdp_config.param_offload"]
    offloads += [f"{_C}model.fsdp_config.{each}_offload" for each in ("optimizer", "param")] if critic else []
    for key in (*offloads, f"{_A}fsdp_config.param_offload"):
        yield key, True
    for share in (0.4, 0.3, 0.2, 0.1):
        if share < roles.rollout.gpu_memory_utilization:
            yield f"{_R}gpu_memory_utilization", share
    tokens, group = roles.actor.ppo_max_token_len_per_gpu, roles.actor.ulysses_sequence_parallel_size
    while tokens and tokens // 2 * group >= longest_sequence(cfg):
        tokens //= 2
        yield f"{_A}ppo_max_token_len_per_gpu", tokens
    for parts in (2, 4, 8):
        if parts > group and cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node % parts == 0:
            yield f"{_A}ulysses_sequence_parallel_size", parts
    yield "actor_rollout_ref.model.lora_rank", 32


def _with(cfg: Config, key: str, value: Any) -> Config:
    changed = deepcopy(cfg)
    section, _, leaf = key.rpartition(".")
    setattr(reduce(getattr, section.split("."), changed), leaf, value)
    return changed


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
