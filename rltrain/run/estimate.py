"""Estimate of the step time on devices that need not exist: ``--dry-run --device H100 --nodes 8``.

Reads the model's config.json and the number of rows of the data, but no weights. A plain dry run checks weights, data
and reward.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rltrain.common.chips import CHIPS, Chip, find_chip
from rltrain.common.device import Device, get_device
from rltrain.common.errors import ConfigError, short
from rltrain.common.logs import count
from rltrain.config.check import as_list, check
from rltrain.config.load import load_config
from rltrain.config.schema import Config
from rltrain.config.schema.arguments import read_arguments
from rltrain.data.tables import unreadable
from rltrain.models.vision import takes_images
from rltrain.models.weights.spec import actor_spec
from rltrain.run.preflight.memory_room import check_memory
from rltrain.run.preflight.models import problems_of_experts
from rltrain.run.seconds.assumptions import Assumptions
from rltrain.run.seconds.lengths import Lengths, lognormal, read_lengths
from rltrain.run.seconds.step import StepEstimate, estimate_step, sizes_of
from rltrain.trainer.plan import ImageSizes, Plan, make_plan

# Mean response length as a share of data.max_response_length, if --lengths is not given.
_MEAN = 0.5


def estimate(arguments: argparse.Namespace) -> tuple[str, bool]:
    """Return the estimate for the flags in ``arguments``, and whether the run would run out of memory.

    arguments: flags and overrides as `main_ppo` has parsed them. Raises ConfigError, DataError.
    """
    words = list(arguments.overrides)
    if arguments.nodes is not None:
        words.append(f"trainer.nnodes={arguments.nodes}")
    chip = named_chip(arguments.device) if arguments.device else None
    if chip:  # first, so that the user's trainer.device takes precedence
        words.insert(0, f"trainer.device={chip.kind}")
    # Data is optional, because the estimate needs only the lengths of prompts and responses.
    loaded = load_config(["data.train_files=none", *words], arguments.config, arguments.problems)
    check(loaded)
    cfg = loaded.config
    chip = chip or chip_here(get_device(cfg.trainer.device))
    if chip is None:
        raise ConfigError("--device is not given, and this machine has no accelerator with known peak FLOP/s. Give "
                          "--device H100 or another.")  # fmt: skip
    lengths = read_lengths(arguments.lengths) if arguments.lengths else _usual_lengths(cfg)
    plan = plan_of(cfg, lengths)
    if not plan.passes.trains:
        raise ConfigError("trainer.val_only=True: an evaluation has no training step. Remove it.")
    cfg.trainer.device_memory_gb = cfg.trainer.device_memory_gb or chip.memory_bytes / 2**30 or None
    size = cfg.trainer.device_memory_gb
    changes = list(filter(None, (arguments.assume or "").split(",")))
    assumed = read_arguments(Assumptions, changes, where="--assume")
    step = estimate_step(cfg, plan, lengths, chip, assumed, round(size * 2**30) if size else None)
    if problems := list(problems_of_experts(cfg)):
        raise ConfigError("\n".join(problems))
    memory, too_large = check_memory(cfg, plan)
    lines = [_describe(step, plan, chip, lengths, assumed), *memory]
    lines += [f"a run would run out of memory: {too_large}"] if too_large else []
    return "\n".join(lines) + "\n", bool(too_large)


def plan_of(cfg: Config, lengths: Lengths) -> Plan:
    """Return the plan, with an image in each prompt if ``lengths`` has some."""
    prompts = _num_prompts(cfg)
    if not lengths.image:
        return make_plan(cfg, prompts)
    model = cfg.actor_rollout_ref.model.path
    if not takes_images(actor_spec(cfg, get_device(cfg.trainer.device)).load_config()):
        raise ConfigError(f"--lengths image:{lengths.image}: {model} is not a vision-language model. Leave image: out.")
    sizes = sizes_of(cfg, make_plan(cfg, prompts, images=ImageSizes(1.0, 1, 1, 1)))
    rows = math.ceil(lengths.image / sizes["row_tokens"])
    return make_plan(cfg, prompts, images=ImageSizes(1.0, 1, rows, lengths.image))


def _num_prompts(cfg: Config) -> int | None:
    """Return the rows of the training files, if all are Parquet files of this machine. Raises DataError."""
    files = as_list(cfg.data.train_files)
    if not files or not all(file.endswith(".parquet") and Path(file).is_file() for file in files):
        return None
    try:
        rows = sum(pq.read_metadata(file).num_rows for file in files)
    except (OSError, pa.ArrowException) as error:
        raise unreadable(", ".join(files), error) from error
    most = cfg.data.train_max_samples
    return min(rows, most) if most > 0 else rows


def named_chip(name: str) -> Chip:
    """Return the chip called ``name``, such as "H100" or "910B3". Raises ConfigError."""
    chip = find_chip(name) or find_chip(f"Ascend{name}")
    if chip is None:
        known = ", ".join(sorted(chip.name.removeprefix("Ascend") for chip in CHIPS.values()))
        raise ConfigError(f"--device {short(name)}: the peaks of this chip are not known. Known are {known}.")
    return chip


def chip_here(device: Device) -> Chip | None:
    """Return the chip of this machine's devices. None on a CPU, or if the devices or their peaks are unknown."""
    try:
        return device.chip() if device.count and not device.is_cpu else None
    except (AssertionError, RuntimeError):  # devices are visible, but not usable with this torch or driver
        return None


def _usual_lengths(cfg: Config) -> Lengths:
    most = cfg.data.max_response_length
    return lognormal(max(1, most * _MEAN), most, prompt=max(1, cfg.data.max_prompt_length // 4))


def _describe(step: StepEstimate, plan: Plan, chip: Chip, lengths: Lengths, assumed: Assumptions) -> str:
    nodes = f", {count(plan.num_nodes, 'node')}" if plan.num_nodes > 1 else ""
    lines = [
        f"a step takes about {_seconds(step.step_s)} s on {plan.num_devices} x {chip.name}{nodes} (estimated, not "
        "measured on this device)"
    ]
    width = max(map(len, step.seconds)) + 2
    for name, value in step.seconds.items():
        label = f"  {name}" if name in ("generate_sequences", "reshard") else name
        share = f"{value / step.step_s:4.0%}"
        lines.append(f"  {label:<{width}} {_seconds(value):>8} s {share}  {step.why.get(name, '')}".rstrip())
    rate = step.response_tokens / (step.seconds["generate_sequences"] * step.num_devices)
    if plan.steps_per_epoch:
        hours = plan.steps_per_epoch * step.step_s / 3600
        lines.append(f"epoch       {hours:,.3g} hours for {count(plan.steps_per_epoch, 'step')}, without validation")
    lines += [
        f"throughput  {step.throughput:,.1f} tokens/s/device over the whole step; {rate:,.1f} response tokens in "
        "generate_sequences",
        f"lengths     {lengths.description}",
        "assumed     (--assume NAME=VALUE,… sets another; docs/simulate.md: sources, and what is not counted)",
        "  " + " ".join(f"{name}={value:g}" for name, value in vars(assumed).items()),
    ]
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
