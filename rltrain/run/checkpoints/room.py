"""Disk space for checkpoints: retention, size, and free space. A full disk is usually noticed hours after the start,
while a checkpoint is written. So the size of a checkpoint is estimated from the weights before Ray starts, and measured
after the first save. Checkpoints saved by time, which the user did not request, never replace regular ones, and only a
few of them are kept.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from rltrain.common.errors import DiskError
from rltrain.config.schema import ActorConfig
from rltrain.config.schema.trainer import TrainerConfig
from rltrain.config.step_passes import StepPasses

log = logging.getLogger(__name__)
# Number of kept checkpoints that were saved by time. If the newest is damaged, another exists.
_BY_TIME = 2


def checkpoint_bytes(actor: ActorConfig, passes: StepPasses, num_parameters: int, num_trained: int) -> int:
    """Return the estimated size of a checkpoint in bytes.

    It contains float32 weights and two moments, at most float32, per trained weight (also of a critic), the exported
    model, and a moving reference.
    """
    copies = ("hf_model" in actor.checkpoint.save_contents) + passes.reference_moves
    return 12 * num_trained + 12 * num_parameters * ("critic" in passes.roles) + 4 * num_parameters * copies


def steps_saved(cfg: TrainerConfig, first_step: int, total_steps: int, steps_per_epoch: int | None = None) -> list[int]:
    """Return the steps after which a run saves, without saves by time.

    The run starts after ``first_step`` and ends after ``total_steps``.
    """
    if cfg.val_only:
        return []
    regular = range(first_step + 1, total_steps + 1) if cfg.saves_regularly else range(0)
    steps = [step for step in regular if cfg.saves_after(step, steps_per_epoch)]
    at_end = cfg.save_at_end and total_steps > first_step and total_steps not in steps
    return [*steps, total_steps] if at_end else steps


def superfluous(cfg: TrainerConfig, complete: Sequence[int], by_time: Callable[[int], bool]) -> list[int]:
    """Return the checkpoints to remove. complete: steps of the complete checkpoints, ascending.

    by_time(step): whether it was saved by time only.
    """
    keep = max(cfg.max_actor_ckpt_to_keep or 0, 0)
    if keep and not cfg.saves_regularly:  # then checkpoints saved by time count as regular ones
        return list(complete[:-keep])
    newest = complete[-min(_BY_TIME, keep or _BY_TIME) :]
    by_steps = [step for step in complete if not by_time(step)]
    stay = by_steps[-keep:]  # all if keep is 0
    return [step for step in complete if step not in (newest if by_time(step) else stay)]


def missing_room(
    cfg: TrainerConfig, folder: Path, size: int, first_step: int, total_steps: int, steps_per_epoch: int | None = None
) -> tuple[str, str]:
    """Return (problem, note), empty if there is room in ``folder`` for all checkpoints of this run.

    size: bytes of one checkpoint. If ``max_actor_ckpt_to_keep`` is not set, requested checkpoints are never removed.
    Then it is a problem only if the first does not fit; for the others, and for checkpoints saved by time, missing room
    is a note.
    """
    steps = steps_saved(cfg, first_step, total_steps, steps_per_epoch)
    existing, keep = len(list(folder.glob("global_step_*"))), cfg.max_actor_ckpt_to_keep or 0
    keep += keep >= 1 and cfg.keep_best is not None
    # The newest is written before the oldest is removed. Existing checkpoints already use space, so only the growth up
    # to the limit counts.
    more = max(min(existing + len(steps), keep + 1) - existing, 1) if keep >= 1 else 1
    free = free_bytes(folder)
    if steps and free < size:
        return f"there is no disk space for the checkpoint of step {steps[0]}. {describe_room(folder, size)}", ""
    if steps and free < more * size:
        best = ", trainer.keep_best" if cfg.keep_best else ""
        rule = f"(trainer.max_actor_ckpt_to_keep={cfg.max_actor_ckpt_to_keep}{best}, and one being written)"
        lower = ", or lower trainer.max_actor_ckpt_to_keep" if (cfg.max_actor_ckpt_to_keep or 0) > 1 else ""
        return f"there is no room for {more} more checkpoints {rule}. {describe_room(folder, size, lower)}", ""
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
    """Raise DiskError with the problem of `missing_room`, and log its note."""
    problem, note = missing_room(cfg, folder, size, first_step, total_steps, steps_per_epoch)
    if problem:
        raise DiskError(problem)
    if note:
        log.warning("note: %s", note)


def free_bytes(folder: Path) -> float:
    """Return the free space in bytes where ``folder`` is or will be; infinity if unknown."""
    try:
        # In a dry run the run folder may not exist, so use the nearest existing parent.
        return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.is_dir())).free
    except OSError:  # otherwise writing will fail
        return math.inf


def sized(num_bytes: float) -> str:
    """1234567 -> "1.2 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def describe_room(folder: Path, size: int, way_out: str = "") -> str:
    """Describe the free space, the size of a checkpoint and a fix. size: bytes of a checkpoint. way_out: a fix other
    than freeing space.
    """
    free = free_bytes(folder)
    space = f"{folder} has {sized(free)} free and a checkpoint takes about {sized(size)}. " if free < math.inf else ""
    older = next(folder.glob("global_step_*"), None)
    intact = "Older checkpoints are intact; one that is not needed may be removed. " if older else ""
    elsewhere = "" if older or way_out else ", or choose another trainer.default_local_dir"
    return f"{space}{intact}Free space{way_out}{elsewhere}, and run the same command again."
