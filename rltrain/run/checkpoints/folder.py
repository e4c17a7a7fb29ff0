"""The run folder: one owner at a time, and checkpoints that are complete or do not exist.

A run resumes from the newest complete checkpoint. A checkpoint is written into a temporary folder, synced to disk and
then renamed, because a rename is atomic. Its manifest lists the size of every file, which reveals an interrupted copy
or a full disk, and the digest of its contents, which reveals a flipped bit. The driver reads the small files at once.
The workers read the large files, each a share of them, before anything is loaded (`resume.verified`).
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from rltrain.common.clock import SYSTEM, Clock
from rltrain.common.errors import CheckpointError, ConfigError, DiskError, StorageError, write_error
from rltrain.common.storage import patiently, swapping, sync
from rltrain.run.checkpoints.manifest import find_damage, write_manifest

log = logging.getLogger(__name__)
_STEP_FOLDER = re.compile(r"global_step_(\d+)")
_LOCK = "run.lock"
_REPLACED = "replaced_"
_POLL_S = 0.1
# Seconds to wait for a lock, because NFS keeps the lock of a dead client for a lease, usually 90 s.
_FREED_S = 120.0


class Checkpoints:
    """Read-only view of the checkpoints of a run folder, which need not exist."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser().resolve()
        # Results of full checks: the problem, or "" for a complete checkpoint.
        self._known: dict[Path, str] = {}

    def step_folder(self, step: int) -> Path:
        return self.path / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint folder, complete or not, ascending."""
        try:
            names = patiently(self.path, lambda: [entry.name for entry in os.scandir(self.path) if entry.is_dir()])
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(match[1]) for name in names if (match := _STEP_FOLDER.fullmatch(name)))

    def newest(self) -> Path | None:
        """Return the newest checkpoint that matches its manifest. Log and skip the others.

        Returns None if there is no checkpoint. Raises CheckpointError if there are checkpoints but none is usable.
        """
        # List the folder, because a file that points to the newest checkpoint could be wrong.
        problems = []
        for step in reversed(self.steps()):
            if not (problem := self.damage(self.step_folder(step))):
                return self.step_folder(step)
            log.warning("passing over %s: %s", self.step_folder(step), problem)
            problems.append(f"global_step_{step}: {problem}")
        # This is an error, because starting over would repeat all these steps.
        if problems:
            raise CheckpointError(
                f"no checkpoint in {self.path} can be used ({'; '.join(problems)}). Restore a complete one, or start "
                "a new run with another trainer.default_local_dir (or in this folder with trainer.resume_mode=disable)."
            )
        return None

    def damage(self, folder: Path) -> str | None:
        """Return the problem given to `distrust`, or the result of `find_damage`."""
        return self._known.get(folder.resolve()) or find_damage(folder)

    def distrust(self, folder: Path, problem: str) -> None:
        """Treat the checkpoint ``folder`` as damaged from now on."""
        self._known[folder.resolve()] = problem

    def problem(self) -> str | None:
        """Return the reason why a run cannot use the folder, or None."""
        parent = next(folder for folder in (self.path, *self.path.parents) if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            return f"trainer.default_local_dir={self.path} cannot be created: {parent} is not a writable folder."
        try:
            with open(self.path / _LOCK, encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _in_use(self.path, (self.path / _LOCK).read_text("utf-8"))
        except IsADirectoryError:
            return f"{self.path / _LOCK} is a folder, but a run needs a lock file of this name. Remove it."
        except OSError:  # the lock file does not exist, or the storage has no locks
            return None
        return None


class RunFolder(Checkpoints):
    """The folder ``trainer.default_local_dir``. The object holds the lock; the kernel frees it even after kill -9."""

    def __init__(self, path: str, clock: Clock = SYSTEM) -> None:
        super().__init__(path)
        self._clock = clock
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(f"trainer.default_local_dir={path} cannot be created: {error}", error) from error
        self.pruned_at = -math.inf  # time of the last removal of a checkpoint
        self._lock = self._take_lock()
        # They are removed only after the lock is taken. Otherwise they might be the running save of a live run.
        for leftover in self.path.glob(".tmp_*"):
            log.warning("removing %s, left by a save that was interrupted", leftover)
            try:
                if leftover.is_dir() and not leftover.is_symlink():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()
            except OSError as error:  # it only wastes disk space
                log.warning("%s cannot be removed: %s", leftover, error)
        self._put_back()

    def _put_back(self) -> None:
        """Restore the name of a checkpoint if a kill came between the two renames of `replace`."""
        for old in self.path.glob(f"{_REPLACED}global_step_*"):
            final = self.path / old.name.removeprefix(_REPLACED)
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                log.warning("%s is restored: a command that would have replaced it was interrupted", final)
                os.rename(old, final)

    def _take_lock(self) -> IO[str]:
        # Mode "w" would erase the owner's name before the lock is checked.
        try:
            file = open(self.path / _LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - held for the life of the run
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            self._lock_patiently(file)
        except OSError as error:  # some network storage has no locks at all
            log.warning("%s cannot be locked (%s): make sure that no other run uses it", self.path, error)
        try:
            file.truncate(0)
            file.write(f"pid {os.getpid()} on {socket.gethostname()}, started {time.strftime('%Y-%m-%d %H:%M:%S')}")
            file.flush()
        except OSError as error:
            with suppress(OSError):  # closing would try to write again
                file.close()
            raise _unwritable(self.path, error) from error
        return file

    def _lock_patiently(self, file: IO[str]) -> None:
        """Take the lock.

        Raises ConfigError if a run on this host has the lock, StorageError if a run on another host keeps it.
        """
        deadline = None
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                file.seek(0)
                owner = file.read()
            now, elsewhere = self._clock.monotonic(), " on " in owner and f" on {socket.gethostname()}," not in owner
            if not elsewhere or now > (deadline or math.inf):
                file.close()
                raise (StorageError if elsewhere else ConfigError)(_in_use(self.path, owner))
            if deadline is None:
                deadline = now + _FREED_S
                log.warning(
                    "%s is locked by %s: retrying for %.0f s, because network storage keeps the lock of a host that is "
                    "lost for a while",
                    self.path,
                    owner,
                    _FREED_S,
                )
            self._clock.sleep(_POLL_S)

    def release(self) -> None:
        self._lock.close()

    def write(self, name: str, text: str) -> None:
        """Write a small file of the run atomically."""
        try:
            with swapping(self.path / name) as temporary:
                temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            raise _unwritable(self.path, error) from error

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def under_way(self, step: int) -> Path:
        """Return the temporary folder of the checkpoint of ``step``."""
        return self.path / f".tmp_global_step_{step}_{os.getpid()}"

    def begin_save(self, step: int, files: Mapping[str, bytes] | None = None) -> Path:
        """Create the temporary folder for the checkpoint of ``step``, with ``files`` by name.

        Raises CheckpointError if the step has a complete checkpoint, which is never replaced. A damaged one is moved
        aside.
        """
        existing = self.step_folder(step)
        if existing.exists():
            if not self.damage(existing):
                raise CheckpointError(f"{existing} already exists; a checkpoint is never overwritten.")
            # Move the folder aside instead of removing it, because it may be an interrupted copy whose weights are
            # still useful.
            os.rename(existing, existing.with_name(f"damaged_{existing.name}_{int(time.time())}"))
        folder = self.under_way(step)
        folder.mkdir()
        for name, content in (files or {}).items():
            (folder / name).write_bytes(content)
        return folder

    def commit(self, folder: Path, step: int, digests: Mapping[str, str] | None = None) -> Path:
        """Complete the checkpoint: `write_manifest`, then `name_it`."""
        write_manifest(folder, step, digests, self._clock)
        return self.name_it(folder, step)

    def name_it(self, folder: Path, step: int) -> Path:
        """Give a checkpoint with a manifest its final name."""
        final = self.step_folder(step)
        os.rename(folder, final)
        sync(self.path)  # the folder that contains the renamed entry
        self._known[final] = ""
        return final

    def replace(self, folder: Path, step: int) -> None:
        """Replace the checkpoint of ``step`` by ``folder``, which has a manifest."""
        final = self.step_folder(step)
        old = final.with_name(f"{_REPLACED}{final.name}")
        # `_put_back` repairs a kill between the two renames.
        os.rename(final, old)
        try:
            self.name_it(folder, step)
        except BaseException:
            os.rename(old, final)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def prune(self, goes: Callable[[list[int]], list[int]], *spare: str | Path | None) -> None:
        """Remove the checkpoints that ``goes`` selects from the ascending steps of complete checkpoints.

        The folders ``spare`` and damaged checkpoints are never removed. Raises OSError if a checkpoint cannot be
        renamed. A renamed checkpoint that cannot be removed is logged.
        """
        spared = {Path(path).expanduser().resolve() for path in spare if path}
        # Checkpoints are only checked if one of them is to be removed.
        may_go = self.steps() if goes(self.steps()) else []
        for step in goes([step for step in may_go if self._is_complete(self.step_folder(step))]):
            if (folder := self.step_folder(step)) not in spared:
                self.pruned_at = self._clock.monotonic()
                # A kill during the removal leaves part of it, which must not have the name of a checkpoint.
                os.rename(folder, self.path / f".tmp_old_{folder.name}_{os.getpid()}")
        sync(self.path)
        for old in self.path.glob(".tmp_old_*"):
            shutil.rmtree(old, ignore_errors=True)
            if old.exists():
                log.warning("%s cannot be removed completely (is one of its files in use?): retried later", old)

    def _is_complete(self, folder: Path) -> bool:
        """Return whether a checkpoint is complete. If it was complete before, check only the sizes again."""
        place = folder.resolve()
        problem = self._known.get(place) or find_damage(folder, contents=place not in self._known)
        if not problem:
            self._known[place] = ""
        return not problem


def _in_use(path: Path, owner: str) -> str:
    by = owner.strip() or "another process"
    return f"{path} is in use by {by}. Wait for it, stop it, or choose another trainer.default_local_dir."


def _unwritable(path: Path, error: OSError) -> DiskError | StorageError:
    way_out = (
        "Make room or allow writing there, or choose another trainer.default_local_dir, and run the same command again."
    )
    return write_error(f"nothing can be written into the run folder {path}: {error}", error, lambda: way_out)
