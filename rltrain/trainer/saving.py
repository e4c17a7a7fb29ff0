"""When to save and what a checkpoint holds.

Problem: a full disk is mostly found out hours after the start, while a checkpoint is written. Choice: its size is
estimated from the weights before the first step, and measured after the first save. Left out: saving while training
goes on, which would need a second copy of weights and optimizer state on the host.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from rltrain.config.schema import Config
from rltrain.config.trainer_schema import TrainerConfig
from rltrain.errors import DiskError, WorkerError
from rltrain.trainer.archive import Archive
from rltrain.trainer.callbacks import Callbacks
from rltrain.trainer.card import model_card
from rltrain.trainer.checkpoint import RunFolder
from rltrain.trainer.progress import ANSWERS, Progress, Start
from rltrain.trainer.roles import Critic, Policy
from rltrain.trainer.timing import StepTimer

log = logging.getLogger(__name__)


def checkpoint_bytes(cfg: Config, num_parameters: int, num_trained: int) -> int:
    """Estimated size of a checkpoint: float32 weights and two moments per trained weight, and the exported model."""
    critic = 12 * num_parameters if cfg.algorithm.needs_critic else 0
    exports = "hf_model" in cfg.actor_rollout_ref.actor.checkpoint.save_contents
    return 12 * num_trained + critic + (4 * num_parameters if exports else 0)


def steps_saved(cfg: TrainerConfig, first_step: int, total_steps: int) -> list[int]:
    """The steps at which a run saves that starts after ``first_step`` and ends after ``total_steps``."""
    regular = range(first_step + 1, total_steps + 1) if cfg.save_freq > 0 else range(0)
    steps = [step for step in regular if step % cfg.save_freq == 0]
    at_end = cfg.save_at_end and total_steps > first_step and total_steps not in steps
    return [*steps, total_steps] if at_end else steps


def missing_room(cfg: TrainerConfig, folder: Path, size: int, first_step: int, total_steps: int) -> tuple[str, str]:
    """(problem, note), empty if ``folder`` has room for the checkpoints of ``size`` bytes that this run will write.

    Without ``max_actor_ckpt_to_keep`` no checkpoint is ever removed. Then it is a problem only if the first checkpoint
    does not fit; missing room for the others is a note.
    """
    steps = steps_saved(cfg, first_step, total_steps)
    existing, keep = len(list(folder.glob("global_step_*"))), cfg.max_actor_ckpt_to_keep or 0
    # The newest is written before the oldest is removed.
    # Room for what exists is taken already; what is asked for is the growth up to the limit.
    needed = max(min(existing + len(steps), keep + 1) - existing, 1) if keep >= 1 else 1
    free = free_bytes(folder)
    if steps and free < size:
        return f"there is no room for the checkpoint of step {steps[0]}. {describe_room(folder, size)}", ""
    if steps and free < needed * size:
        kept = f"as trainer.max_actor_ckpt_to_keep={keep} keeps and one while it is written"
        return f"there is no room for {needed} more checkpoints, {kept}. {describe_room(folder, size)}", ""
    if keep < 1 and free < len(steps) * size:
        kept = f"(trainer.save_freq={cfg.save_freq}, and all of them unless trainer.max_actor_ckpt_to_keep is set)"
        return (
            "",
            f"there is no room for the {len(steps)} checkpoints that this run keeps {kept}. "
            f"{describe_room(folder, size)}",
        )
    return "", ""


def free_bytes(folder: Path) -> int:
    """Free space where ``folder`` is or will be."""
    # A dry run asks before the run folder exists, so the nearest folder above it answers.
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.is_dir())).free


def describe_room(folder: Path, size: int) -> str:
    """How much there is and how much a checkpoint of ``size`` bytes takes."""
    return (
        f"{folder} has {free_bytes(folder) / 2**30:.2f} GiB free and a checkpoint takes about {size / 2**30:.2f} GiB. "
        "Older checkpoints are intact. "
        "Free space, or lower trainer.max_actor_ckpt_to_keep, and run the same command again."
    )


class Saver:
    """Writes a checkpoint of the whole run: shards of every role, progress, and a Hugging Face folder."""

    def __init__(
        self,
        cfg: Config,
        folder: RunFolder,
        actor: Policy,
        critic: Critic | None,
        dataset_fingerprint: str,
        num_parameters: int,
        num_trained: int,
        callbacks: Callbacks | None = None,
    ) -> None:
        self._cfg = cfg
        self._callbacks = callbacks or Callbacks()
        self._folder = folder
        self._actor = actor
        self._roles: dict[str, Policy | Critic] = {"actor": actor, "critic": critic} if critic else {"actor": actor}
        self._fingerprint = dataset_fingerprint
        self._bytes_needed = checkpoint_bytes(cfg, num_parameters, num_trained)  # the next one is as large as the last
        self.last_step = 0
        # The answers of its steps are there before a checkpoint is: a run that is killed behind it makes none again.
        self.archive: Archive | None = None

    def due(self, step: int, stopping: bool) -> bool:
        """Every ``save_freq`` steps, and when the run ends unless ``save_at_end`` is off."""
        freq = self._cfg.trainer.save_freq
        return (freq > 0 and step % freq == 0) or (stopping and self._cfg.trainer.save_at_end)

    def save(self, step: int, progress: Progress) -> dict[str, float]:
        """Save step ``step``; returns its timing. Raises DiskError naming needed and free space."""
        timer = StepTimer()
        with timer("save_checkpoint"):
            room = describe_room(self._folder.path, self._bytes_needed)
            if free_bytes(self._folder.path) < self._bytes_needed:
                raise DiskError(f"there is no room for the checkpoint of step {step}. {room}")
            temporary = self._folder.begin_save(step)
            try:
                self._write(temporary, step, progress)
                if self.archive:
                    self.archive.flush()
                final = self._folder.commit(temporary, step)
            except (OSError, WorkerError) as error:
                # torch does not say that a disk is full.
                written = sum(file.stat().st_size for file in temporary.rglob("*") if file.is_file())
                # What was written counts as free, because it is removed below.
                full = free_bytes(self._folder.path) + written < self._bytes_needed
                shutil.rmtree(temporary, ignore_errors=True)
                if isinstance(error, WorkerError) and not full:
                    raise
                raise DiskError(f"checkpoint of step {step} could not be written: {error}. {room}") from error
            self.last_step = step
            # From the second save on, the size is known and no longer estimated.
            self._bytes_needed = sum(file.stat().st_size for file in final.rglob("*") if file.is_file())
            # After the new one is in place. The one that trainer.resume_from_path names stays, as the same command
            # starts from it again.
            self._folder.prune(self._cfg.trainer.max_actor_ckpt_to_keep, spare=self._cfg.trainer.resume_from_path)
        return timer.metrics() | self._callbacks.on_save(step, final)

    def check_room(self, first_step: int, total_steps: int) -> None:
        """Raise DiskError before the first step where the checkpoints that must fit do not."""
        problem, note = missing_room(self._cfg.trainer, self._folder.path, self._bytes_needed, first_step, total_steps)
        if problem:
            raise DiskError(problem)
        if note:
            log.warning("%s", note)

    def rescue(self, step: int, progress: Progress) -> None:
        """Save step ``step`` if it is not saved yet: an error that is not the workers' leaves their state whole."""
        if step > self.last_step and self._cfg.trainer.save_at_end:
            self.save(step, progress)

    def _write(self, temporary: Path, step: int, progress: Progress) -> None:
        for name, role in self._roles.items():
            role.save(str(temporary / name))
        if "hf_model" in self._cfg.actor_rollout_ref.actor.checkpoint.save_contents:
            for problem in self._actor.export(str(temporary / "huggingface"), model_card(self._cfg, step)):
                log.warning("step %d, huggingface/: %s. The checkpoint beside it is whole.", step, problem)
        if progress.answers:
            self._actor.save_answers(progress.answers, str(temporary / ANSWERS))
        progress.write(temporary, step, self._cfg, self._fingerprint)

    def load(self, start: Start) -> None:
        """Bring every role to where the run starts."""
        if start.folder:
            for name, role in self._roles.items():
                for note in role.load(str(start.folder / name), self._cfg.trainer.resume_weights_only):
                    log.warning("note: %s", note)
        # The step that the run starts from is saved already, also for `rescue`.
        self.last_step = start.step
