"""Whether the phases of a step fit a device: the table that a dry run prints, and the keys that would make them fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from typing import Any

from rltrain.base.device import get_device
from rltrain.base.errors import RltrainError
from rltrain.config.budgets import budget_problems, smaller
from rltrain.config.passes import has_critic
from rltrain.config.schema import Config
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.keys import get
from rltrain.config.step_passes import offloads
from rltrain.run.preflight.fake_run import Owners
from rltrain.run.preflight.memory import OWNERS, forecast, longest_cache_bytes
from rltrain.trainer.plan import Plan, make_plan
from rltrain.workers.full_device import least_share

# Of a device, what its driver, communicators and the gaps between blocks take.
_KEPT_FREE = 0.08
_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_GIB = 2**30


def device_bytes(cfg: Config) -> int | None:
    """Memory of one device: of ``trainer.device_memory_gb``, else of the device here; None where neither is known."""
    if cfg.trainer.device_memory_gb:
        return round(cfg.trainer.device_memory_gb * _GIB)
    device = get_device(cfg.trainer.device)
    if device.is_cpu or not device.count:
        return None
    try:
        return device.total_memory_bytes()
    except (AssertionError, RuntimeError):  # devices that are shown, and that this torch or driver cannot use
        return None


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
    if size is None:
        return [table(found, size)], ""
    over = too_large(found, size)
    problem = f"{_over(found, over, size)} {way_out(cfg, plan, size, found)}" if over else ""
    return [table(found, size)], " ".join(filter(None, [problem, no_cache(cfg, found["gen"], size)]))


def no_cache(cfg: Config, gen: Owners, size: int) -> str:
    """What to say of an engine whose weights leave no room for one longest answer within its share, else ""."""
    rollout, weights = cfg.actor_rollout_ref.rollout, gen["engine weights"]
    if ENGINES[rollout.name].embedded:
        said = f"its weights ({weights / _GIB:,.1f} GiB) leave no room for one answer of the longest."
        return "" if gen["cache"] else f"{_R}name={rollout.name}: {said}"
    longest = longest_cache_bytes(cfg)
    if gen["cache"] >= longest:
        return ""
    least = least_share(weights + longest, size)
    size_key, parts = f"{_R}tensor_model_parallel_size", 2 * rollout.tensor_model_parallel_size
    way_out = f"{_R}gpu_memory_utilization={least:g}, or {size_key}={parts}" if least < 0.9 else f"{size_key}={parts}"
    share = rollout.gpu_memory_utilization
    return (
        f"{_R}gpu_memory_utilization={share:g} is {share * size / _GIB:,.1f} GiB, and the engine's weights take "
        f"{weights / _GIB:,.1f} of it, so that no answer of the longest has room. Set {way_out}."
    )


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


def way_out(cfg: Config, plan: Plan, size: int, before: Mapping[str, Owners]) -> str:
    """The keys with which all phases fit, as computed: such as are enough alone, or several together."""
    alone: dict[tuple[str, ...], str] = {}
    fitting = "This makes it fit", "Any one of these makes it fit"
    settings: dict[str, Any] = {}
    over = too_large(before, size)
    had_none = "gen" in before and no_cache(cfg, before["gen"], size)
    looked_at = [*over, *(["gen"] if "gen" in before else [])]

    def then(change: Mapping[str, Any]) -> dict[str, Owners] | None:
        """What these phases need with ``change``; None where it does not help, or nothing would start."""
        changed = _with(cfg, change)
        found = None if any(budget_problems(changed)) else _again(changed, plan, size, looked_at)
        if found is None or not any(found[phase].total() < before[phase].total() for phase in over):
            return None
        return None if "gen" in found and no_cache(changed, found["gen"], size) and not had_none else found

    for change in _changes(cfg):
        found = None if tuple(change) in alone else then(change)
        if found is None:
            continue
        if not too_large(found, size):
            alone[tuple(change)] = f"{_text(change)} ({_most(found)})"
            if len(alone) == 3:
                break
        elif not alone:
            settings |= change
            found = then(settings) if len(settings) > len(change) else found
            if found is not None and not too_large(found, size):
                return f"Together these make it fit: {_text(settings)} ({_most(found)})."
    if alone:
        return f"{fitting[len(alone) > 1]}: {'; '.join(alone.values())}."
    adapters = {} if cfg.actor_rollout_ref.model.uses_lora else {"actor_rollout_ref.model.lora_rank": 32}
    those = ((change, then(change)) for change in (adapters, settings | adapters) if adapters)
    other = (
        f"; or train adapters alone, which is another training: {_text(change)} ({_most(found)})"
        for change, found in those
        if found is not None and not too_large(found, size)
    )
    return f"No key that keeps the algorithm makes it fit: use more devices, or a smaller model{next(other, '')}."


def _most(found: Mapping[str, Owners]) -> str:
    return f"{max(row.total() for row in found.values()) / _GIB:,.1f} GiB"


def _again(cfg: Config, plan: Plan, size: int, phases: Sequence[str]) -> dict[str, Owners] | None:
    """What these phases need then; None where the settings do not go together."""
    try:
        return forecast(cfg, make_plan(cfg, plan.num_prompts, images=plan.images), size, phases)
    except (RltrainError, RuntimeError):
        return None


def _changes(cfg: Config) -> Iterator[dict[str, Any]]:
    """Settings that need less memory, the ones that cost least time first; of one key the largest first."""
    roles, critic = cfg.actor_rollout_ref, has_critic(cfg)
    switches = ["actor_rollout_ref.model.enable_gradient_checkpointing", *(key for key, _ in offloads(cfg))]
    yield from ({key: True} for key in (f"{_R}free_cache_engine", *switches) if get(cfg, key) is False)
    for share in (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1):
        if share < roles.rollout.gpu_memory_utilization:
            yield {f"{_R}gpu_memory_utilization": share}
    for name in ("update_actor", "update_critic") if critic else ("update_actor",):
        yield from smaller(cfg, name)


def _with(cfg: Config, settings: Mapping[str, Any]) -> Config:
    changed, roles = deepcopy(cfg), cfg.actor_rollout_ref
    shared = f"{_A}ulysses_sequence_parallel_size"
    if shared in settings and roles.ref.ulysses_sequence_parallel_size == roles.actor.ulysses_sequence_parallel_size:
        settings = {"actor_rollout_ref.ref.ulysses_sequence_parallel_size": settings[shared], **settings}  # its default
    for key, value in settings.items():
        section, _, leaf = key.rpartition(".")
        setattr(reduce(getattr, section.split("."), changed), leaf, value)
    return changed


def _text(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())
