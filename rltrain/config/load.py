"""Files and dotted overrides -> one typed `Config`. All mistakes are reported together.

Commands come from verl and Hydra, with keys that have a different name, no meaning or no counterpart here, and a
silently dropped key costs a run. So every key is used, renamed with a warning, reported as without effect, or refused
with the setting to use instead. OmegaConf provides types and ``${other.key}``. Hydra is not used, because only its
syntax would be needed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError, safe_load

from rltrain.common.env import devices_here, engine_here, nodes_here
from rltrain.common.errors import ConfigError
from rltrain.common.secrets import MASK, is_secret, masked, masked_text
from rltrain.config.loaded import LoadedConfig
from rltrain.config.reader import Reader
from rltrain.config.schema import Config
from rltrain.config.verl.defaults import chosen_settings
from rltrain.config.verl.hydra import compose, flow

OmegaConf.register_resolver("devices_here", devices_here, replace=True)
OmegaConf.register_resolver("nodes_here", nodes_here, replace=True)
OmegaConf.register_resolver("engine_here", engine_here, replace=True)


def load_config(
    overrides: Sequence[str], files: Sequence[str | Mapping[str, Any]] = (), problems: Sequence[str] = ()
) -> LoadedConfig:
    """Load defaults < each file (or its content) < each ``key=value``; later values win.

    Raises ConfigError with all problems found, after the given ``problems``.
    """
    reader, unread = Reader(problems=list(problems)), False
    for file in files:
        reader.direct.clear()
        try:
            settings = chosen_settings(compose(Path(file))) if isinstance(file, str) else file
            for key, value in settings.items():
                reader.set(key, value)
        except ConfigError as error:
            reader.problems.append(str(error))
            unread = True
    reader.direct.clear()
    for override in overrides:
        reader.override(override)
        reader.notes += _warn_of_secret(override)
    reader.translate()
    reader.pass_to_user_classes()
    config: Any = None
    try:
        # Defaults that follow other keys are resolved only now, so values of the wrong type may be found only here.
        config = OmegaConf.to_object(reader.tree)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        reader.problems.append(f"{where}{str(error).splitlines()[0]}")
    reader.report_foreign(config)
    notes = (*reader.renamed.values(), *reader.notes)
    loaded = LoadedConfig(config, frozenset(reader.explicit), notes, reader.written)
    if reader.problems:
        # Rules are not checked if a file was not read, because its settings may satisfy them.
        further = [] if unread else _further(loaded, reader.wrong)
        raise ConfigError("\n".join([*dict.fromkeys(reader.problems), *further]))
    return loaded


def _further(loaded: LoadedConfig, wrong: Set[str]) -> list[str]:
    """Return the broken rules, to report them together with other problems.

    wrong: keys with invalid values. They have their defaults, so rules about them are not reported.
    """
    from rltrain.config.check import broken_rules  # imported here, because check imports this module

    if loaded.config is None:
        return []
    return [line for line in broken_rules(loaded) if not any(key in line for key in wrong)]


def changed(loaded: LoadedConfig, changes: Mapping[str, Any]) -> LoadedConfig:
    """Return the configuration with other values of some keys. ``loaded`` is not changed."""
    tree = OmegaConf.structured(loaded.config)
    for key, value in changes.items():
        OmegaConf.update(tree, key, value)
    config: Any = OmegaConf.to_object(tree)
    return replace(loaded, config=config, explicit=loaded.explicit | changes.keys())


def default_values() -> dict[str, Any]:
    """Return the defaults of all keys as plain values."""
    return to_dict(Config())


def to_dict(config: Config) -> dict[str, Any]:
    """Return the resolved configuration as plain values, with masked secrets."""
    return masked(asdict(config))


def to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML, with masked secrets."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def masked_command(words: Sequence[str]) -> str:
    """Return a command line that can be typed again, with masked secrets."""
    masked_words, follows_secret = [], False
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            masked_words.append(MASK if follows_secret else masked_text(word))
            follows_secret = key.startswith("--") and is_secret(key)
            continue
        follows_secret = False
        try:
            # A YAML flow mapping ({a: b}) may mix secrets and plain values. It must be parsed to mask only the secrets.
            value = safe_load(flow(text))
        except (YAMLError, ValueError, RecursionError):  # the reader reports it
            value = text
        shown = masked(value, "secret" if ".url_headers" in key else key.lstrip("+"))
        masked_words.append(word if shown == value else f"{key}={shown}")
    return shlex.join(masked_words)


def _warn_of_secret(word: str) -> list[str]:
    """Return advice to use an environment variable for a secret given as ``key=value``."""
    if "${oc.env:" in word or masked_command([word]) == shlex.join([word]):
        return []
    key = word.partition("=")[0].lstrip("+")
    variable = re.sub(r"\W", "_", key.rpartition(".")[2]).upper()
    return [
        f"{key} is a secret, and every user of this machine can read command lines in the process list. Export it as a "
        f"variable before the command, export {variable}=…, and give {key}='${{oc.env:{variable}}}'."
    ]
