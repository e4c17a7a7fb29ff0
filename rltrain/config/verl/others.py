"""Other trainers: their names for our keys, for the error of a mistyped key; and the trainer that a configuration is
for, so that one sentence says it instead of one for each key. The names are rows of `table`.

A name that means something else here, or that has no counterpart, has no row: a wrong hint is worse than none.
"""

from __future__ import annotations

from collections.abc import Collection

from rltrain.config.verl.table import rows


def own_name(key: str) -> str | None:
    """Return our key for the name ``key`` of another trainer, or None.

    A name with a section needs a key of that section, since `critic.epochs` is not ``trainer.epochs``; others have all
    their settings in a trainer's.
    """
    section, _, leaf = key.rpartition(".")
    own_key = next((row.key for row in rows("elsewhere") if leaf in row.to.split()), None)
    fits = not section or section == "trainer" or (own_key or "").split(".")[0] == section.split(".")[0]
    return own_key if fits else None


def names_elsewhere(key: str) -> list[str]:
    """Return the names that other trainers have for a key of ours."""
    return [name for row in rows("elsewhere") if row.key == key for name in row.to.split()]


def trainer_of(names: Collection[str]) -> tuple[str, str] | None:
    """Return the trainer whose files have these top-level names, and the page about its keys; None for verl's files,
    ours and unknown ones."""
    plain = {name.replace("-", "_") for name in names}
    for row in rows("trainer"):
        signs = row.note.split()
        if len(plain.intersection(signs)) >= min(2, len(signs)):
            return row.key, row.to
    return None
