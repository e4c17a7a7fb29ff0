"""Declaration of keys: default and rules of the value, at the field.

Rules about one key are metadata of its field: the bounds, the allowed names, and the settings under which the key has
an effect. The type is the annotation (a `Literal` if no other table has the choices); the help text is the string under
the field. `check` reads the bounds, `notes` the conditions, `help` all of them. Rules that compare several values are
functions in `check`, because a rule language would be harder to read than Python.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rules:
    """Rules of one key, or of all keys in a section."""

    least: float | None = None
    over: float | None = None
    """Every value must be larger than this."""
    most: float | None = None
    """Largest value, as ``least`` is the smallest."""
    among: tuple[str, ...] = ()
    """The allowed names."""
    plugin: bool = False
    """True if FILE.py:NAME is allowed too."""
    only_with: Mapping[str, str] = field(default_factory=dict)
    """Conditions (syntax: `conditions`) that must all hold for the key to have an effect. Each has the reason for the
    note if it does not hold ("": the values that make it fail).
    """

    def bounds(self) -> str:
        """Return the range as text, such as "between 0 and 1"; "" if there is none."""
        if self.least is not None and self.most is not None:
            return f"between {self.least:g} and {self.most:g}"
        limits = {"at least": self.least, "over": self.over, "at most": self.most}
        return " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if limit is not None)

    def within(self, value: float) -> bool:
        """Return whether a number is in the range. NaN and infinity never are."""
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.over is None or value > self.over)
            and (self.most is None or value <= self.most)
        )


def key(default: Any, *, only_with: str | Mapping[str, str] = "", **rules: Any) -> Any:
    """Return a field with rules. ``only_with`` may be a single condition."""
    conditions = only_with if isinstance(only_with, Mapping) else dict.fromkeys([only_with] if only_with else [], "")
    metadata = {"rules": Rules(only_with=conditions, **rules)}
    # Dataclasses refuse mutable defaults, because all instances would share them.
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, *, only_with: str | Mapping[str, str] = "") -> Any:
    """Return a field that is a section. Its keys have an effect only under ``only_with``."""
    # Only the rules of this key are used, not its default.
    return field(default_factory=kind, metadata=key(None, only_with=only_with).metadata)
