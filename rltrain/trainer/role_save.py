"""A save of one role that its workers have begun, while the driver makes the next step."""

from __future__ import annotations

from typing import Any

from rltrain.controller.calls import bind
from rltrain.controller.group import Handle, WorkerGroup
from rltrain.models.files.hashed import Digests
from rltrain.workers import roles
from rltrain.workers.tasks import SaveTask, Written

_Kind = type[roles.Actor | roles.Critic | roles.Reference]


class SavedRole:
    """A role that is part of checkpoints: ``role`` is `roles.Actor`, `roles.Critic` or `roles.Reference`."""

    role: _Kind
    _group: WorkerGroup

    def begin_save(self, task: SaveTask) -> RoleSave:
        """Have model and optimizer, and what else ``task`` says, written in the background."""
        return RoleSave(self._group, self.role, task)

    def load(self, folder: str, weights_only: bool) -> list[str]:
        """Read them back. Returns notes for the log."""
        return self._group.call(self.role.load, folder, weights_only)[0]


class RoleSave:
    """Has what is to be saved taken, waits for that, and has it written in the background.

    copied: the workers write a copy, so training may go on before `finish`.
    """

    def __init__(self, group: WorkerGroup, role: _Kind, task: SaveTask) -> None:
        self._group, self._role = group, role
        self.copied = all(group.call(role.stage, task))
        self._writing: Handle[tuple[Any, Written]] | None = None
        self._sealing: Handle[Digests] | None = None

    def _write(self) -> Handle[tuple[Any, Written]]:
        self._writing = self._writing or self._group.submit([bind(self._role.write)], beside=True)
        return self._writing

    def _seal(self) -> Handle[Digests]:
        """Wait until all ranks have written, and have said by rank 0 what is where."""
        if not self._sealing:
            places = [place for place, _ in self._write().collect()]
            self._sealing = self._group.submit([bind(self._role.seal, places)], range(1), beside=True)
        return self._sealing

    def ready(self) -> bool:
        """Have it written; whether that is done. Raises WorkerLost where a rank takes longer than it may, and as
        `finish`."""
        return self._write().ready() and self._seal().ready()

    @property
    def lost(self) -> bool:
        """Whether nobody is left to write it."""
        return self._group.ended

    def finish(self) -> Written:
        """Wait until everything is written. Raises DiskError where it could not be."""
        (sealed,) = self._seal().collect()
        parts = [part for _, part in self._write().collect()]
        digests = [*(part.digests for part in parts), sealed]
        return Written(
            {name: digest for files in digests for name, digest in files.items()},
            [problem for part in parts for problem in part.problems],
        )
