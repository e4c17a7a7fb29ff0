"""What is said of keys that are none of ours: another spelling, no effect, or a refusal with the way out.

The tables are `verl_keys` and `verl_refused`; here is how they are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rltrain.config.schema.keys import all_keys
from rltrain.config.verl.keys import ALIASES, CLASSES, NO_EFFECT, OWNERS
from rltrain.config.verl.refused import OTHERS, REFUSED, SECTIONS

_ROW = re.compile(r"(?P<pattern>[^=!]+)(?:(?P<operator>!?=)(?P<values>.*))?")
_OTHER_KEY = re.compile(r"\$\{([\w.]+)\}")
_PARTS = [*ALIASES, *(part for pair in CLASSES for part in pair)]
# Where the keys of a model stand here: by the start of the key, (its passes, its sharding, the model).
_PLACES = {
    "critic.": ("critic", "critic.model.fsdp_config", "critic.model"),
    "reward": ("actor_rollout_ref.actor", "reward_model.model.fsdp_config", "reward_model.model"),
    "actor_rollout_ref.ref.": (
        "actor_rollout_ref.ref",
        "actor_rollout_ref.ref.fsdp_config",
        "actor_rollout_ref.model",
    ),
    "": ("actor_rollout_ref.actor", "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.model"),
}


@dataclass(frozen=True)
class Answer:
    """Says what becomes of a key."""

    row: str
    """The row of the tables that fits a key."""
    why: str
    """Its sentence, "" where nothing need be said."""
    refused: bool = False
    """The run would be another one than the user asked for."""


def rename(key: str) -> str:
    """Our spelling of ``key`` (itself when it has no other)."""
    for old, new in ALIASES.items():
        if key == old:
            return new
        if old.endswith(".") and key.startswith(old):
            return new + key[len(old) :]
    return key


def leaves_of(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values, in any spelling; a free-form dictionary is one value."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name == "_target_":  # Hydra's class names
            continue
        known = all_keys().get(rename(key))
        # verl has some keys as sections, with keys of their own.
        is_leaf = known and (known.free_form or not any(f"{part}.".startswith(f"{key}.") for part in _PARTS))
        if isinstance(value, Mapping) and value and not is_leaf:
            yield from leaves_of(value, f"{key}.")
        else:
            yield key, value


def answer(key: str, value: Any, lookup: Callable[[str], Any] = lambda key: None) -> Answer | None:
    """What the tables say of a key that the schema lacks; None for keys that they do not know.

    lookup: the value of a key of ours, for rows that compare with one.
    """
    for row, why in REFUSED.items():
        pattern, operator, values = _parts(row, lookup)
        if not fnmatchcase(key, pattern):
            continue
        if operator == "=":
            if _is_among(value, values):
                return Answer(row, _placed(why, key), True)
            continue  # of other values another row may speak
        refused = not turned_off(value) and not _is_among(value, values)
        return Answer(row, _placed(why, key) if refused else "", refused)
    for pattern, (switch, why) in SECTIONS.items():
        if fnmatchcase(f"{key}.", pattern):
            refused = not turned_off(value) and (not switch or key.endswith(f".{switch}"))
            return Answer(pattern, _placed(why, key) if refused else "", refused)
    for row, why in NO_EFFECT.items():
        pattern, operator, values = _parts(row, lookup)
        if fnmatchcase(key, pattern) and _is_owned(key, pattern):
            off = _is_among(value, values) if operator else turned_off(value)
            quiet = value is None or _follows(value) or off
            return Answer(row, "" if quiet else why)
    # What is turned off of these is nobody's, and may be a mistyped key of ours.
    others = OTHERS.items() if not turned_off(value) else ()
    return next((Answer(row, why, True) for row, why in others if fnmatchcase(key, row)), None)


def _is_owned(key: str, pattern: str) -> bool:
    """Whether a "*" at the start of a row stands for a section of verl's that has such keys."""
    return not pattern.startswith("*.") or key.rpartition(pattern[1:].partition("*")[0])[0] in OWNERS


def _parts(row: str, lookup: Callable[[str], Any]) -> tuple[str, str, list[str]]:
    """Pattern, operator and values of a row."""
    found = _ROW.fullmatch(row)
    assert found, row
    values = _OTHER_KEY.sub(lambda other: shown(lookup(other[1])), found["values"] or "")
    return found["pattern"], found["operator"] or "", values.split("|") if values else []


def _is_among(value: Any, values: list[str]) -> bool:
    # Switches are often typed as 0 and 1.
    return shown(value) in values or (value in (0, 1) and str(bool(value)) in values)


def _placed(why: str, key: str) -> str:
    role, fsdp, model = next(places for start, places in _PLACES.items() if key.startswith(start))
    return why.replace("{role}", role).replace("{fsdp}", fsdp).replace("{model}", model)


def turned_off(value: Any) -> bool:
    """Whether a value says that a thing is not wanted. One that follows another key of a file says nothing."""
    return not value or value == "disabled" or _follows(value)


def _follows(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def shown(value: Any) -> str:
    """A value as a user types it."""
    return "null" if value is None else str(value)
