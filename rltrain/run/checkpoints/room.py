"""Room for checkpoints: which of them stay, what they take, and what the disk has.

Problem: a full disk is mostly found out hours after the start, while a checkpoint is written. Choice: the size of one
is estimated from the weights before Ray starts, and measured after the first save. Checkpoints that are saved by time,
which nobody has asked for, never push out those that somebody has, and their number is small whatever is kept.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from rltrain.base.errors import DiskError
from rltrain.config.passes import has_critic, has_reference
from rltrain.config.schema import Config
from rltrain.config.schema.trainer import TrainerConfig

log = logging.getLogger(__name__)
# Of those saved by time: should the newest be damaged, there is another.
_BY_TIME = 2


def checkpoint_bytes(cfg: Config, num_parameters: int, num_trained: int) -> int:
    """Estimated size of a checkpoint: float32 weights and two moments per trained weight, the exported model, and a
    reference that moves."""
    moves = has_reference(cfg) and cfg.actor_rollout_ref.ref.update_every_steps
    critic = 12 * num_parameters if has_critic(cfg) else 0
    exports = "hf_model" in cfg.actor_rollout_ref.actor.checkpoint.save_contents
    return 12 * num_trained + critic + 4 * num_parameters * (exports + bool(moves))


def steps_saved(cfg: TrainerConfig, first_step: int, total_steps: int, steps_per_epoch: int | None = None) -> list[int]:
    """The steps at which a run saves that starts after ``first_step`` and ends after ``total_steps``, whatever the time
    is.
    """
    if cfg.val_only:
        return []
    regular = range(first_step + 1, total_steps + 1) if cfg.saves_regularly else range(0)
    steps = [step for step in regular if cfg.saves_after(step, steps_per_epoch)]
    at_end = cfg.save_at_end and total_steps > first_step and total_steps not in steps
    return [*steps, total_steps] if at_end else steps


def superfluous(cfg: TrainerConfig, whole: Sequence[int], by_time: Callable[[int], bool]) -> list[int]:
    """Which of the checkpoints ``whole`` (steps, ascending) go. by_time(step): whether it was saved by time alone."""
    keep = max(cfg.max_actor_ckpt_to_keep or 0, 0)
    if keep and not cfg.saves_regularly:  # then they are what is asked for
        return list(whole[:-keep])
    newest = whole[-min(_BY_TIME, keep or _BY_TIME) :]
    by_steps = [step for step in whole if not by_time(step)]
    stay = by_steps[-keep:]  # all of them where keep is 0
    return [step for step in whole if step not in (newest if by_time(step) else stay)]


def missing_room(
    cfg: TrainerConfig, folder: Path, size: int, first_step: int, total_steps: int, steps_per_epoch: int | None = None
) -> tuple[str, str]:
    """(problem, note), empty if ``folder`` has room for the checkpoints of ``size`` bytes that this run will write.

    Without ``max_actor_ckpt_to_keep`` none of those that are asked for is ever removed. Then it is a problem only if
    the first does not fit; missing room for the others is a note, and so is missing room for those by time.
    """
    steps = steps_saved(cfg, first_step, total_steps, steps_per_epoch)
    existing, keep = len(list(folder.glob("global_step_*"))), cfg.max_actor_ckpt_to_keep or 0
    keep += keep >= 1 and cfg.keep_best is not None
    # The newest is written before the oldest is removed.
    # Room for what exists is taken already; what is asked for is the growth up to the limit.
    more = max(min(existing + len(steps), keep + 1) - existing, 1) if keep >= 1 else 1
    free = free_bytes(folder)
    if steps and free < size:
        return f"there is no room for the checkpoint of step {steps[0]}. {describe_room(folder, size)}", ""
    if steps and free < more * size:
        best = ", trainer.keep_best" if cfg.keep_best else ""
        rule = f"as trainer.max_actor_ckpt_to_keep={cfg.max_actor_ckpt_to_keep}{best} keeps and one while it is written"
        lower = ", or lower trainer.max_actor_ckpt_to_keep" if (cfg.max_actor_ckpt_to_keep or 0) > 1 else ""
        return f"there is no room for {more} more checkpoints, {rule}. {describe_room(folder, size, lower)}", ""
    if keep < 1 and free < len(steps) * size:
        rule = f"(trainer.save_freq={cfg.save_freq}, and all of them unless trainer.max_actor_ckpt_to_keep is set)"
        lacking = f"the {len(steps)} checkpoints that this run keeps {rule}"
    elif steps and cfg.saves_by_time and free < (more + 1) * size:
        lacking = f"more than {more}: trainer.save_every_s={cfg.save_every_s} saves only where the next one fits too"
    else:
        return "", ""
    return "", f"there is no room for {lacking}. {describe_room(folder, size)}"


def check_room(
    cfg: TrainerConfig, folder: Path, size: int, first_step: int, total_steps: int, steps_per_epoch: int | None = None
) -> None:
    """Raise DiskError with what `missing_room` calls a problem, and log what it calls a note."""
    problem, note = missing_room(cfg, folder, size, first_step, total_steps, steps_per_epoch)
    if problem:
        raise DiskError(problem)
    if note:
        log.warning("note: %s", note)


def free_bytes(folder: Path) -> float:
    """Free space where ``folder`` is or will be; infinity where storage does not say."""
    try:
        # A dry run asks before the run folder exists, so the nearest folder above it answers.
        return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.is_dir())).free
    except OSError:  # writing finds out
        return math.inf


def sized(num_bytes: float) -> str:
    """1234567 -> "1.2 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def describe_room(folder: Path, size: int, way_out: str = "") -> str:
    """How much there is, where that is known, how much a checkpoint of ``size`` bytes takes, and what to do.

    way_out: besides making room.
    """
    free = free_bytes(folder)
    space = f"{folder} has {sized(free)} free and a checkpoint takes about {sized(size)}. " if free < math.inf else ""
    older = next(folder.glob("global_step_*"), None)
    intact = "Older checkpoints are intact; one that is not needed may be removed. " if older else ""
    elsewhere = "" if older or way_out else ", or choose another trainer.default_local_dir"
    return f"{space}{intact}Free space{way_out}{elsewhere}, and run the same command again."
