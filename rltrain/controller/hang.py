"""How long a call to the workers may take before it counts as hung, and what is written down then.

A worker that hangs neither answers nor dies, and collectives make all others wait for it: without a deadline, a run
would stand still until somebody looks. No fixed limit fits, as one call takes a second and another an hour. So each
kind of call has a limit of its own, a multiple of the longest so far. Left out: progress within a call is not watched.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rltrain.base.background import BackgroundJob

# How long storage may take for the stacks.
_WRITE_S = 10.0
# The frames of a stack of faulthandler in which torch waits for other ranks; the first is the innermost.
_COLLECTIVE = re.compile(
    r'File "[^"]*torch/distributed/[^"]*", line \d+ in '
    r"((?:_?all_(?:gather|reduce|to_all)|reduce_scatter|broadcast|barrier|scatter|gather|reduce|send|recv)\w*)"
)


@dataclass
class Deadlines:
    """A call may take ``factor`` times as long as the longest of its kind so far, and never less than ``floor_s``.

    The first call of a kind may take ``factor`` times ``floor_s``. floor_s None: there is no limit.
    """

    floor_s: float | None = None
    factor: float = 5.0
    incidents: Path | None = None
    """Folder of the stacks."""
    fixed_s: float | None = None
    """The limit of every call instead."""
    _shown: dict[str, Callable[[], Mapping[str, str]]] = field(default_factory=dict)
    _longest: dict[str, float] = field(default_factory=dict)

    def show(self, who: str, stacks: Callable[[], Mapping[str, str]]) -> None:
        """When something hangs, write what stacks() shows too, by name of the process."""
        self._shown[who] = stacks

    def limit_s(self, phase: str) -> float:
        """Seconds after which ``phase`` counts as hung."""
        if self.fixed_s is not None:
            return self.fixed_s
        if self.floor_s is None:
            return math.inf
        return max(self.floor_s, self.factor * self._longest.get(phase, self.floor_s))

    def took(self, phase: str, seconds: float) -> None:
        """Remember how long a call of ``phase`` took."""
        self._longest[phase] = max(seconds, self._longest.get(phase, 0.0))

    @property
    def keys(self) -> str:
        """What the limits follow from, for a message."""
        if self.fixed_s is not None:
            return f"trainer.hang_timeout_s={self.fixed_s}"
        return f"trainer.hang_floor_s={self.floor_s}, trainer.hang_factor={self.factor}"

    def write_stacks(self, phase: str, **known: Mapping[str, str]) -> str:
        """Write the stacks of ``known`` and, for all names that are not in it, of those that `show` named into
        a file of ``incidents``. Returns a sentence for the message."""
        if self.incidents is None:
            return ""
        others = {name: ask() for name, ask in self._shown.items() if name not in known}
        stacks = {name: stack for stacks_by_name in (known | others).values() for name, stack in stacks_by_name.items()}
        file = self.incidents / f"hang_{phase}_{time.strftime('%Y%m%d_%H%M%S')}.txt"
        writing = BackgroundJob("writing stacks", lambda: _write(file, "\n".join(map("\n".join, stacks.items()))))
        if not writing.ready(_WRITE_S):  # the storage of the run folder may be what hangs
            return f" Their stacks could not be written: {file.parent} does not answer."
        try:
            writing.result()
        except OSError as error:
            return f" Their stacks could not be written: {error}."
        return f" Stacks of those that answer: {file}."


def different_collectives(stacks: Mapping[int, str], world: int) -> str:
    """A sentence if all ``world`` ranks wait in collectives, and not all in the same one; else "".

    Ranks that issue different collectives never meet, however often the command is run. A missing rank may be the one
    that all others rightly wait for.
    """
    names = {rank: found[0] for rank, stack in sorted(stacks.items()) if (found := _COLLECTIVE.findall(stack))}
    if len(names) < world or len(set(names.values())) < 2:
        return ""
    waits = ", ".join(f"rank {list(names.values()).index(name)} in {name}" for name in dict.fromkeys(names.values()))
    return (
        f"The ranks wait in different collectives ({waits}). This is a fault of rltrain: the same command will hang "
        "again. Please report it with the stacks."
    )


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8", errors="backslashreplace")
