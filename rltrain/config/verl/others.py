"""Other trainers: their names for our keys, for the error of a mistyped key; and the trainer that a configuration is
for, so that one sentence says it instead of one for each key. The names are rows of `table`.

A name that means something else here, or that has no counterpart, has no row: a wrong hint is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rltrain.config.verl.table import rows

# Keys that name a run, or the place of its code, and the text in front of a recipe's name in them.
_NAMES = {
    "trainer.project_name": "(?<![a-z])", "trainer.experiment_name": "(?<![a-z])",
    "custom_reward_function.path": "recipe[./]", "data.custom_cls": "recipe[./]",
}  # fmt: skip


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


def refusal(trainer: str, page: str, written: str, names: Collection[str]) -> str:
    """Return the error for a configuration or a launch (``written``) of another trainer that has these keys."""
    found = {name: own_name(name.replace("-", "_")) for name in names}
    ours = "".join(f"\n  {name}: {key}" for name, key in found.items() if key)
    table = f" Their names here (units may differ: see {page}):{ours}" if ours else ""
    return (
        f"{written} of {trainer}, which rltrain does not read. Write its settings with the keys "
        f"of rltrain, which {page} and --help list.{table}"
    )


def recipes_named(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each name of a run, or path of its code, that names a recipe whose launches have no key of
    theirs: by the keys alone they would be plain PPO or GRPO."""
    for key, before in _NAMES.items():
        for row in rows("named"):
            if re.search(rf"(?i){before}{row.key}(?![a-z])", str(settings.get(key, ""))):
                yield (
                    f"{key}={settings[key]}: this names verl's recipe {row.to}, a trainer with another loss, which is "
                    f"not in this version. For plain PPO or GRPO give another name with {key}."
                )
                return
