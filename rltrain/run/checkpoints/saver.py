"""Schedule and contents of checkpoints. A run without ``save_freq`` would lose everything when killed, so it also saves
by time. The disk space of these saves is bounded (`room`). If there is room for only one checkpoint, the regular one
gets it.

Writing takes minutes in which the devices could train. So the workers copy their state to host memory and write it
during the next steps (`workers.state.saving`). The driver polls their progress and completes the checkpoint. A save
ends before the next one begins and before the run ends. The driver accesses the disk in the background too
(`common.background`), because storage may take minutes to respond.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rltrain.common.background import BackgroundJob, heartbeat
from rltrain.common.clock import SYSTEM, Clock
from rltrain.common.errors import CheckpointError, DiskError, StorageError, write_error
from rltrain.config.schema import Config
from rltrain.run.callbacks.callback import Callback, CallbackList
from rltrain.run.checkpoints.best import Best
from rltrain.run.checkpoints.card import model_card
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.manifest import read_record, size_of
from rltrain.run.checkpoints.resume import ResumePoint, files_of
from rltrain.run.checkpoints.room import describe_room, free_bytes, missing_room, superfluous
from rltrain.runtime.ray_watchdog import raise_if_lost
from rltrain.trainer.metrics.timing import StepTimer
from rltrain.trainer.progress import ANSWERS, Progress
from rltrain.trainer.role_save import RoleSave
from rltrain.trainer.roles import Critic, Policy, Reference
from rltrain.workers.interface.tasks import SaveTask, Written

log = logging.getLogger(__name__)
# Seconds that the driver waits at a time; it checks the cluster in between.
_LOOK_S = 1.0
# Seconds to wait for the sample files of a checkpoint's steps after the rest of the checkpoint is written.
_ANSWERS_S = 60.0
# Some storage frees the space of removed files with this delay.
_FREED_S = 60.0


@dataclass
class _Pending:
    """The checkpoint of ``step`` while it is written to ``folder``.

    The driver creates the folder, the workers write their parts, and after the sample files of its steps are written,
    the driver completes it.
    """

    step: int
    folder: Path
    parts: list[RoleSave]
    began: float
    opening: BackgroundJob[None]
    written_at: float = math.inf
    closing: BackgroundJob[int] | None = None
    """Completes the checkpoint, and returns its size in bytes."""


def _over(work: BackgroundJob[Any], waits: bool) -> bool:
    """Return whether ``work`` is done. If ``waits``, wait until it is done."""
    while waits and not work.ready(_LOOK_S):
        raise_if_lost()
    return work.ready()


class Saver(Callback):
    """Writer of checkpoints: shards of every role, progress, and a Hugging Face folder."""

    def __init__(
        self,
        cfg: Config,
        folder: RunFolder,
        actor: Policy,
        critic: Critic | None,
        dataset_fingerprint: str,
        num_bytes: int,
        callbacks: CallbackList | None = None,
        steps_per_epoch: int | None = None,
        reference: Reference | None = None,
        sources: Sequence[str] = (),
        clock: Clock = SYSTEM,
    ) -> None:
        self._clock, self._sources = clock, sources
        self._cfg, self._steps_per_epoch = cfg, steps_per_epoch
        self._callbacks = callbacks or CallbackList()
        self._folder = folder
        self._actor = actor
        named: dict[str, Any] = {"actor": actor, "critic": critic, "ref": reference}
        self._roles: dict[str, Policy | Critic | Reference] = {name: role for name, role in named.items() if role}
        self._fingerprint = dataset_fingerprint
        self._bytes_needed = num_bytes  # an estimate at first, later the size of the last checkpoint
        self.last_step = 0
        self.best = Best(cfg.trainer)
        self._saved_at = self._clock.monotonic()  # start of the last save, or of training
        self._by_time: dict[int, bool] = {}
        self._room: BackgroundJob[bool] | None = None
        self._pending: _Pending | None = None
        self._save_metrics: dict[str, float] = {}
        self._told = False
        self._looked = -math.inf

    def due(self, step: int, stopping: bool) -> bool:
        """Return whether ``save_freq``, or the end of the run with ``save_at_end``, requires a save. See `overdue`."""
        trainer = self._cfg.trainer
        return trainer.saves_after(step, self._steps_per_epoch) or (stopping and trainer.save_at_end)

    def overdue(self, step: int) -> bool:
        """Return whether the last save is `save_every_s` ago and there is room for a save now and the next regular one.

        It returns False while a save is running, because storage slower than `save_every_s` would hold up the steps.
        """
        trainer = self._cfg.trainer
        late = trainer.saves_by_time and self._clock.monotonic() - self._saved_at >= (trainer.save_every_s or 0)
        if not late or self._pending:
            return False
        # Check in the background, because the disk may not respond. Then it is checked again after the next step.
        self._room = self._room or BackgroundJob("room", partial(self._has_room_for_two, step))
        if not self._room.ready(_LOOK_S):
            return False
        fits, self._room = self._room.result(), None
        if not fits:
            self._saved_at = self._clock.monotonic()
            log.warning(
                "step %d is not saved, though the last save is trainer.save_every_s=%g ago: the next would lack the "
                "room. %s", step, trainer.save_every_s, describe_room(self._folder.path, self._bytes_needed),
            )  # fmt: skip
        return fits

    def _has_room_for_two(self, step: int) -> bool:
        """Return whether there is room for a checkpoint of ``step`` by time and for another one.

        It also returns True if there is not even room for one, so that the save raises the error.
        """
        self._by_time[step] = True
        goes, free = self._superfluous([*self._folder.steps(), step]), free_bytes(self._folder.path)
        return free < self._bytes_needed or free >= self._bytes_needed * (1 if goes else 2)

    def _superfluous(self, complete: list[int]) -> list[int]:
        best = self.best.of(complete)
        return [step for step in superfluous(self._cfg.trainer, complete, self._timed) if step != best]

    def _timed(self, step: int) -> bool:
        """Return whether the checkpoint of ``step`` was saved by time only."""
        if step not in self._by_time:
            try:
                self._by_time[step] = read_record(self._folder.step_folder(step)).get("by_time") is True
            except (CheckpointError, StorageError):  # checked again later
                return False
        return self._by_time[step]

    def save(self, step: int, progress: Progress, *, by_time: bool = False) -> dict[str, float]:
        """Begin to save ``step``. If writing in the background is not possible, return after the checkpoint is
        complete.

        by_time: only `overdue` requires this save. Returns its timing, and the metrics of callbacks on finished saves.
        Raises DiskError with the needed and the free space.
        """
        timer = StepTimer()
        with timer("save_checkpoint"):
            self.finish()
            # A running check of the disk space is discarded, because it refers to the time before this save.
            self._saved_at, self._by_time[step], self._room = self._clock.monotonic(), by_time, None
            in_background = self._begin(step, progress)
            if not in_background:
                self.finish()
        return timer.metrics() | self.take_metrics()

    @property
    def newest(self) -> int:
        """The step of the running save, else of the last one."""
        return self._pending.step if self._pending else self.last_step

    @property
    def under_way_s(self) -> float | None:
        """Seconds since the running save began; None if there is none."""
        return time.perf_counter() - self._pending.began if self._pending else None

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of callbacks on finished saves, and clear them."""
        metrics, self._save_metrics = self._save_metrics, {}
        return metrics

    def on_wait(self) -> None:
        """Advance the running save without waiting, at most once a second. Raises as `finish`."""
        now = self._clock.monotonic()
        if self._pending and now - self._looked >= _LOOK_S:
            self._looked = now
            self._go_on(waits=False)

    def finish(self) -> None:
        """Wait for the running save.

        Raises DiskError, StorageError if the storage does not respond, and WorkerLost if writing exceeds its time
        limit.
        """
        self._go_on(waits=True)

    def _go_on(self, waits: bool) -> None:
        # Clear the field first, because this method is called again while it waits for workers.
        pending, self._pending = self._pending, None
        if not pending:
            return
        try:
            size = self._bring_on(pending, waits)
        except (DiskError, StorageError, CheckpointError):
            raise
        except BaseException:  # for example a signal: the save continues and may be polled again
            self._pending = pending
            raise
        if size is None:
            self._pending = pending
            return
        for problem in (problem for part in pending.parts for problem in part.finish().problems):
            log.warning("step %d, huggingface/: %s. The rest of the checkpoint is complete.", pending.step, problem)
        self.last_step = pending.step
        # From the second save on, the size is known instead of estimated.
        self._bytes_needed = size or self._bytes_needed
        folder, seconds = self._folder.step_folder(pending.step), time.perf_counter() - pending.began
        self._save_metrics |= self._callbacks.on_save(pending.step, folder, seconds)

    def _bring_on(self, pending: _Pending, waits: bool) -> int | None:
        """Advance the save (with ``waits``: until it is finished). Return the size of the finished checkpoint, or
        None."""
        if not _over(pending.opening, waits):
            return None
        pending.opening.result()
        with self._disk_errors(pending.step, pending.folder):
            if not pending.closing:
                ready = [part.ready() for part in pending.parts]  # starts all parts before any time limit is checked
                if not waits and not all(ready):
                    return None
                written = [part.finish() for part in pending.parts]
                now = self._clock.monotonic()
                pending.written_at = min(now, pending.written_at)
                left_s = max(0.0, pending.written_at + _ANSWERS_S - now)
                complete = self._callbacks.written(pending.step, left_s if waits else 0.0)
                if not complete and left_s and not waits:
                    return None
                pending.closing = BackgroundJob(f"save of step {pending.step}", partial(self._close, pending, written))
            return pending.closing.result() if _over(pending.closing, waits) else None

    def _close(self, pending: _Pending, written: list[Written]) -> int:
        """Complete the checkpoint, then remove older ones."""
        digests = {name: digest for part in written for name, digest in part.digests.items()}
        size = size_of(self._folder.commit(pending.folder, pending.step, digests))
        # Older checkpoints are removed only after the new one is in place. The checkpoint of trainer.resume_from_path
        # is kept, because a rerun starts from it again.
        try:
            self._folder.prune(self._superfluous, self._cfg.trainer.resume_from_path)
        except (OSError, StorageError) as error:
            log.warning("an older checkpoint could not be removed: %s", error)
        return size

    def on_failure(self) -> None:
        """Finish the running save if its writers are alive or done. Errors are only logged."""
        if not self._pending or (not self._pending.closing and any(part.lost for part in self._pending.parts)):
            return
        step = self._pending.step
        log.warning("the run ends with an error; the checkpoint of step %d, which is being written, is kept", step)
        try:
            self.finish()
        except Exception as error:  # noqa: BLE001 - the error that ends the run is the one to raise
            log.warning("the checkpoint of step %d was not kept: %s", step, error)

    def check_room(self, first_step: int, total_steps: int, size: int = 0) -> None:
        """Check the disk space as `room.check_room`, with the sizes of the loaded models.

        size: bytes of the checkpoint that the run resumes from (0: unknown), as an estimate of the next.
        """
        self._bytes_needed = size or self._bytes_needed
        steps = (first_step, total_steps, self._steps_per_epoch)
        problem, _ = missing_room(self._cfg.trainer, self._folder.path, self._bytes_needed, *steps)
        if problem:
            raise DiskError(problem)

    def save_emergency(self, step: int, progress: Progress) -> None:
        """Save ``step`` if it is not saved yet, after an error that leaves the workers' state intact."""
        self.finish()
        if step > self.last_step and self._cfg.trainer.save_at_end:
            self.save(step, progress)
            self.finish()

    def _begin(self, step: int, progress: Progress) -> bool:
        """Start the save on the workers. Return whether the steps may continue."""
        asynchronous, began, folder = self._cfg.trainer.async_save, time.perf_counter(), self._folder.under_way(step)
        exports = "hf_model" in self._cfg.actor_rollout_ref.actor.checkpoint.save_contents
        files = files_of(progress, step, self._cfg, self._fingerprint, self._by_time[step])
        opening = BackgroundJob(f"save of step {step}", partial(self._open, step, files))
        if progress.answers:  # a worker writes them now, before the next step
            _over(opening, True)
            opening.result()
            with self._disk_errors(step, folder):
                self._actor.save_answers(progress.answers, str(folder / ANSWERS))
        tasks = {name: SaveTask(str(folder / name), asynchronous) for name in self._roles}
        if exports and "actor" in tasks:
            export, card = str(folder / "huggingface"), model_card(self._cfg, step, self._sources)
            tasks["actor"] = replace(tasks["actor"], export=export, card=card)
        parts = [role.begin_save(tasks[name]) for name, role in self._roles.items()]
        if asynchronous and not all(part.copied for part in parts) and not self._told:
            self._told = True
            log.warning(
                "note: checkpoints are written while training waits (trainer.async_save), because the free memory of "
                "the hosts is too small for a copy of weights and optimizer state."
            )
        self._pending, self._looked = _Pending(step, folder, parts, began, opening), -math.inf
        return bool(parts) and all(part.copied for part in parts)

    def _open(self, step: int, files: dict[str, bytes]) -> None:
        """Create the folder with the driver's files. Raises DiskError with the needed and the free space."""
        while free_bytes(self._folder.path) < self._bytes_needed:
            if self._clock.monotonic() < self._folder.pruned_at + _FREED_S:
                heartbeat()
                self._clock.sleep(_LOOK_S)
                continue
            room = describe_room(self._folder.path, self._bytes_needed)
            raise DiskError(f"there is no disk space for the checkpoint of step {step}. {room}")
        with self._disk_errors(step, self._folder.under_way(step)):
            self._folder.begin_save(step, files)

    @contextmanager
    def _disk_errors(self, step: int, folder: Path) -> Iterator[None]:
        """Add the step to errors in the body, and the disk space to a DiskError, and remove ``folder``."""
        try:
            yield
        except (OSError, DiskError, StorageError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            sentence = f"checkpoint of step {step} could not be written: {error}"
            raise write_error(sentence, error, lambda: describe_room(self._folder.path, self._bytes_needed)) from error

    def load(self, start: ResumePoint) -> None:
        """Load every role from the checkpoint that the run starts from."""
        if start.folder:
            for name, role in self._roles.items():
                for note in role.load(str(start.folder / name), start.weights_only):
                    log.warning("note: %s", note)
        # A run that starts from another run's checkpoint has no metrics yet; older files in its folder are moved aside.
        file = self._folder.path / "metrics.jsonl" if start.is_of(self._folder.path) else None
        self.best = Best(self._cfg.trainer, file, start.step)
        # The step that the run starts from is already saved, so `save_emergency` does not save it again.
        self.last_step = start.step
        self._saved_at = self._clock.monotonic()
