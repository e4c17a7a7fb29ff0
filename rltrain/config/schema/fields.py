"""How a key is declared: its default, and every rule about its value, at the field.

A rule about one key stands where the key does, as metadata of the field: the bounds, the names that are allowed, and
the settings under which the key counts at all. The type is the annotation (a `Literal` where no other table has the
choices); the help text is the string under the field. `check` reads the bounds, `notes` the conditions, `help` all of
them. Rules that compare several values are functions in `check`: a language for those would be harder to read than
Python.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rules:
    """The rules of one key, or of all keys in a section."""

    least: float | None = None
    over: float | None = None
    """Every value must be larger than this."""
    most: float | None = None
    """Both: the smallest and the largest value."""
    among: tuple[str, ...] = ()
    """The allowed names."""
    plugin: bool = False
    """FILE.py:NAME is allowed beside them."""
    only_with: Mapping[str, str] = field(default_factory=dict)
    """Conditions as `conditions` reads them, which must all hold for the key to count; each with the reason that a
    user is told where it does not hold ("": the values on which it failed)."""

    def bounds(self) -> str:
        """The range as words, such as "between 0 and 1"; "" where there is none."""
        if self.least is not None and self.most is not None:
            return f"between {self.least:g} and {self.most:g}"
        limits = {"at least": self.least, "over": self.over, "at most": self.most}
        return " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if limit is not None)

    def within(self, value: float) -> bool:
        """Whether a number is in the range. NaN and infinity never are."""
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.over is None or value > self.over)
            and (self.most is None or value <= self.most)
        )


def key(default: Any, *, only_with: str | Mapping[str, str] = "", **rules: Any) -> Any:
    """A field with rules. ``only_with`` may be a single condition."""
    conditions = only_with if isinstance(only_with, Mapping) else dict.fromkeys([only_with] if only_with else [], "")
    metadata = {"rules": Rules(only_with=conditions, **rules)}
    # dataclasses refuse such a default, because all instances would share it.
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, *, only_with: str | Mapping[str, str] = "") -> Any:
    """A field that is a section; every key in it counts only under ``only_with`` too."""
    # The default given here is not used: only the rules of the section are.
    return field(default_factory=kind, metadata=key(None, only_with=only_with).metadata)
