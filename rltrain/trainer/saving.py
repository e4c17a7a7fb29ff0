"""When to save and what a checkpoint holds.

Problem: a full disk is mostly found out hours after the start, while a checkpoint is written. Choice: its size is
estimated from the weights before the first step, and measured after the first save.

Problem: writing takes minutes in which the devices could train. Choice: the workers copy what is to be saved to their
hosts and write it while the next steps are made (`workers.saving`). The driver looks every now and then how far that
is, and makes a checkpoint of it; a save is over before the next one begins and before the run ends. What the driver has
to do with the disk is done aside too (`aside`), because storage may take minutes for it.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rltrain.aside import Aside, goes_on
from rltrain.config.schema import Config
from rltrain.config.trainer_schema import TrainerConfig
from rltrain.controller.lifeline import check
from rltrain.errors import CheckpointError, DiskError, StorageError, unwritten
from rltrain.trainer.archive import Archive
from rltrain.trainer.best import Best
from rltrain.trainer.callbacks import Callbacks
from rltrain.trainer.card import model_card
from rltrain.trainer.checkpoint import RunFolder, size_of
from rltrain.trainer.progress import ANSWERS, Progress, Start
from rltrain.trainer.role_save import RoleSave
from rltrain.trainer.roles import Critic, Policy
from rltrain.trainer.timing import StepTimer
from rltrain.workers.tasks import SaveTask, Written

log = logging.getLogger(__name__)
# The driver waits in short turns, and each asks.
_LOOK_S = 1.0
# So long the answers of its steps may take to be written, once all else of a checkpoint is.
_ANSWERS_S = 60.0
# Some storage gives back the room of what was removed a while later.
_FREED_S = 60.0


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
    keep += keep >= 1 and cfg.keep_best is not None
    # The newest is written before the oldest is removed.
    # Room for what exists is taken already; what is asked for is the growth up to the limit.
    needed = max(min(existing + len(steps), keep + 1) - existing, 1) if keep >= 1 else 1
    free = free_bytes(folder)
    if steps and free < size:
        return f"there is no room for the checkpoint of step {steps[0]}. {describe_room(folder, size)}", ""
    if steps and free < needed * size:
        best = ", trainer.keep_best" if cfg.keep_best else ""
        kept = f"as trainer.max_actor_ckpt_to_keep={cfg.max_actor_ckpt_to_keep}{best} keeps and one while it is written"
        return f"there is no room for {needed} more checkpoints, {kept}. {describe_room(folder, size)}", ""
    if keep < 1 and free < len(steps) * size:
        kept = f"(trainer.save_freq={cfg.save_freq}, and all of them unless trainer.max_actor_ckpt_to_keep is set)"
        return (
            "",
            f"there is no room for the {len(steps)} checkpoints that this run keeps {kept}. "
            f"{describe_room(folder, size)}",
        )
    return "", ""


def free_bytes(folder: Path) -> float:
    """Free space where ``folder`` is or will be; infinity where storage does not say."""
    try:
        # A dry run asks before the run folder exists, so the nearest folder above it answers.
        return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.is_dir())).free
    except OSError:  # writing finds out
        return math.inf


def sized(num_bytes: float) -> str:
    """1234567 -> "1.2 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def describe_room(folder: Path, size: int) -> str:
    """How much there is, where that is known, and how much a checkpoint of ``size`` bytes takes."""
    free = free_bytes(folder)
    known = f"{folder} has {sized(free)} free and a checkpoint takes about {sized(size)}. " if free < math.inf else ""
    return (
        f"{known}Older checkpoints are intact. "
        "Free space, or lower trainer.max_actor_ckpt_to_keep, and run the same command again."
    )


@dataclass
class _Pending:
    """The checkpoint of ``step`` while it is written into ``folder``: first the driver opens that, then the workers
    write the parts, then the answers of its steps have to be there, and then the driver closes it. closing: makes a
    checkpoint of it, and returns its size in bytes."""

    step: int
    folder: Path
    parts: list[RoleSave]
    began: float
    opening: Aside[None]
    written_at: float = math.inf
    closing: Aside[int] | None = None


