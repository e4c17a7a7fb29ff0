"""The one line of ``--dry-run``."""

from __future__ import annotations

from rltrain.base.chips import Chip
from rltrain.base.device import Device, get_device
from rltrain.base.errors import RltrainError
from rltrain.config.schema import Config
from rltrain.run.seconds.assumptions import Assumptions
from rltrain.run.seconds.lengths import lognormal
from rltrain.run.seconds.step import foretell
from rltrain.trainer.plan import Plan

# Of the longest answer: nobody knows the mean before a run.
_MEAN = 0.5


def chip_here(device: Device) -> Chip | None:
    """What the devices of this machine are; None on a CPU, and where they or their peaks are unknown."""
    try:
        return device.chip() if device.count and not device.is_cpu else None
    except (AssertionError, RuntimeError):  # devices that are shown, and that this torch or driver cannot use
        return None


def about_seconds(cfg: Config, plan: Plan, device_bytes: int | None) -> list[str]:
    """What a step may take on the devices here. Nothing where their peaks are unknown, as on a CPU, or no step is made.

    device_bytes: memory of one (None: unknown).
    """
    device, most = get_device(cfg.trainer.device), cfg.data.max_response_length
    chip = chip_here(device)
    if chip is None or not plan.passes.trains or most * _MEAN < 1:
        return []
    try:
        lengths = lognormal(most * _MEAN, most, prompt=max(1, cfg.data.max_prompt_length // 4))
        found = foretell(cfg, plan, lengths, chip, Assumptions(), device_bytes)
    except RltrainError:  # of the model or the engine's room, which is told as a problem
        return []
    gen = found.seconds["gen"]
    return [
        f"about {found.step_s:,.0f} s a step, of which {gen:,.0f} s are generation, with answers of half of "
        "data.max_response_length on average: foretold, not measured on this device (rltrain simulate says how)"
    ]
