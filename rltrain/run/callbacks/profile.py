"""Profiles of the chosen phases of the chosen steps (``trainer.profile_steps``) on the chosen ranks."""

from __future__ import annotations

import logging
from pathlib import Path

from rltrain.config.schema.trainer import TrainerConfig
from rltrain.run.callbacks.callback import Callback
from rltrain.runtime.calls import bind
from rltrain.runtime.group import WorkerGroup
from rltrain.trainer.metrics.step import Answered, Metrics
from rltrain.workers.interface.roles import Profiled

log = logging.getLogger(__name__)
FOLDER = "profile"
# Generation must be requested by name, because its trace may be too large for any viewer. The other excluded phases run
# no model.
_UNLESS_NAMED = ("gen", "reward", "adv", "step", "testing", "save_checkpoint")


class Profile(Callback):
    """Starts and stops the workers' profilers around phases. Traces go to the folder ``profile`` in ``folder``."""

    def __init__(self, cfg: TrainerConfig, folder: Path, group: WorkerGroup) -> None:
        self._steps, self._phases = frozenset(cfg.profile_steps or ()), cfg.profile_phases
        self._ranks = cfg.profile_ranks
        self._folder, self._group = folder / FOLDER, group
        self._step = 0
        self._running = False

    def before_step(self, step: int) -> None:
        """Enable profiling of ``step``."""
        # If the previous step failed, its profile was lost with its workers, so there is none to stop.
        self._step, self._running = step, False

    def on_phase(self, name: str) -> None:
        """Stop the profile of the previous phase and start one for this phase."""
        self._end()
        chosen = name in self._phases if self._phases else name not in _UNLESS_NAMED
        if self._step in self._steps and chosen:
            place = self._folder / f"step_{self._step:06d}"
            for rank in self._ranks:
                begin = bind(Profiled.begin_profile, str(place / f"{name}_rank_{rank:05d}"))
                self._group.submit([begin], range(rank, rank + 1)).collect()
            self._running = True

    def on_step(self, made: Answered) -> Metrics:
        """Stop the profile of the last phase."""
        self._end()
        self._step = 0
        return {}

    def _end(self) -> None:
        if not self._running:
            return
        self._running = False
        ends = [self._group.submit([bind(Profiled.end_profile)], range(rank, rank + 1)) for rank in self._ranks]
        for end in ends:
            log.info("profiled: %s", ", ".join(end.collect()[0]))