def _over(work: Aside[Any], waits: bool) -> bool:
    """Whether ``work`` is done, with ``waits`` once it is."""
    while waits and not work.ready(_LOOK_S):
        check()
    return work.ready()


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
        self.best = Best(cfg.trainer)
        # The answers of its steps are there before a checkpoint is: a run that is killed behind it makes none again.
        self.archive: Archive | None = None
        self.on_saved: Callable[[], None] = lambda: None  # called when the checkpoint of `last_step` is whole
        self.seconds = 0.0  # from the beginning of the last save to its end
        self._pending: _Pending | None = None
        self._news: dict[str, float] = {}
        self._told = False
        self._looked = -math.inf

    def due(self, step: int, stopping: bool) -> bool:
        """Every ``save_freq`` steps, and when the run ends unless ``save_at_end`` is off."""
        freq = self._cfg.trainer.save_freq
        return (freq > 0 and step % freq == 0) or (stopping and self._cfg.trainer.save_at_end)

    def save(self, step: int, progress: Progress) -> dict[str, float]:
        """Begin to save step ``step``; where that cannot be in the background, it is saved when this returns.

        Returns its timing, and what callbacks have said of saves that are over. Raises DiskError naming needed and free
        space.
        """
        timer = StepTimer()
        with timer("save_checkpoint"):
            self.finish()
            in_background = self._begin(step, progress)
            if not in_background:
                self.finish()
        return timer.metrics() | self.news()

    @property
    def newest(self) -> int:
        """The step of the save that is under way, else of the last one."""
        return self._pending.step if self._pending else self.last_step

    @property
    def under_way_s(self) -> float | None:
        """For how long a save is under way; None where none is."""
        return time.perf_counter() - self._pending.began if self._pending else None

    def news(self) -> dict[str, float]:
        """What callbacks have said of saves that are over, once."""
        news, self._news = self._news, {}
        return news

    def poll(self) -> None:
        """Bring a save that is under way as far as it gets without waiting. Looks once a second. Raises as `finish`."""
        now = time.monotonic()
        if self._pending and now - self._looked >= _LOOK_S:
            self._looked = now
            self._go_on(waits=False)

    def finish(self) -> None:
        """Wait for the save that is under way. Raises DiskError, StorageError where the storage does not answer, and
        WorkerLost where writing takes longer than it may."""
        self._go_on(waits=True)

    def _go_on(self, waits: bool) -> None:
        # Taken out first: whoever waits for workers polls.
        pending, self._pending = self._pending, None
        if not pending:
            return
        try:
            size = self._bring_on(pending, waits)
        except (DiskError, StorageError, CheckpointError):
            raise
        except BaseException:  # a signal, say: the save goes on, and may be asked for again
            self._pending = pending
            raise
        if size is None:
            self._pending = pending
            return
        for problem in (problem for part in pending.parts for problem in part.finish().problems):
            log.warning("step %d, huggingface/: %s. The checkpoint beside it is whole.", pending.step, problem)
        self.last_step, self.seconds = pending.step, time.perf_counter() - pending.began
        # From the second save on, the size is known and no longer estimated.
        self._bytes_needed = size or self._bytes_needed
        self._news |= self._callbacks.on_save(pending.step, self._folder.step_folder(pending.step))
        self.on_saved()

    def _bring_on(self, pending: _Pending, waits: bool) -> int | None:
        """As far as it gets, with ``waits`` to the end: the size of the checkpoint once it is there, else None."""
        if not _over(pending.opening, waits):
            return None
        pending.opening.result()
        with self._disk_errors(pending.step, pending.folder):
            if not pending.closing:
                ready = [part.ready() for part in pending.parts]  # every part begins, and is asked whether it is late
                if not waits and not all(ready):
                    return None
                written = [part.finish() for part in pending.parts]
                now = time.monotonic()
                pending.written_at = min(now, pending.written_at)
                left_s = max(0.0, pending.written_at + _ANSWERS_S - now)
                there = not self.archive or self.archive.flush(pending.step, left_s if waits else 0.0)
                if not there and left_s and not waits:
                    return None
                pending.closing = Aside(f"save of step {pending.step}", partial(self._close, pending, written))
            return pending.closing.result() if _over(pending.closing, waits) else None

    def _close(self, pending: _Pending, written: list[Written]) -> int:
        """Make a checkpoint of what is written, and then room by removing an older one."""
        digests = {name: digest for each in written for name, digest in each.digests.items()}
        size = size_of(self._folder.commit(pending.folder, pending.step, digests))
        # After the new one is in place. The one that trainer.resume_from_path names stays, as the same command starts
        # from it again.
        trainer = self._cfg.trainer
        try:
            self._folder.prune(trainer.max_actor_ckpt_to_keep, trainer.resume_from_path, best=self.best.of)
        except (OSError, StorageError) as error:
            log.warning("an older checkpoint could not be removed: %s", error)
        return size

    def keep(self) -> None:
        """An error ends the run: finish the save under way, if its writers live or are done. What fails in that is only
        told.
        """
        if not self._pending or (not self._pending.closing and any(part.lost for part in self._pending.parts)):
            return
        step = self._pending.step
        log.warning("the run ends with an error; the checkpoint of step %d, which is being written, is kept", step)
        try:
            self.finish()
        except Exception as error:  # noqa: BLE001 - the error that ends the run is the one to raise
            log.warning("the checkpoint of step %d was not kept: %s", step, error)

    def check_room(self, first_step: int, total_steps: int, size: int = 0) -> None:
        """Raise DiskError before the first step where the checkpoints that must fit do not. size: of the checkpoint
        that the run goes on from, if it is known: the next one is as large.
        """
        self._bytes_needed = size or self._bytes_needed
        problem, note = missing_room(self._cfg.trainer, self._folder.path, self._bytes_needed, first_step, total_steps)
        if problem:
            raise DiskError(problem)
        if note:
            log.warning("%s", note)

    def rescue(self, step: int, progress: Progress) -> None:
        """Save step ``step`` if it is not saved yet: an error that is not the workers' leaves their state whole."""
        self.finish()
        if step > self.last_step and self._cfg.trainer.save_at_end:
            self.save(step, progress)
            self.finish()

    def _begin(self, step: int, progress: Progress) -> bool:
        """Take what is to be saved. Returns whether the steps may go on."""
        asked, began, folder = self._cfg.trainer.async_save, time.perf_counter(), self._folder.under_way(step)
        exports = "hf_model" in self._cfg.actor_rollout_ref.actor.checkpoint.save_contents
        files = progress.files(step, self._cfg, self._fingerprint)
        opening = Aside(f"save of step {step}", partial(self._open, step, files))
        if progress.answers:  # written by the call of a worker, before those of the next step
            _over(opening, True)
            opening.result()
            with self._disk_errors(step, folder):
                self._actor.save_answers(progress.answers, str(folder / ANSWERS))
        tasks = {name: SaveTask(str(folder / name), asked) for name in self._roles}
        if exports and "actor" in tasks:
            export, card = str(folder / "huggingface"), model_card(self._cfg, step)
            tasks["actor"] = replace(tasks["actor"], export=export, card=card)
        parts = [role.begin_save(tasks[name]) for name, role in self._roles.items()]
        if asked and not all(part.copied for part in parts) and not self._told:
            self._told = True
            log.warning(
                "note: checkpoints are written while training waits (trainer.async_save): the memory that is free on "
                "the hosts has no room for a copy of weights and optimizer state."
            )
        self._pending, self._looked = _Pending(step, folder, parts, began, opening), -math.inf
        return bool(parts) and all(part.copied for part in parts)

    def _open(self, step: int, files: dict[str, bytes]) -> None:
        """Make the folder, with the driver's own files. Raises DiskError naming needed and free space."""
        while free_bytes(self._folder.path) < self._bytes_needed:
            if time.monotonic() < self._folder.pruned_at + _FREED_S:
                goes_on()
                time.sleep(_LOOK_S)
                continue
            room = describe_room(self._folder.path, self._bytes_needed)
            raise DiskError(f"there is no room for the checkpoint of step {step}. {room}")
        with self._disk_errors(step, self._folder.under_way(step)):
            self._folder.begin_save(step, files)

    @contextmanager
    def _disk_errors(self, step: int, folder: Path) -> Iterator[None]:
        """What cannot be written names the step, and a DiskError the room; ``folder`` is removed."""
        try:
            yield
        except (OSError, DiskError, StorageError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            what = f"checkpoint of step {step} could not be written: {error}"
            raise unwritten(what, error, lambda: describe_room(self._folder.path, self._bytes_needed)) from error

    def load(self, start: Start) -> None:
        """Bring every role to where the run starts."""
        if start.folder:
            for name, role in self._roles.items():
                for note in role.load(str(start.folder / name), start.weights_only):
                    log.warning("note: %s", note)
        self.best = Best(self._cfg.trainer, self._folder.path / "metrics.jsonl", start.step)
        # The step that the run starts from is saved already, also for `rescue`.
        self.last_step = start.step
