"""The run folder: one owner at a time, and checkpoints that exist whole or not at all.

A run resumes from the newest whole checkpoint. A checkpoint is written into a temporary folder, flushed to disk and
then renamed, because a rename is atomic. Its manifest lists the size of every file, which reveals an interrupted copy
or a full disk, and the digest of its contents, which reveals a flipped bit. The driver reads the small files at once;
the large ones are read by the workers, each its share, before anything is loaded (`progress.verified`).
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import xxhash

from rltrain.base.background import heartbeat
from rltrain.base.errors import CheckpointError, ConfigError, DiskError, StorageError, unwritten
from rltrain.base.storage import patiently
from rltrain.models.files.safe import METADATA, read_metadata
from rltrain.run.checkpoints.foreign import describe_verl_checkpoint
from rltrain.workers.node import altered

log = logging.getLogger(__name__)
_STEP_FOLDER = re.compile(r"global_step_(\d+)")
# A digest has the name of its hash, which finds what chance has changed, and not what people have.
_MANIFEST, _LOCK, _RECORD, _DIGEST = "manifest.json", "run.lock", "progress.json", "xxh3_128"
# Above this the workers read a file.
_LARGE_BYTES = 2**22
# Network storage may show seconds later what another node has written.
_SEEN_S, _POLL_S = 10.0, 0.1
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
                "anew with another trainer.experiment_name (trainer.resume_mode=disable starts anew in this folder)."
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

    def __init__(self, path: str) -> None:
        super().__init__(path)
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
            now, elsewhere = time.monotonic(), " on " in owner and f" on {socket.gethostname()}," not in owner
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
            time.sleep(_POLL_S)

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
        """`seal` it and `name_it`: from here on the checkpoint exists."""
        self.seal(folder, step, digests)
        return self.name_it(folder, step)

    def seal(self, folder: Path, step: int, digests: Mapping[str, str] | None = None) -> None:
        """Write the manifest, and bring all to the disk. digests: by path, of what was hashed while it was written;
        other files are small and read here. Raises DiskError where a file that has a digest is not there.
        """
        # Listed before the manifest, which is not in itself. Without the syncs a power failure could leave empty files.
        files = {
            str(file.relative_to(folder)): {
                "bytes": _sync(file),
                _DIGEST: (digests or {}).get(str(file)) or xxhash.xxh3_128(file.read_bytes()).hexdigest(),
            }
            for file in _written(folder, digests or {})
        }
        (folder / _MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1), encoding="utf-8")
        for entry in [folder / _MANIFEST, folder, *(entry for entry in folder.rglob("*") if entry.is_dir())]:
            _sync(entry)

    def name_it(self, folder: Path, step: int) -> Path:
        """Give a sealed checkpoint its name."""
        final = self.step_folder(step)
        os.rename(folder, final)
        _sync(self.path)  # of which the rename is an entry
        self._known[final] = ""
        return final

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
                self.pruned_at = time.monotonic()
                # A kill while it is removed leaves half of it, which must not have the name of a checkpoint.
                os.rename(folder, self.path / f".tmp_old_{folder.name}_{os.getpid()}")
        _sync(self.path)
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
    return f"{path} is in use by {by}. Wait for it, stop it, or choose another trainer.experiment_name."


def _unwritable(path: Path, error: OSError) -> DiskError | StorageError:
    way_out = (
        "Make room or allow writing there, or choose another trainer.default_local_dir, and run the same command again."
    )
    return unwritten(f"nothing can be written into the run folder {path}: {error}", error, lambda: way_out)


def _written(folder: Path, digests: Mapping[str, str]) -> list[Path]:
    """The files of a save. Raises DiskError where one with a digest does not come."""
    deadline = time.monotonic() + _SEEN_S
    while True:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        missing = sorted(digests.keys() - {str(file) for file in files})
        if not missing:
            return files
        if time.monotonic() > deadline:
            raise DiskError(
                f"{missing[0]} was written and is not there ({len(missing)} of {len(digests)} such files are missing): "
                "the node that wrote it may have lost its mount of the run folder"
            )
        time.sleep(_POLL_S)


def find_damage(folder: Path, contents: bool = True) -> str | None:
    """What is wrong with a checkpoint folder, or None: the sizes of all files and the contents of the small ones.

    Of large files `large_files` knows the digests, which take time to compare. Raises StorageError where something
    cannot be read now, which is no damage.
    """
    try:
        files = _manifest(folder)
    except (OSError, ValueError, RecursionError) as error:
        return describe_verl_checkpoint(folder) or f"its {_MANIFEST} cannot be read ({error})"
    for name, expected in files.items():
        file = folder / name
        try:
            status = patiently(file, file.stat)
        except (OSError, ValueError):  # a name that cannot be one
            return f"{name} is missing"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is missing"
        if status.st_size != expected["bytes"]:
            return f"{name} has {status.st_size} bytes instead of {expected['bytes']}"
    if not contents:
        return None
    if problems := altered(_digests(folder, files, large=False)):
        return problems[0]
    try:
        read_record(folder)
        for file in patiently(folder, lambda: list(folder.glob(f"*/{METADATA}"))):
            read_metadata(file.parent)
    except CheckpointError as error:
        return str(error)
    return None


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of a checkpoint -> what is known of each: size and digest. Raises ValueError for anything else."""
    file = folder / _MANIFEST
    content = json.loads(patiently(file, file.read_bytes))
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or _RECORD not in files:
        raise ValueError(f"it does not list {_RECORD}")
    for name, entry in files.items():
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
            raise ValueError(f"it has no size of {name}")
    # One of many is lost by a flipped bit; none are there in checkpoints that were made before there were digests.
    lacking = [name for name, entry in files.items() if not isinstance(entry.get(_DIGEST), str)]
    if lacking and len(lacking) < len(files):
        raise ValueError(f"it has no digest of {lacking[0]}")
    return files


