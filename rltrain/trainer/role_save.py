"""A save of one role that its workers have begun, while the driver makes the next step."""

from __future__ import annotations

from typing import Any

from rltrain.controller.calls import bind
from rltrain.controller.group import WorkerGroup
from rltrain.workers import roles
from rltrain.workers.tasks import SaveTask, Written


class RoleSave:
    """Has what is to be saved taken, waits for that, and has it written in the background.

    role: `roles.Actor` or `roles.Critic`. copied: the workers write a copy, so training may go on before `finish`.
    """

    def __init__(self, group: WorkerGroup, role: type[roles.Actor | roles.Critic], task: SaveTask) -> None:
        self._group, self._role = group, role
        self.copied = all(group.call(role.stage, task))
        self._handle = group.submit([bind(role.write)], beside=True)

    def ready(self) -> bool:
        """Whether all ranks have written, or one has failed. Raises WorkerLost where one takes longer than it may."""
        return self._handle.ready()

    @property
    def lost(self) -> bool:
        """Whether nobody is left to write it."""
        return self._group.ended

    def finish(self) -> Written:
        """Wait until everything is written. Raises DiskError where it could not be."""
        found: list[tuple[Any, Written]] = self._handle.collect()
        places = [place for place, _ in found]
        (sealed,) = self._group.submit([bind(self._role.seal, places)], range(1), beside=True).collect()
        digests = [each.digests for _, each in found]
        return Written(
            {name: digest for each in [*digests, sealed] for name, digest in each.items()},
            [problem for _, each in found for problem in each.problems],
        )


class Saves:
    """A role that can be saved."""

    _group: WorkerGroup
    _saved_as: type[roles.Actor | roles.Critic]

    def begin_save(self, task: SaveTask) -> RoleSave:
        """Have model and optimizer, and what else ``task`` says, written in the background."""
        return RoleSave(self._group, self._saved_as, task)
