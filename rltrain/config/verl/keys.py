"""What becomes of a key that somebody wrote: `rename` gives our spelling, and of one that the schema lacks even so
`verdict` says whether it is refused, is without effect, or is known to nobody.

The tables are `spellings`, `refused` and `no_effect`, sorted by section, what is special before what is general. They
are no part of the schema, so that help, defaults and a printed configuration show only what has an effect. A row is a
condition (`schema.conditions`) on keys of verl's, and the sentence that is said where it holds; of several rows the
first that fits a key decides. What turns a thing off is neither refused nor noted unless a row names it after "=". A
sentence may hold the names that `places_of` gives, such as {fsdp}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rltrain.config.schema.conditions import Condition, is_off, parse
from rltrain.config.schema.keys import all_keys
from rltrain.config.verl.no_effect import NO_EFFECT, OWNERS
from rltrain.config.verl.refused import OTHERS, REFUSED, SECTIONS
from rltrain.config.verl.spellings import ALIASES, CLASSES

_PARTS = [*ALIASES, *(part for pair in CLASSES for part in pair)]


@dataclass(frozen=True)
class Verdict:
    """Says what becomes of a key that the schema lacks."""

    row: str
    """The row of the tables that fits the key."""
    why: str
    """Its sentence."""
    applies: bool
    """The sentence is to be said of the key's value."""
    forbids: bool = False
    """The row refuses, since a run would be another one than the user asked for; others are notes."""

    @property
    def refused(self) -> bool:
        """Whether the key is refused with its value."""
        return self.forbids and self.applies


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
        schema_key = all_keys().get(rename(key))
        # verl has some keys as sections, with keys of their own.
        is_leaf = schema_key and (schema_key.free_form or not any(f"{part}.".startswith(f"{key}.") for part in _PARTS))
        if isinstance(value, Mapping) and value and not is_leaf:
            yield from leaves_of(value, f"{key}.")
        else:
            yield key, value


def rows_of(key: str, rows: Mapping[str, str]) -> Iterator[tuple[str, Condition, str]]:
    """The rows that fit a key, whatever its value: each with its condition and its sentence."""
    for row, why in rows.items():
        if fnmatchcase(key, (condition := parse(row)).key):
            yield row, condition, why


def applies(condition: Condition, value: Any, lookup: Callable[[str], Any] = lambda key: None) -> bool:
    """Whether a row's sentence is to be said of a value. lookup: the value of a key of ours."""
    return condition.holds(value, lookup) and (condition.operator == "=" or not is_off(value))


def verdict(key: str, value: Any, lookup: Callable[[str], Any] = lambda key: None) -> Verdict | None:
    """What the tables say of a key that the schema lacks; None for keys that they do not know.

    lookup: the value of a key of ours, for rows that compare with one.
    """
    for row, condition, why in rows_of(key, REFUSED):
        holds = applies(condition, value, lookup)
        if holds or condition.operator in ("", "!="):  # of other values another row may speak
            return Verdict(row, why.format(**places_of(key)), holds, forbids=True)
    for pattern, (switch, why) in SECTIONS.items():
        if fnmatchcase(f"{key}.", pattern):
            holds = not is_off(value) and (not switch or key.endswith(f".{switch}"))
            return Verdict(pattern, why.format(**places_of(key)), holds, forbids=True)
    for row, condition, why in rows_of(key, NO_EFFECT):
        if _is_owned(key, condition.key):
            return Verdict(row, why.format(**places_of(key)), applies(condition, value))
    # What is turned off of these is nobody's, and may be a mistyped key of ours.
    rows = () if is_off(value) else rows_of(key, OTHERS)
    return next((Verdict(row, why, True, forbids=True) for row, _, why in rows), None)


def _is_owned(key: str, pattern: str) -> bool:
    """Whether a "*" at the start of a row stands for a section of verl's that has such keys."""
    return not pattern.startswith("*.") or key.rpartition(pattern[1:].partition("*")[0])[0] in OWNERS


def places_of(key: str) -> dict[str, str]:
    """Where the settings of the key's model stand here: its passes (role), sharding (fsdp), model and optimizer."""
    if key.startswith("critic."):
        return {"role": "critic", "fsdp": "critic.model.fsdp_config", "model": "critic.model", "optim": "critic.optim"}
    role = "actor_rollout_ref.ref" if key.startswith("actor_rollout_ref.ref.") else "actor_rollout_ref.actor"
    places = {"role": role, "fsdp": f"{role}.fsdp_config", "model": "actor_rollout_ref.model"}
    if key.startswith("reward"):
        places |= {"fsdp": "reward_model.model.fsdp_config", "model": "reward_model.model"}
    return places | {"optim": "actor_rollout_ref.actor.optim"}
