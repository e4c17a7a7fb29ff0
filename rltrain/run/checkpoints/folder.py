"""The run folder: one owner at a time, and checkpoints that exist whole or not at all.

A run resumes from the newest whole checkpoint. A checkpoint is written into a temporary folder, flushed to disk and
then renamed, because a rename is atomic. Its manifest lists the size of every file, which reveals an interrupted copy
or a full disk, and the digest of its contents, which reveals a flipped bit. The driver reads the small files at once;
the large ones are read by the workers, each its share, before anything is loaded (`progress.verified`).
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

from rltrain.base.clock import SYSTEM, Clock
from rltrain.base.errors import CheckpointError, ConfigError, DiskError, StorageError, unwritten
from rltrain.base.storage import patiently
from rltrain.run.checkpoints.manifest import find_damage, sync, write_manifest

log = logging.getLogger(__name__)
_STEP_FOLDER = re.compile(r"global_step_(\d+)")
_LOCK = "run.lock"
_REPLACED = "replaced_"
_POLL_S = 0.1
# NFS keeps the lock of a client that died for a lease, which mostly is 90 s.
_FREED_S = 120.0


class Checkpoints:
    """The checkpoints of a run folder, which need not exist; nothing is changed."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser().resolve()
        # What was found out by more than a look at sizes: the problem, or "" of a checkpoint that was whole.
        self._known: dict[Path, str] = {}

    def step_folder(self, step: int) -> Path:
        return self.path / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Steps with a checkpoint folder, whole or not, ascending."""
        try:
            names = patiently(self.path, lambda: [entry.name for entry in os.scandir(self.path) if entry.is_dir()])
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(match[1]) for name in names if (match := _STEP_FOLDER.fullmatch(name)))

    def newest(self) -> Path | None:
        """The newest checkpoint that agrees with its manifest; those that do not are named and passed over.

        None where there is no checkpoint. Raises CheckpointError where there is none that can be used.
        """
        # The folder itself is looked at. A file that points at the newest checkpoint could disagree with it.
        problems = []
        for step in reversed(self.steps()):
            if not (problem := self.damage(self.step_folder(step))):
                return self.step_folder(step)
            log.warning("passing over %s: %s", self.step_folder(step), problem)
            problems.append(f"global_step_{step}: {problem}")
        # Beginning anew would make all these steps again.
        if problems:
            raise CheckpointError(
                f"no checkpoint in {self.path} can be used ({'; '.join(problems)}). Put a whole one back, or start "
                "anew with another trainer.default_local_dir (trainer.resume_mode=disable starts anew in this folder)."
            )
        return None

    def damage(self, folder: Path) -> str | None:
        """`find_damage`, or what `distrust` was told."""
        return self._known.get(folder.resolve()) or find_damage(folder)

    def distrust(self, folder: Path, problem: str) -> None:
        """Take no step from the checkpoint ``folder`` from now on."""
        self._known[folder.resolve()] = problem

    def problem(self) -> str | None:
        """Why a run could not take the folder now, or None."""
        parent = next(folder for folder in (self.path, *self.path.parents) if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            return f"trainer.default_local_dir={self.path} cannot be created: {parent} is no folder one may write in."
        try:
            with open(self.path / _LOCK, encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _in_use(self.path, (self.path / _LOCK).read_text("utf-8"))
        except IsADirectoryError:
            return f"{self.path / _LOCK} is a folder, and a run keeps its lock there. Remove it."
        except OSError:  # nobody has ever taken the lock, or the storage has none
            return None
        return None


class RunFolder(Checkpoints):
    """``trainer.default_local_dir``. Holding the object holds the lock; the kernel frees it even after kill -9."""

    def __init__(self, path: str, clock: Clock = SYSTEM) -> None:
        super().__init__(path)
        self._clock = clock
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritten(f"trainer.default_local_dir={path} cannot be created: {error}", error) from error
        self.pruned_at = -math.inf  # when a checkpoint was last removed
        self._lock = self._take_lock()
        # Only under the lock: before, the folder might be a save of a run that is alive.
        for leftover in self.path.glob(".tmp_*"):
            log.warning("removing %s, left by a save that was interrupted", leftover)
            try:
                if leftover.is_dir() and not leftover.is_symlink():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()
            except OSError as error:  # it takes room, and no run ever looks into it
                log.warning("%s cannot be removed: %s", leftover, error)
        self._put_back()

    def _put_back(self) -> None:
        """Give a checkpoint its name again where a kill has come between the two renames of `replace`."""
        for old in self.path.glob(f"{_REPLACED}global_step_*"):
            final = self.path / old.name.removeprefix(_REPLACED)
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                log.warning("%s gets its name back: a command was interrupted that would have replaced it", final)
                os.rename(old, final)

    def _take_lock(self) -> IO[str]:
        # Not "w", which would wipe out the owner's name before the lock says that there is one.
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
            with suppress(OSError):  # it would try again to write
                file.close()
            raise _unwritable(self.path, error) from error
        return file

    def _lock_patiently(self, file: IO[str]) -> None:
        """Raises ConfigError where a run of this host has the lock, StorageError where one of another keeps it."""
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
                    "%s is locked by %s: tried again for %.0f s, as network storage keeps the lock of a host that is "
                    "gone for a while",
                    self.path,
                    owner,
                    _FREED_S,
                )
            self._clock.sleep(_POLL_S)

    def release(self) -> None:
        self._lock.close()

    def write(self, name: str, text: str) -> None:
        """Write a small file of the run whole or not at all."""
        temporary = self.path / f".{name}.tmp"
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self.path / name)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def under_way(self, step: int) -> Path:
        """The temporary folder of the checkpoint of ``step``."""
        return self.path / f".tmp_global_step_{step}_{os.getpid()}"

    def begin_save(self, step: int, files: Mapping[str, bytes] | None = None) -> Path:
        """Make the temporary folder for the checkpoint of ``step``, with ``files`` by name.

        A whole checkpoint of the step is never replaced (CheckpointError); a damaged one is set aside.
        """
        existing = self.step_folder(step)
        if existing.exists():
            if not self.damage(existing):
                raise CheckpointError(f"{existing} exists already; a checkpoint is never overwritten.")
            # Set aside and not removed: damaged may mean that a copy was interrupted, and its weights may still be of
            # use.
            os.rename(existing, existing.with_name(f"damaged_{existing.name}_{int(time.time())}"))
        folder = self.under_way(step)
        folder.mkdir()
        for name, content in (files or {}).items():
            (folder / name).write_bytes(content)
        return folder

    def commit(self, folder: Path, step: int, digests: Mapping[str, str] | None = None) -> Path:
        """`write_manifest` and `name_it`: from here on the checkpoint exists."""
        write_manifest(folder, step, digests, self._clock)
        return self.name_it(folder, step)

    def name_it(self, folder: Path, step: int) -> Path:
        """Give a checkpoint with a manifest its name."""
        final = self.step_folder(step)
        os.rename(folder, final)
        sync(self.path)  # of which the rename is an entry
        self._known[final] = ""
        return final

    def replace(self, folder: Path, step: int) -> None:
        """Let ``folder``, which has a manifest, be the checkpoint of ``step`` in place of the one that is."""
        final = self.step_folder(step)
        old = final.with_name(f"{_REPLACED}{final.name}")
        # Nothing stands between the two renames; `_put_back` mends a kill that comes there.
        os.rename(final, old)
        try:
            self.name_it(folder, step)
        except BaseException:
            os.rename(old, final)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def prune(self, goes: Callable[[list[int]], list[int]], *spare: str | Path | None) -> None:
        """Remove the checkpoints that go of the whole ones: ``goes`` of their steps, ascending.

        The folders ``spare`` are never removed, nor is a damaged one, which counts as none. Raises OSError where one
        keeps its name; what cannot be removed of those that have lost it is told.
        """
        spared = {Path(path).expanduser().resolve() for path in spare if path}
        # Where all may stay, none has to be looked at.
        may_go = self.steps() if goes(self.steps()) else []
        for step in goes([step for step in may_go if self._is_whole(self.step_folder(step))]):
            if (folder := self.step_folder(step)) not in spared:
                self.pruned_at = self._clock.monotonic()
                # A kill while it is removed leaves half of it, which must not have the name of a checkpoint.
                os.rename(folder, self.path / f".tmp_old_{folder.name}_{os.getpid()}")
        sync(self.path)
        for old in self.path.glob(".tmp_old_*"):
            shutil.rmtree(old, ignore_errors=True)
            if old.exists():
                log.warning("%s cannot be removed whole (is a file of it in use?): it is tried again later", old)

    def _is_whole(self, folder: Path) -> bool:
        """As `damage`, but of what was whole once, only the sizes are looked at again."""
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
    return unwritten(f"nothing can be written into the run folder {path}: {error}", error, lambda: way_out)