def _digests(folder: Path, files: dict[str, dict[str, Any]], *, large: bool) -> list[tuple[Path, str]]:
    entries = [(folder / name, entry) for name, entry in files.items() if _DIGEST in entry]
    return [
        (file, entry[_DIGEST])
        for file, entry in entries
        if (entry["bytes"] > _LARGE_BYTES and file.name != METADATA) == large
    ]


def large_files(folder: Path) -> list[tuple[Path, str]]:
    """The large files of a checkpoint and their digests, in the order of the ranks that have written them."""
    files = _digests(folder, _manifest(folder), large=True)
    # Of equal names, those with fewer digits have the smaller number. A rank that reads its own has it in its cache.
    return sorted(files, key=lambda entry: (entry[0].parent, len(entry[0].name), entry[0].name))


def has_digests(folder: Path) -> bool:
    """Whether the manifest knows more of the files than their sizes."""
    return any(_DIGEST in entry for entry in _manifest(folder).values())


def size_of(folder: Path) -> int:
    """Bytes that the manifest of a checkpoint lists; 0 where it cannot be read now."""
    try:
        return sum(entry["bytes"] for entry in _manifest(folder).values())
    except (OSError, ValueError, StorageError):
        return 0


def read_record(folder: Path) -> dict[str, Any]:
    """``progress.json`` of a checkpoint. Raises CheckpointError where it is not what a save has written."""
    file = folder / _RECORD
    try:
        record = json.loads(patiently(file, file.read_bytes))
        if not isinstance(record, dict) or type(record.get("global_step")) is not int:
            raise ValueError("it has no global_step")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error
    return record


def _sync(path: Path) -> int:
    """Bring a file or folder to the disk. Returns its size, which network storage is sure of once a file is open."""
    heartbeat()  # a checkpoint has many files
    # A folder can be opened for reading only, and that is enough for fsync.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
