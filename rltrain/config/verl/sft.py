"""Keys and defaults of verl's SFT trainer, as arguments of ``rltrain train``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rltrain.common.errors import ConfigError
from rltrain.config.schema.keys import is_known
from rltrain.config.verl.hydra import compose
from rltrain.config.verl.keys import leaves_of, rename
from rltrain.config.verl.table import rows

_DICT_KEYS = {"data.prompt_dict_keys": "data.prompt_key", "data.response_dict_keys": "sft.response_key"}


def as_training(words: str | Path | Mapping[str, Any] | Sequence[str]) -> Iterator[str]:
    """Yield the arguments of ``rltrain train`` for arguments of this command, a file or a mapping of settings.

    Raises ConfigError for a bad file.
    """
    settings = {row.key: row.note for row in rows("sft preset")}
    if isinstance(words, Mapping):
        settings |= _as_text(words)
        words = []
    flags: list[str] = []
    rest = iter(["--config", str(words)] if isinstance(words, str | Path) else words)
    for word in rest:
        if word == "--config":
            settings |= _as_text(compose(Path(next(rest, ""))))
        elif word.startswith("-") or "=" not in word:
            flags.append(word)
        else:
            key, _, text = word.partition("=")
            settings[key.lstrip("+")] = text
    yield from (f"{key}={text}" for key, text in translated(settings).items())
    yield from flags


def _as_text(tree: Mapping[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value) for key, value in leaves_of(tree)}


def translated(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings with keys of ``rltrain train``. Later settings win.

    Raises ConfigError for a bad length and for a mistyped key of verl's SFT trainer.
    """
    found: dict[str, str] = {}
    # Keys that name a field of a column come after the key of the column.
    for key, text in sorted(settings.items(), key=lambda item: item[0] in _DICT_KEYS):
        row = next((row for row in rows("sft") if fnmatchcase(key, row.key)), None)
        if row and not row.to:
            continue
        if key == "data.max_length":
            if not text.isdecimal() or int(text) < 2:
                raise ConfigError(f"data.max_length={text}: give a number of tokens, at least 2.")
            # verl's key limits prompt and response together, and here the sum of these two keys does so.
            found |= {"data.max_prompt_length": "1", "data.max_response_length": str(int(text) - 1)}
            continue
        if key in _DICT_KEYS:
            column = _DICT_KEYS[key]
            inner = text.strip("[]\"' ").replace('"', "").replace("'", "")
            found[column] = f"{found.get(column, column.rpartition('.')[2].removesuffix('_key'))}.{inner}"
            continue
        name = row.to.replace("*", key.removeprefix(row.key.removesuffix("*"))) if row else key
        names = [] if is_known(rename(name)) else [*(row.key for row in rows("sft")), *_DICT_KEYS, "data.max_length"]
        if key not in names and (near := get_close_matches(key, names, n=1, cutoff=0.9)):
            raise ConfigError(f"unknown key '{key}'. Did you mean {near[0]}?")
        found.pop(name, None)
        found[name] = text
    return found
