"""Timeouts of calls to the workers, and stack dumps of a hang.

A hanging worker neither responds nor dies, and in collectives all others wait for it. Without a deadline the run would
stall unnoticed. A fixed limit does not work, because one call takes a second and another an hour. So each kind of call
has a separate limit, a multiple of its longest duration so far. Progress within a call is not tracked.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rltrain.common.background import BackgroundJob

# Time that storage may take to write the stacks.
_WRITE_S = 10.0
# Frames of faulthandler stacks in which torch waits for other ranks, innermost first.
_COLLECTIVE = re.compile(
    r'File "[^"]*torch/distributed/[^"]*", line \d+ in '
    r"((?:_?all_(?:gather|reduce|to_all)|reduce_scatter|broadcast|barrier|scatter|gather|reduce|send|recv)\w*)"
)


@dataclass
class Deadlines:
    """Timeouts: a call may take ``factor`` times as long as the longest of its kind so far, or ``floor_s`` if that is
    more.

    The first call of a kind may take ``factor`` times ``floor_s``. floor_s None: no limit.
    """

    floor_s: float | None = None
    factor: float = 5.0
    incidents: Path | None = None
    """Folder of the stack dumps."""
    fixed_s: float | None = None
    """Fixed limit for every call instead."""
    _shown: dict[str, Callable[[], Mapping[str, str]]] = field(default_factory=dict)
    _longest: dict[str, float] = field(default_factory=dict)

    def show(self, name: str, stacks: Callable[[], Mapping[str, str]]) -> None:
        """Register stacks() of further processes, by name, to be written on a hang."""
        self._shown[name] = stacks

    def limit_s(self, phase: str) -> float:
        """Return the seconds after which ``phase`` counts as hung."""
        if self.fixed_s is not None:
            return self.fixed_s
        if self.floor_s is None:
            return math.inf
        return max(self.floor_s, self.factor * self._longest.get(phase, self.floor_s))

    def took(self, phase: str, seconds: float) -> None:
        """Record the duration of a call of ``phase``."""
        self._longest[phase] = max(seconds, self._longest.get(phase, 0.0))

    @property
    def keys(self) -> str:
        """Keys that determine the limits, for a message."""
        if self.fixed_s is not None:
            return f"trainer.hang_timeout_s={self.fixed_s}"
        return f"trainer.hang_floor_s={self.floor_s}, trainer.hang_factor={self.factor}"

    def write_stacks(self, phase: str, **known: Mapping[str, str]) -> str:
        """Write stacks of ``known`` and other registered processes to ``incidents``. Returns text for the message."""
        if self.incidents is None:
            return ""
        others = {name: ask() for name, ask in self._shown.items() if name not in known}
        stacks = {name: stack for stacks_by_name in (known | others).values() for name, stack in stacks_by_name.items()}
        file = self.incidents / f"hang_{phase}_{time.strftime('%Y%m%d_%H%M%S')}.txt"
        writing = BackgroundJob("writing stacks", lambda: _write(file, "\n".join(map("\n".join, stacks.items()))))
        if not writing.ready(_WRITE_S):  # the storage of the run folder may be the cause of the hang
            return f" Their stacks could not be written: {file.parent} does not respond."
        try:
            writing.result()
        except OSError as error:
            return f" Their stacks could not be written: {error}."
        return f" Stacks of the responding processes: {file}."


def different_collectives(stacks: Mapping[int, str], world: int) -> str:
    """Return a message if all ``world`` ranks wait in collectives, but not all in the same one; else "".

    Ranks in different collectives never complete, so rerunning does not help. If a rank is missing, the others may be
    right to wait for it.
    """
    names = {rank: calls[0] for rank, stack in sorted(stacks.items()) if (calls := _COLLECTIVE.findall(stack))}
    if len(names) < world or len(set(names.values())) < 2:
        return ""
    waits = ", ".join(f"rank {list(names.values()).index(name)} in {name}" for name in dict.fromkeys(names.values()))
    return (
        f"The ranks wait in different collectives ({waits}). This is a bug in rltrain, so the same command will hang "
        "again. Please report it with the stacks."
    )


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8", errors="backslashreplace")
