"""Check whether the phases of a step fit a device: the table of a dry run, and keys that reduce memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from rltrain.common.device import get_device
from rltrain.config.memory_keys import memory_keys
from rltrain.config.schema import Config
from rltrain.config.schema.engines import ENGINES
from rltrain.run.preflight.memory import OWNERS, forecast, longest_cache_bytes
from rltrain.run.preflight.meta_run import Owners
from rltrain.trainer.plan import Plan

# Share of a device for driver, communicators and fragmentation.
_KEPT_FREE = 0.08
_R = "actor_rollout_ref.rollout."
_GIB = 2**30


def device_bytes(cfg: Config) -> int | None:
    """Return the bytes of one device: ``trainer.device_memory_gb``, or else of a local device; None if unknown."""
    if cfg.trainer.device_memory_gb:
        return round(cfg.trainer.device_memory_gb * _GIB)
    device = get_device(cfg.trainer.device)
    if device.is_cpu or not device.count:
        return None
    try:
        return device.total_memory_bytes()
    except (AssertionError, RuntimeError):  # devices are visible, but not usable with this torch or driver
        return None


def check_memory(cfg: Config, plan: Plan) -> tuple[list[str], str]:
    """Return the table of phases, and the problem ("" if all fit, or if the memory is unknown)."""
    if get_device(cfg.trainer.device).is_cpu:
        return [], ""
    size = device_bytes(cfg)
    try:
        peaks = forecast(cfg, plan, size)
    except RuntimeError as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        return [f"memory of a device: not estimated: {message}"], ""
    if size is None:
        return [table(peaks, size)], ""
    problems = [_problem(cfg, phase, peaks[phase], size) for phase in too_large(peaks, size)]
    return [table(peaks, size)], " ".join(filter(None, [*problems, no_cache(cfg, peaks["gen"], size)]))


def no_cache(cfg: Config, gen: Owners, size: int) -> str:
    """Return the problem if an engine's weights leave no memory in its share for one longest response, else ""."""
    rollout, weights = cfg.actor_rollout_ref.rollout, gen["engine weights"]
    if ENGINES[rollout.name].embedded:
        message = f"its weights ({weights / _GIB:,.1f} GiB) leave no room for one response of maximum length."
        return "" if gen["cache"] else f"{_R}name={rollout.name}: {message}"
    if gen["cache"] >= (longest := longest_cache_bytes(cfg)):
        return ""
    # Suggest a share a fifth larger than the weights and one longest response. That is little, but enough to start.
    least, share = math.ceil(24 * (weights + longest) / size) / 20, rollout.gpu_memory_utilization
    way_out = f"{_R}gpu_memory_utilization={least:g}, or " * (least < 0.9)
    return (
        f"{_R}gpu_memory_utilization={share:g} is {share * size / _GIB:,.1f} GiB, and the engine's weights take "
        f"{weights / _GIB:,.1f} of it, so one response of maximum length does not fit. Set {way_out}"
        f"{_R}tensor_model_parallel_size={2 * rollout.tensor_model_parallel_size}."
    )


def table(peaks: Mapping[str, Owners], size: int | None) -> str:
    """Return the table: a row per phase, a column per owner."""
    frame = pd.DataFrame({owner: [row[owner] for row in peaks.values()] for owner in OWNERS}, list(peaks)) / _GIB
    frame = frame.loc[:, frame.any()]
    rows = frame.assign(together=frame.sum(axis=1)).to_string(float_format="{:,.2f}".format).splitlines()
    has = f"it has {size / _GIB:,.1f}, of which {_KEPT_FREE:.0%} are for driver and communicators" if size else (
        "set trainer.device_memory_gb to its size to check whether it fits"
    )  # fmt: skip
    return "\n  ".join([f"memory of a device in GiB, at the fullest micro-batch ({has})", *rows])


def too_large(peaks: Mapping[str, Owners], size: int | None) -> list[str]:
    """Return the phases that do not fit."""
    return [phase for phase, row in peaks.items() if size and row.total() > (1 - _KEPT_FREE) * size]


def _problem(cfg: Config, phase: str, owners: Owners, size: int) -> str:
    """Return the error for a phase that does not fit, with the keys that reduce its memory."""
    keys = [change for owner, change in memory_keys(cfg, phase) if owners[owner]]
    return (
        f"{phase} needs {owners.total() / _GIB:,.1f} GiB of a device's {(1 - _KEPT_FREE) * size / _GIB:,.1f}. "
        f"Make room with one of: {'; '.join([*keys, 'more devices'])}."
    )
