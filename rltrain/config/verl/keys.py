"""Treatment of keys that a user wrote. `rename` returns the spelling of the schema. For a key that the schema lacks,
`verdict` returns the error or the note. These are rows of `table`, not of the schema, so that help, defaults and a
printed configuration show only keys with an effect. The first matching row decides; rows of single keys precede
patterns. A key that is turned off is neither refused nor noted, unless a row has its value after "=".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from rltrain.config.schema.conditions import is_off
from rltrain.config.schema.keys import all_keys
from rltrain.config.verl.table import Row, rows, sentence


@dataclass(frozen=True)
class Verdict:
    """Treatment of a key that the schema lacks."""

    row: Row
    """The row of the table that matches the key."""
    why: str
    """The sentence of the row."""
    applies: bool
    """True if the row applies to the value of the key."""

    @property
    def forbids(self) -> bool:
        """True if the row makes the key an error. Other rows only add a note."""
        return self.row.action != "no effect"

    @property
    def refused(self) -> bool:
        """True if the key is refused with its value."""
        return self.forbids and self.applies


@cache
def aliases() -> dict[str, str]:
    """Return the spellings of all versions of verl -> rltrain's. A prefix ends in a dot."""
    return {row.key.removesuffix("*"): row.to.removesuffix("*") for row in rows("renamed")}


@cache
def _parts() -> tuple[str, ...]:
    return (*aliases(), *(row.key for row in rows("path", "name")))


def rename(key: str) -> str:
    """Return rltrain's spelling of ``key`` (itself if there is no other)."""
    if key in aliases():
        return aliases()[key]
    prefixes = ((old, new) for old, new in aliases().items() if old.endswith(".") and key.startswith(old))
    return next((new + key[len(old) :] for old, new in prefixes), key)


def leaves_of(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values, in any spelling; a free-form dictionary is one value."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name == "_target_":  # Hydra's class name
            continue
        schema_key = all_keys().get(rename(key))
        # In verl some of these keys are sections.
        is_leaf = schema_key and (
            schema_key.free_form or not any(f"{part}.".startswith(f"{key}.") for part in _parts())
        )
        if isinstance(value, Mapping) and value and not is_leaf:
            yield from leaves_of(value, f"{key}.")
        else:
            yield key, value


def rows_of(key: str) -> Iterator[Row]:
    """Yield the rows that match a key, independent of its value."""
    for row in rows("refused", "section", "no effect", "other"):
        name = f"{key}." if row.action == "section" else key
        if row.key == key or ("*" in row.key and fnmatchcase(name, row.key) and _is_owned(key, row)):
            yield row


def verdict(key: str, value: Any, lookup: Callable[[str], Any] = lambda key: None) -> Verdict | None:
    """Return the treatment of a key that the schema lacks; None if no row matches.

    lookup: returns the value of a key of the schema, for rows that compare with one.
    """
    for row in rows_of(key):
        is_switch = row.action != "section" or not row.to or key.endswith(f".{row.to}")
        operator = row.condition.operator
        holds = is_switch and row.condition.holds(value, lookup) and (operator == "=" or not is_off(value))
        # Another row may match other values of the key. A recipe's key that is off may be a mistyped key of the schema.
        is_last = row.action in ("section", "no effect") or (row.action == "refused" and operator in ("", "!="))
        if holds or is_last:
            return Verdict(row, row.note.format(**places_of(key), to=row.to), holds)
    return None


def _is_owned(key: str, row: Row) -> bool:
    """Return whether a "*" at the start of a note's row stands for a section of verl that has such keys."""
    if row.action != "no effect" or not row.key.startswith("*."):
        return True
    return key.rpartition(row.key[1:].partition("*")[0])[0] in sentence("owners").split()


def refused_null(key: str) -> str:
    """Return why null is an error for a key of the schema, "" if it means the default."""
    ruling = verdict(key, None)
    return ruling.why if ruling and ruling.refused else ""


@cache
def classes() -> dict[tuple[str, str], str]:
    """Return (key of the path, key of the name) of a class -> rltrain's key that holds PATH:NAME."""
    return {(path.key, name.key): path.to for path in rows("path") for name in rows("name") if name.to == path.to}


def places_of(key: str) -> dict[str, str]:
    """Return the sections of the key's model: its passes (role), sharding (fsdp), model and optimizer."""
    if key.startswith("critic."):
        return {"role": "critic", "fsdp": "critic.model.fsdp_config", "model": "critic.model", "optim": "critic.optim"}
    role = "actor_rollout_ref.ref" if key.startswith("actor_rollout_ref.ref.") else "actor_rollout_ref.actor"
    places = {"role": role, "fsdp": f"{role}.fsdp_config", "model": "actor_rollout_ref.model"}
    if key.startswith("reward"):
        places |= {"fsdp": "reward_model.model.fsdp_config", "model": "reward_model.model"}
    return places | {"optim": "actor_rollout_ref.actor.optim"}
