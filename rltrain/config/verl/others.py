"""Another trainer's configuration, read by the tables of its format (`easyr1`), as settings of ours.

Every key is carried over, refused, or said to be without effect, by its own name. What is left out has the other
trainer's default where the table gives one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from rltrain.config.schema import Config
from rltrain.config.schema.keys import get, is_known
from rltrain.config.verl.renames import answer, rename, shown


@dataclass(frozen=True)
class Format:
    """The tables of a trainer's configuration."""

    name: str
    keys: Mapping[str, str]
    """Its key -> ours; a key that ends with a star stands for all that begin so, and the first row that fits counts."""
    values: Mapping[str, Mapping[Any, Any]]
    """Pattern -> what a value of its is here."""
    only: Mapping[str, tuple[tuple[Any, ...], str]]
    """Pattern -> (values that need nothing here, why); a star stands for any value."""
    defaults: Mapping[str, Any]
    """Its key -> the value where the file has none."""
    together: tuple[str, ...]
    """Patterns of the keys that ``joint`` takes, since they make sense together alone."""
    joint: Callable[[Reading], None]
    own: tuple[str, ...]
    """How its keys begin; others are taken as ours."""

    def has(self, key: str) -> bool:
        """Whether a key is of this format, and not one of ours by the same name."""
        patterns = (*self.together, *self.only, *self.keys)
        return key.startswith(self.own) and any(fnmatchcase(key, each) for each in patterns)


@dataclass
class Reading:
    """A configuration of another trainer, read as ours."""

    form: Format
    theirs: Mapping[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    """Our key -> value."""
    why: dict[str, str] = field(default_factory=dict)
    """Our key -> what is to be said of it."""
    was: dict[str, str] = field(default_factory=dict)
    """Our key -> the other trainer's, where it was written."""
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Both: what is to be said of keys that are not carried over."""

    def value(self, key: str, default: Any = None) -> Any:
        """What was written, or the other trainer's default."""
        found = self.theirs.get(key)
        return self.form.defaults.get(key, default) if found is None else found

    def put(self, key: str, value: Any, *of: str) -> None:
        """Set a key of ours for what ``of``, keys of theirs, say."""
        written = [each for each in of if self.theirs.get(each) is not None]
        if not written and is_known(key) and get(Config(), key) == value:
            return
        self.settings[key] = value
        if not written:
            self.why[key] = f"{self.form.name}'s default"
        elif key not in written:
            self.why[key] = "was " + ", ".join(f"{each}={shown(self.theirs[each])}" for each in written)
            self.was[key] = written[0]

    def defaulted(self) -> str:
        """One sentence about the settings that nobody wrote."""
        names = [f"{key}={shown(self.settings[key])}" for key, why in self.why.items() if key not in self.was]
        return f"{self.form.name}'s defaults count where the file says nothing: {', '.join(names)}" if names else ""

    def take(self, key: str, value: Any) -> None:
        """Carry over one key by the tables."""
        if any(fnmatchcase(key, pattern) for pattern in self.form.together):
            return
        if found := next((each for pattern, each in self.form.only.items() if fnmatchcase(key, pattern)), None):
            allowed, why = found
            if "*" in allowed:
                self.notes += [f"{key}: no effect: {why}"] if value else []
            elif value is not None and value not in allowed:
                self.refused.append(f"{key}={shown(value)}: {why}.")
            return
        table = next((each for pattern, each in self.form.values.items() if fnmatchcase(key, pattern)), {})
        turned = table.get(value, value) if isinstance(value, str | int) else value
        if turned is None or turned == {}:
            return
        ours = self._ours(key)
        if ours is None or not (is_known(rename(ours)) or answer(ours, value) or not key.startswith(self.form.own)):
            self.refused.append(
                f"{key}={shown(value)}: nothing here does what this key of {self.form.name}'s asks for."
            )
            return
        self.put(ours, turned, key)

    def _ours(self, key: str) -> str | None:
        for pattern, ours in self.form.keys.items():
            if pattern == key:
                return ours
            if pattern.endswith("*") and key.startswith(pattern[:-1]):
                return ours.removesuffix("*") + key[len(pattern) - 1 :]
        return key if is_known(key) or not key.startswith(self.form.own) else None


def read(form: Format, theirs: Mapping[str, Any]) -> Reading:
    """The settings of ours that ``theirs``, by dotted keys, stand for."""
    reading = Reading(form, theirs)
    for key, value in {**form.defaults, **theirs}.items():
        reading.take(key, value)
    form.joint(reading)
    return reading
