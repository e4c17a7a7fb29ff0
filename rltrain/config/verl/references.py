"""Translation of interpolations of verl's keys to keys of the schema, so that they resolve as in Hydra.

The tree of settings has only the schema's keys. So ``${critic.grad_clip}`` must name rltrain's key, and a key that the
schema lacks is replaced by its value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rltrain.config.schema.conditions import as_text
from rltrain.config.schema.keys import is_known
from rltrain.config.verl.keys import rename
from rltrain.config.verl.table import keys_of_verl

_REFERENCE = re.compile(r"\$\{(?P<select>oc\.select:)?(?P<key>[A-Za-z_]\w*(?:\.[\w-]+)+)(?P<rest>,[^{}]*)?\}")


def target(value: Any) -> str:
    """Return the key of the schema that the interpolation ``value`` refers to; "" if it is not a single
    interpolation."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return rename(match["key"]) if match else ""


def repoint(value: Any, foreign: Mapping[str, tuple[str, Any]], depth: int = 9) -> Any:
    """Return ``value`` with interpolations of keys of the schema.

    foreign: key -> (as written, value) of keys that the schema lacks. depth: maximum number of chained interpolations.
    """
    if isinstance(value, list):
        return [repoint(item, foreign, depth) for item in value]
    if isinstance(value, Mapping):
        return {name: repoint(item, foreign, depth) for name, item in value.items()}
    for match in _REFERENCE.finditer(value) if isinstance(value, str) and depth else ():
        key = rename(match["key"])
        if is_known(key):
            new: Any = f"${{{match['select'] or ''}{key}{match['rest'] or ''}}}"
        elif key in foreign:
            new = repoint(foreign[key][1], foreign, depth - 1)
        elif key in keys_of_verl() and not match["select"]:
            default = keys_of_verl()[key].default.partition(" | ")[0]
            new = repoint(json.loads(default), foreign, depth - 1)
        else:
            continue
        if match[0] == value:
            return new
        value = value.replace(match[0], as_text(new))
    return value
