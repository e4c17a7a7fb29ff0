"""Check whether the phases of a step fit a device, and its processes a node: lines of a dry run, keys that help.

Host memory is the sum over the processes of the first node, which also has the driver and the export. Memory that is
kept until the end of a run (pinned copies) counts in full, memory of a step at its longest texts. On a CPU the models
themselves are in host memory, and nothing is estimated. Not counted: the page cache, the scoring processes, and what
user functions allocate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import pandas as pd

from rltrain.common.device import DEVICES, get_device
from rltrain.common.env import memory_left
from rltrain.config.budgets import longest_text
from rltrain.config.memory_keys import memory_keys
from rltrain.config.schema import Config
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.keys import get
from rltrain.config.step_passes import offloads
from rltrain.models.load import source_dtype
from rltrain.run.preflight.memory import OWNERS, engine_memory, forecast, longest_cache_bytes, roles_of
from rltrain.run.preflight.meta_run import Owners
from rltrain.trainer.plan import Plan

# Share of a device for driver, communicators and fragmentation.
_KEPT_FREE = 0.08
_R = "actor_rollout_ref.rollout."
_GIB = 2**30
# Resident memory of a worker after its imports: torch, transformers, Ray and vLLM on a CPU (0.65 GiB measured), and as
# much again for the driver of an accelerator, which was not measured.
_PROCESS = 1.3 * _GIB
# Ray ends workers at 95 % of a node's memory.
_USABLE = 0.92


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
    # Suggest 1.2 times the memory of the weights and of one response of maximum length, which is enough to start.
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


# -- host memory -------------------------------------------------------------------------------------------------------


def host_forecast(cfg: Config, plan: Plan) -> Counter[str]:
    """Return the bytes by owner on the node that needs most."""
    device, per_node = get_device(cfg.trainer.device), plan.devices_per_node
    roles, actor = roles_of(cfg, plan, device), cfg.actor_rollout_ref.actor
    offloaded = copies = activations = 0
    for name, role in roles.items():
        weights, learning, elements = role.sizes
        offloaded += weights if role.offload else 0
        if not role.learns:
            continue
        offloaded += role.moments if role.optimizer_offload else 0
        copies += (learning + role.moments) * per_node
        if role.spec.activation_offload:
            text, budget = role.spec.load_config().get_text_config(), plan.budgets[role.learns[0]]
            rows = budget.max_tokens or (budget.max_samples or 1) * longest_text(cfg)
            activations += rows * text.hidden_size * text.num_hidden_layers * role.spec.compute_dtype.itemsize
        if name == "actor" and "hf_model" in actor.checkpoint.save_contents:
            copies += elements * source_dtype(role.spec.load_config(), role.spec.path).itemsize
    rollout = cfg.actor_rollout_ref.rollout
    sleeps_on_host = not ENGINES[rollout.name].embedded and not cfg.actor_rollout_ref.model.merges
    engine = engine_memory(cfg, device, roles["actor"], None)["engine weights"] if sleeps_on_host else 0
    return Counter({
        "offloaded": offloaded * per_node,
        "checkpoint copies": copies if cfg.trainer.async_save and plan.passes.trains else 0,
        "engines": engine * per_node,
        "activations": activations * per_node,
        "rows": 4 * (plan.num_prompts or 0) * cfg.data.max_prompt_length * (per_node + 1),
        "object store": _columns(cfg, plan, roles["actor"].spec.load_config()) // plan.num_nodes,
        "processes": round(_PROCESS * (per_node + 1)),
    })  # fmt: skip


def _columns(cfg: Config, plan: Plan, config: object) -> int:
    """Return the bytes of the columns of a step on all nodes, with the longest prompts and responses."""
    passes = plan.passes
    # A response has its tokens and its mask; log-probs, values, returns and advantages are float32.
    numbers = 1 + sum(name in passes.roles for name in ("ref", "teacher")) + 3 * ("critic" in passes.roles)
    token = 5 + 4 * (numbers + (passes.old_log_probs != "none"))
    tokens = plan.prompts_started * (
        4 * cfg.data.max_prompt_length + plan.answers_per_prompt * token * cfg.data.max_response_length
    )
    return tokens + round(plan.prompts_started * (plan.images.mean_bytes if plan.images else 0))


def check_host(cfg: Config, plan: Plan) -> tuple[list[str], list[str]]:
    """Return the line with the estimate, and a warning if a node has less memory."""
    device = get_device(cfg.trainer.device)
    if device.is_cpu:
        return [], []
    owners, size = host_forecast(cfg, plan), (cfg.trainer.host_memory_gb or 0) * _GIB
    if not size and device.count:  # otherwise this machine is not one of the nodes
        size = min(DEVICES["cpu"].total_memory_bytes(), memory_left())
    parts = ", ".join(f"{owner} {held / _GIB:,.1f}" for owner, held in owners.most_common() if held >= 0.05 * _GIB)
    total = owners.total() / _GIB
    has = f" of {size / _GIB:,.1f}" if size else ""
    unknown = "" if size else ". With trainer.host_memory_gb=SIZE it is checked"
    lines = [f"host memory of a node in GiB: {total:,.1f}{has} ({parts}){unknown}"]
    if not size or owners.total() <= _USABLE * size:
        return lines, []
    keys = "; ".join(change for owner, _ in owners.most_common() for change in _changes(cfg, owner) if owners[owner])
    return lines, [
        f"trainer.host_memory_gb={size / _GIB:.1f}: a node needs about {total:,.1f} GiB of host memory ({parts}), and "
        f"{_USABLE:.0%} of it are usable. Make room with one of: {keys}; more nodes."
    ]


def _changes(cfg: Config, owner: str) -> list[str]:
    """Return the changes of keys that reduce what ``owner`` holds."""
    keys = {
        "offloaded": [f"{key}=False" for key, _ in offloads(cfg) if get(cfg, key) is True],
        "checkpoint copies": ["trainer.async_save=False"],
        "engines": ["actor_rollout_ref.model.lora.merge=True"],
        "activations": ["actor_rollout_ref.model.enable_activation_offload=False"],
        "object store": [f"data.train_batch_size less than {cfg.data.train_batch_size}"],
        "processes": [f"trainer.n_gpus_per_node less than {cfg.trainer.n_gpus_per_node}"],
    }
    return keys.get(owner, [])
