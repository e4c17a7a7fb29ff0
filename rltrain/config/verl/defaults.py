"""Extraction of the user's settings from a configuration saved by a run of verl.

A saved tree has 300 to 900 keys, but the user wrote about thirty. All other keys would be reported as without effect
or would count as chosen. So values equal to verl's defaults count as not written. The tables hold the defaults of verl
0.5 to main that differ from rltrain's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from rltrain.config.schema.keys import all_keys, followed, is_known
from rltrain.config.verl.keys import leaves_of, rename
from rltrain.config.verl.table import rows

# A tree with this many keys that rltrain lacks was written by a program.
_WHOLE = 50
# Sections with a switch that is off by default: their other keys then have no meaning.
_INERT = [
    *("*profil*", "*nsight_options*", "*transfer_queue.*", "distillation.*", "skip.*", "*.mtp.*", "*.qat.*", "*.v1.*"),
    *("*reward_model.rollout.*", "*.disaggregation.*", "*.prometheus.*", "*.tiled_mlp.*", "*.model.lora.*"),
    *("*.layer_name_map.*", "*.muon_*", "*.trace.*", "*continuous_token*", "*.sandbox_fusion.*"),
]
_SWITCHES = ("enable", "enabled", "trainer_mode", "rank", "url")
# A single interpolation, whose default may contain another one.
_FOLLOWS = re.compile(r"\$\{(oc\.select:)?[\w.]+(,([^{}]|\$\{[^{}]*\})*)?\}")


def chosen_settings(tree: Mapping[str, Any], asked: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings by dotted key, without values that the user did not choose.

    These are class names, missing values, and in a tree written by a program also verl's defaults. asked: keys that are
    always returned.
    """
    tree = {key: value for key, value in tree.items() if key not in ("_wandb", "wandb_version")}
    if tree and all(isinstance(entry, Mapping) and "value" in entry for entry in tree.values()):
        tree = {key: entry["value"] for key, entry in tree.items()}  # the format of W&B
    leaves = {key: value for key, value in leaves_of(tree) if value not in ("???", {})}
    if sum(not is_known(rename(key)) for key in leaves) < _WHOLE:
        return leaves
    return {key: value for key, value in leaves.items() if key in asked or not _a_default(key, value, leaves)}


def _a_default(written: str, value: Any, leaves: Mapping[str, Any]) -> bool:
    key = rename(written)
    if value is None or (isinstance(value, str) and _FOLLOWS.fullmatch(value)):
        return True
    last = key.rpartition(".")[2]
    source = next((row.to for row in rows("follows") if row.key == last), written)
    follows = source != written and value == leaves.get(source)
    if not is_known(key):
        inert = last not in _SWITCHES and any(fnmatchcase(written, pattern) for pattern in _INERT)
        return inert or follows or value in (False, 0, "", "None", [], {}) or value in _values("saved", last)
    inert_values = _values("unchosen", key)
    if follows or ((followed_key := followed(key)) and value == leaves.get(followed_key)):
        return True
    if isinstance(value, dict):
        return not (without_nulls := _without_nulls(value)) or without_nulls in inert_values
    # For a key whose defaults differ, a value is a choice unless it is verl's default, even if it is rltrain's.
    return value in inert_values if inert_values else key in all_keys() and value == all_keys()[key].default


def _values(action: str, key: str) -> list[Any]:
    """Return verl's defaults for a key, in the first row of the action that matches it."""
    return next((json.loads(row.note) for row in rows(action) if fnmatchcase(key, row.key)), [])


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    pruned = {name: _without_nulls(item) if isinstance(item, dict) else item for name, item in value.items()}
    return {name: item for name, item in pruned.items() if item is not None and item != {}}
