"""Background save of one role by its workers, while the driver runs the next step."""

from __future__ import annotations

from typing import Any

from rltrain.models.files.hashed import Digests
from rltrain.runtime.calls import bind
from rltrain.runtime.group import Handle, WorkerGroup
from rltrain.workers.interface import roles
from rltrain.workers.interface.tasks import SaveTask, Written

_Kind = type[roles.Actor | roles.Critic | roles.Reference]


class SavedRole:
    """Role of which a checkpoint is saved: ``role`` is `roles.Actor`, `roles.Critic` or `roles.Reference`."""

    role: _Kind
    _group: WorkerGroup

    def begin_save(self, task: SaveTask) -> RoleSave:
        """Start writing model, optimizer and the other parts of ``task`` in the background."""
        return RoleSave(self._group, self.role, task)

    def load(self, folder: str, weights_only: bool) -> list[str]:
        """Load the saved state. Returns notes for the log."""
        return self._group.call(self.role.load, folder, weights_only)[0]


class RoleSave:
    """Background save: stages the data on the workers (blocking), then writes it in the background.

    copied: True if the workers write from a copy, so that training may continue before `finish`.
    """

    def __init__(self, group: WorkerGroup, role: _Kind, task: SaveTask) -> None:
        self._group, self._role = group, role
        self.copied = all(group.call(role.stage, task))
        self._writing: Handle[tuple[Any, Written]] | None = None
        self._sealing: Handle[Digests] | None = None

    def _write(self) -> Handle[tuple[Any, Written]]:
        self._writing = self._writing or self._group.submit([bind(self._role.write)], concurrent=True)
        return self._writing

    def _seal(self) -> Handle[Digests]:
        """Wait until all ranks have written, then have rank 0 write the index of the parts."""
        if not self._sealing:
            places = [place for place, _ in self._write().collect()]
            self._sealing = self._group.submit([bind(self._role.seal, places)], range(1), concurrent=True)
        return self._sealing

    def ready(self) -> bool:
        """Start writing if needed. Returns True once done. Raises DiskError, or WorkerLost if a rank times out."""
        return self._write().ready() and self._seal().ready()

    @property
    def lost(self) -> bool:
        """Return True if no worker is left that could write."""
        return self._group.ended

    def finish(self) -> Written:
        """Wait until everything is written. Raises DiskError if that failed."""
        (sealed,) = self._seal().collect()
        parts = [part for _, part in self._write().collect()]
        digests = [*(part.digests for part in parts), sealed]
        return Written(
            {name: digest for files in digests for name, digest in files.items()},
            [problem for part in parts for problem in part.problems],
        )
