"""Assumptions from a run's own metrics: what each phase took, per second that was foretold of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from rltrain.base.chips import Chip, find_chip
from rltrain.base.errors import ConfigError, DataError
from rltrain.base.storage import read_json
from rltrain.config.load import load_config
from rltrain.run.report.table import read_metrics
from rltrain.run.seconds.assumptions import NOMINAL, ON_CPU, Assumptions
from rltrain.run.seconds.lengths import Lengths, read_lengths
from rltrain.run.seconds.step import foretell
from rltrain.trainer.plan import make_plan


@dataclass(frozen=True)
class Calibration:
    """What a run says of its device."""

    run: Path
    chip: Chip
    assumed: Assumptions
    """With the run's ratios."""
    lengths: Lengths
    measured: dict[str, float]
    """Seconds by phase: medians over steps, without the first, which warms up."""
    foretold: dict[str, float]
    """The same, before."""
    num_steps: int


def measured(run: Path) -> tuple[dict[str, float], float, int]:
    """Median seconds of the run's phases, the share of its tokens that updates leave out, and of how many steps.

    Raises DataError.
    """
    steps = [line for line in read_metrics(run) if "timing_s/step" in line]
    if not steps:
        raise DataError(f"--from {run}: its metrics.jsonl has no step. Give a run with two steps at least.")
    frame = pd.DataFrame(steps[1:] or steps)
    # Of a machine with other work a mean tells most of the steps that were held up.
    middle = {str(name): float(value) for name, value in frame.median(numeric_only=True).items()}
    seconds = {name.removeprefix("timing_s/"): value for name, value in middle.items() if name.startswith("timing_s/")}
    # Of the slowest rank, for which the others wait.
    seconds |= {name: seconds[f"{name}_max"] for name in ("generate_sequences", "reshard") if f"{name}_max" in seconds}
    silent = middle.get("perf/update_tokens_skipped", 0.0) / max(middle.get("perf/total_num_tokens", 0.0), 1.0)
    return seconds, silent, len(frame)


def calibrate(run: Path, chip: Chip | None = None) -> Calibration:
    """Compare what the settings and answers of ``run`` foretell with what its phases took.

    chip: that of its devices, where their name says nothing.

    Raises ConfigError, DataError.
    """
    settings = run / "config.yaml"
    if not settings.is_file():
        raise ConfigError(f"--from {run}: there is no config.yaml in it. Give the folder of a run of rltrain.")
    chip = _chip(run, load_config([], [str(settings)]).config.trainer.device, chip)
    # Not what ``auto`` means on this machine, which may be another.
    cfg = load_config([f"trainer.device={chip.kind}"], [str(settings)]).config
    seconds, silent, num_steps = measured(run)
    assumed = ON_CPU if chip is NOMINAL else Assumptions()
    plan, lengths = make_plan(cfg), read_lengths(str(run))
    assumed = replace(assumed, silent_share=min(1.0, silent / cfg.actor_rollout_ref.actor.ppo_epochs))
    reward_ms = 1000 * seconds.get("reward", 0.0) / plan.samples_per_step
    assumed = replace(assumed, reward_ms=reward_ms)
    found = foretell(cfg, plan, lengths, chip, assumed).seconds
    ratios = _ratios(seconds, found)
    return Calibration(run, chip, replace(assumed, ratios=ratios), lengths, seconds, found, num_steps)


def _ratios(seconds: Mapping[str, float], found: Mapping[str, float]) -> dict[str, float]:
    inner = [name for name in found if name not in ("gen", "step") and found[name] > 0 and name in seconds]
    ratios = {name: seconds[name] / found[name] for name in inner}
    parts = sum(seconds.get(name, 0.0) for name in ("generate_sequences", "reshard"))
    # What gen has beside its two parts: engines that wait for others, and answers on their way.
    return ratios | ({"gen": seconds["gen"] / parts} if parts and "gen" in seconds else {})


def _chip(run: Path, kind: str, given: Chip | None) -> Chip:
    """What the run's devices are; on a CPU only ratios count."""
    devices = (read_json(run / "env.json") or {}).get("devices") or []
    on_cpu = kind == "cpu" or (kind == "auto" and not devices)
    chip = NOMINAL if on_cpu else find_chip(devices[0]) if devices else None
    if chip and given and chip != given:
        raise ConfigError(f"--device {given.name}: the devices of --from {run} are {chip.name}, and its seconds are of "
                          "those. Leave --device out.")  # fmt: skip
    if chosen := chip or given:
        return chosen
    raise ConfigError(f"--from {run}: nobody knows the peaks of its {kind} device {devices[:1]}. Add --device NAME.")
