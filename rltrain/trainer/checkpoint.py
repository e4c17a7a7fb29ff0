"""The run folder: one owner at a time, and checkpoints that exist whole or not at all.

A run resumes from the newest whole checkpoint. A checkpoint is written into a temporary folder, flushed to disk and
then renamed, because a rename is atomic. Its manifest lists the size of every file, which reveals an interrupted copy
or a full disk. Digests of the contents are left out: to make them, every save would read back everything it has
written, which takes minutes for a large model.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import IO, Any

from rltrain.errors import CheckpointError, ConfigError, DiskError

log = logging.getLogger(__name__)
_STEP_FOLDER = re.compile(r"global_step_(\d+)")
_MANIFEST, _LOCK = "manifest.json", "run.lock"


class Checkpoints:
    """The checkpoints of a run folder, which need not exist; nothing is changed."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser().resolve()

    def step_folder(self, step: int) -> Path:
        return self.path / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Steps with a checkpoint folder, whole or not, ascending."""
        found = [_STEP_FOLDER.fullmatch(entry.name) for entry in self.path.glob("global_step_*") if entry.is_dir()]
        return sorted(int(match[1]) for match in found if match)

    def newest(self) -> Path | None:
        """The newest checkpoint that agrees with its manifest; those that do not are named and passed over."""
        # The folder itself is looked at. A file that points at the newest checkpoint could disagree with it.
        for step in reversed(self.steps()):
            if not (problem := find_damage(self.step_folder(step))):
                return self.step_folder(step)
            log.warning("passing over %s: %s", self.step_folder(step), problem)
        return None

    def problem(self) -> str | None:
        """Why a run could not take the folder now, or None."""
        parent = next(each for each in (self.path, *self.path.parents) if each.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            return f"trainer.default_local_dir={self.path} cannot be created: {parent} is no folder one may write in."
        try:
            with open(self.path / _LOCK) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _in_use(self.path, (self.path / _LOCK).read_text())
        except OSError:  # nobody has ever taken the lock, or the storage has none
            return None
        return None


class RunFolder(Checkpoints):
    """``trainer.default_local_dir``. Holding the object holds the lock; the kernel frees it even after kill -9."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DiskError(f"trainer.default_local_dir={path} cannot be created: {error}") from error
        self._lock = self._take_lock()
        # Only under the lock: before, the folder might be a save of a run that is alive.
        for leftover in self.path.glob(".tmp_*"):
            log.warning("removing %s, left by a save that was interrupted", leftover)
            shutil.rmtree(leftover)

    def _take_lock(self) -> IO[str]:
        # Not "w", which would wipe out the owner's name before the lock says that there is one.
        file = open(self.path / _LOCK, "a+")  # noqa: SIM115 - held for the life of the run
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read()
            file.close()
            raise ConfigError(_in_use(self.path, owner)) from None
        except OSError as error:  # some network storage has no locks at all
            log.warning("%s cannot be locked (%s): make sure that no other run uses it", self.path, error)
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}, started {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        return file

    def release(self) -> None:
        self._lock.close()

    def write(self, name: str, text: str) -> None:
        """Write a small file of the run whole or not at all."""
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(text)
        os.replace(temporary, self.path / name)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def begin_save(self, step: int) -> Path:
        """An empty temporary folder for the checkpoint of ``step``.

        A whole checkpoint of the step is never replaced (CheckpointError); a damaged one is set aside.
        """
        existing = self.step_folder(step)
        if existing.exists():
            if not find_damage(existing):
                raise CheckpointError(f"{existing} exists already; a checkpoint is never overwritten.")
            # Set aside and not removed: damaged may mean that a copy was interrupted, and its weights may still be of
            # use.
            os.rename(existing, existing.with_name(f"damaged_{existing.name}_{int(time.time())}"))
        folder = self.path / f".tmp_global_step_{step}_{os.getpid()}"
        folder.mkdir()
        return folder

    def commit(self, folder: Path, step: int) -> Path:
        """Manifest, fsync, one rename: from here on the checkpoint exists."""
        found = sorted(folder.rglob("*"))
        # Taken before the manifest is written, so it does not list itself.
        sizes = {str(each.relative_to(folder)): {"bytes": each.stat().st_size} for each in found if each.is_file()}
        (folder / _MANIFEST).write_text(json.dumps({"step": step, "files": sizes}, indent=1))
        # Contents before the rename: else a power failure could leave the final name with empty files behind it.
        for each in folder.rglob("*"):
            _sync(each)
        _sync(folder)
        final = self.step_folder(step)
        os.rename(folder, final)
        # The rename is an entry of the parent folder, which must reach the disk as well.
        _sync(self.path)
        return final

    def prune(self, keep: int | None, spare: str | None = None) -> None:
        """Remove all but the newest ``keep`` checkpoints (None or less than 1: keep all).

        The folder ``spare`` is never removed.
        """
        if keep is None or keep < 1:
            return
        for step in self.steps()[:-keep]:
            if spare is None or self.step_folder(step) != Path(spare).expanduser().resolve():
                shutil.rmtree(self.step_folder(step))


def _in_use(path: Path, owner: str) -> str:
    by = owner.strip() or "another process"
    return f"{path} is in use by {by}. Wait for it, stop it, or choose another trainer.experiment_name."


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None. Looks at the files' sizes alone; see the top of this file."""
    try:
        files: dict[str, dict[str, int]] = json.loads((folder / _MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"its {_MANIFEST} cannot be read ({error})"
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}"
    return None


def read_record(folder: Path) -> dict[str, Any]:
    """``progress.json`` of a checkpoint. Raises CheckpointError when the folder is not a whole checkpoint."""
    if problem := find_damage(folder):
        raise CheckpointError(f"{folder} cannot be resumed from: {problem}.")
    return json.loads((folder / "progress.json").read_text())


def _sync(path: Path) -> None:
    # A folder can be opened for reading only, and that is enough for fsync.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
