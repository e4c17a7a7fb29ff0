"""Other trainers: their names for rltrain's keys, and detection of their configurations.

The names appear in the error of a mistyped key. A configuration of another trainer gets one error instead of one per
key. The names are rows of `table`. Names with a different meaning or no counterpart here have no row, because a wrong
hint is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rltrain.config.verl.table import rows

# Keys with a run's name or code path, and the text before a recipe's name in their values.
_NAMES = {
    "trainer.project_name": "(?<![a-z])", "trainer.experiment_name": "(?<![a-z])",
    "custom_reward_function.path": "recipe[./]", "data.custom_cls": "recipe[./]",
}  # fmt: skip


def rltrain_name(key: str) -> str | None:
    """Return rltrain's key for the name ``key`` of another trainer, or None.

    A name with a section needs a key of that section, because `critic.epochs` is not ``trainer.epochs``. Names without
    a section or in the section ``trainer`` match any key.
    """
    section, _, leaf = key.rpartition(".")
    own_key = next((row.key for row in rows("elsewhere") if leaf in row.to.split()), None)
    fits = not section or section == "trainer" or (own_key or "").split(".")[0] == section.split(".")[0]
    return own_key if fits else None


def names_elsewhere(key: str) -> list[str]:
    """Return other trainers' names for a key of the schema."""
    return [name for row in rows("elsewhere") if row.key == key for name in row.to.split()]


def trainer_of(names: Collection[str]) -> tuple[str, str] | None:
    """Return the trainer whose files have these top-level names, and the page about its keys.

    None for files of verl, rltrain and unknown trainers.
    """
    plain = {name.replace("-", "_") for name in names}
    for row in rows("trainer"):
        signs = row.note.split()
        if len(plain.intersection(signs)) >= min(2, len(signs)):
            return row.key, row.to
    return None


def refusal(trainer: str, page: str, written: str, names: Collection[str]) -> str:
    """Return the error for a configuration or a launch (``written``) of another trainer with the keys ``names``."""
    key_of = {name: rltrain_name(name.replace("-", "_")) for name in names}
    counterparts = "".join(f"\n  {name}: {key}" for name, key in key_of.items() if key)
    table = f" Their names here (units may differ: see {page}):{counterparts}" if counterparts else ""
    return (
        f"{written} of {trainer}, which rltrain does not support. Write its settings with rltrain's keys (see {page} "
        f"and --help).{table}"
    )


def recipes_named(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each run name or code path that names a recipe of verl.

    Launches of these recipes have no special key, so by their keys they would be plain PPO or GRPO.
    """
    for key, before in _NAMES.items():
        for row in rows("named"):
            if re.search(rf"(?i){before}{row.key}(?![a-z])", str(settings.get(key, ""))):
                yield (
                    f"{key}={settings[key]}: verl's recipe {row.to} has another loss and is not in this version. For "
                    f"plain PPO or GRPO, set {key} to another name."
                )
                return
