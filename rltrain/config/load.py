"""Files and dotted overrides -> one typed `Config`. All mistakes are reported together.

Problem: commands come from verl and Hydra, with keys that have another name, no meaning or no counterpart here, and a
key that is silently dropped costs a run. Choice: every key that was written is taken over, renamed with a warning,
noted as without effect, or refused with what to type instead. OmegaConf gives types and ``${other.key}``. Left out:
Hydra, of which we would use its syntax alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError, safe_load

from rltrain.config.budgets import total_problem
from rltrain.config.keys import all_keys, free_form_parent, is_known, nearest, sections
from rltrain.config.renames import ignored_because, refused_because, rename, shown
from rltrain.config.schema import Config
from rltrain.env import devices_here
from rltrain.errors import ConfigError

OmegaConf.register_resolver("devices_here", devices_here, replace=True)
# Names of keys whose values nobody else should see. "token" counts only as the last word, because max_token_len and
# the like are lengths.
SECRET = re.compile(r"password|secret|api[-_]?key|access_key|(^|[-_])tokens?$|authorization|cookie", re.IGNORECASE)
# What stands before the host in an address: user:password@
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


@dataclass(frozen=True)
class LoadedConfig:
    """config: resolved. explicit: the keys the user set, in our spelling. warnings: renames, and keys without
    effect."""

    config: Config
    explicit: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()


@dataclass
class _Reader:
    tree: DictConfig = field(default_factory=lambda: OmegaConf.structured(Config))
    explicit: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    totals: dict[str, Any] = field(default_factory=dict)

    def set(self, written: str, value: Any) -> None:
        """Take over one key, in any spelling. A mapping is taken over key by key."""
        for each, leaf in _leaves({written: value}, ""):
            self._set_leaf(each, leaf)

    def _set_leaf(self, written: str, value: Any) -> None:
        key = rename(written)
        if key != written:
            self.warnings.append(f"{written} is called {key} here")
        if is_known(key):
            self._assign(key, value)
        elif is_known(f"{key}_per_gpu"):
            # Told later: what to type instead depends on the number of devices, which may come after this key.
            self.totals[key] = value
        elif advice := refused_because(key, value):
            self.problems.append(f"'{written}' is not a key of this trainer; {advice}.")
        elif (why := ignored_because(key, value)) is not None:
            # By key, so that a later setting takes the note on an earlier one back.
            self.ignored[key] = why and f"{written}: no effect: {why}"
        elif key in sections():
            self.problems.append(f"'{written}' is a section, not a value. Its keys: --help {key}.")
        else:
            meant = nearest(key)
            hint = f" Did you mean {', '.join(meant)}?" if meant else " See --help."
            self.problems.append(f"unknown key '{written}'.{hint}")

    def _assign(self, key: str, value: Any) -> None:
        known = all_keys().get(key)
        # A list of one is often typed without brackets.
        if known and known.type_name.startswith("list") and isinstance(value, str):
            value = [value]
        try:
            # A structured tree refuses keys that the schema lacks; only free-form dictionaries may get them.
            OmegaConf.update(self.tree, key, value, force_add=free_form_parent(key) is not None)
        except OmegaConfBaseException:
            expected = known.type_name.replace("None", "null") if known else "a plain value"
            found = "null" if value is None else type(value).__name__
            wrong = f"expected {expected}, got {found}."
            if known and known.choices:
                wrong = f"use one of {', '.join(map(shown, known.choices))}."
            self.problems.append(f"{key}={shown(value)}: {wrong}")
        self.explicit.add(key)


def load_config(overrides: Sequence[str], files: Sequence[str | Mapping[str, Any]] = ()) -> LoadedConfig:
    """Defaults < each file (or what one would hold) < each ``key=value``; later wins. Raises ConfigError with every
    problem found."""
    reader = _Reader()
    for file in files:
        for key, value in (_read_file(file) if isinstance(file, str) else file).items():
            reader.set(key, value)
    for override in overrides:
        key, equals, text = override.partition("=")
        # Hydra's mark of a new key. Here it is never needed and always allowed, so that verl's commands run.
        key = key.lstrip("+").strip()
        if not equals or not key:
            reader.problems.append(
                f"'{override}' is not of the form key=value. Quote values with spaces; flags are listed by --help."
            )
            continue
        try:
            reader.set(key, _parse_value(key, text))
        except (YAMLError, OmegaConfBaseException) as error:
            reader.problems.append(
                f"{key}={text}: the value is not valid YAML ({str(error).splitlines()[0]}). Quote it."
            )
    config: Any = None
    try:
        # Only now do defaults that follow other keys get their values, and a value of the wrong type may show only
        # here.
        config = OmegaConf.to_object(reader.tree)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        reader.problems.append(f"{where}{str(error).splitlines()[0]}")
    # As in a file of verl's, null means that the size is not given.
    totals = {key: total for key, total in reader.totals.items() if total is not None}
    if problems := [*reader.problems, *(total_problem(config, key, total) for key, total in totals.items())]:
        raise ConfigError("\n".join(problems))
    assert isinstance(config, Config)
    return LoadedConfig(
        config, frozenset(reader.explicit), (*reader.warnings, *(note for note in reader.ignored.values() if note))
    )


def changed(loaded: LoadedConfig, changes: Mapping[str, Any]) -> LoadedConfig:
    """The configuration with other values of some keys; ``loaded`` stays as it is."""
    tree = OmegaConf.structured(loaded.config)
    for key, value in changes.items():
        OmegaConf.update(tree, key, value)
    config: Any = OmegaConf.to_object(tree)
    return replace(loaded, config=config, explicit=loaded.explicit | changes.keys())


def to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration as plain values, secrets masked."""
    return _masked(OmegaConf.to_container(OmegaConf.structured(config)))


def to_yaml(config: Config) -> str:
    """The resolved configuration, secrets masked."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def _masked(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        # Any header may carry a token, whatever its name.
        return {key: _masked(item, "secret" if name == "url_headers" else str(key)) for key, item in value.items()}
    if isinstance(value, str):
        return "***" if value and SECRET.search(name) else _CREDENTIALS.sub("***@", value)
    return value


def masked_command(words: Sequence[str]) -> str:
    """A command line as it can be typed again, but for the secrets in it."""
    shown = []
    for word in words:
        key, _, text = word.partition("=")
        try:
            # A mapping in flow syntax may hold secrets beside plain values, and only its parsed form has names.
            value = safe_load(text)
        except YAMLError:
            value = text
        masked = _masked(value, "secret" if ".url_headers" in key else key.rpartition(".")[2])
        shown.append(word if masked == value else f"{key}={masked}")
    return shlex.join(shown)


def _parse_value(key: str, text: str) -> Any:
    """YAML flow syntax; ``${other.key}`` is kept for later. A text key takes the text: 007 is a name, not a number."""
    parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    value = parsed["value"]
    known = all_keys().get(rename(key))
    if known and known.type_name.startswith("str") and isinstance(value, bool | int | float):
        return text.strip()
    return value


def _read_file(file: str) -> dict[str, Any]:
    if not Path(file).is_file():
        raise ConfigError(f"--config {file}: there is no such file.")
    try:
        content = OmegaConf.to_container(OmegaConf.load(file))
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"--config {file} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file}: expected a mapping of keys to values.")
    content.pop("defaults", None)  # Hydra's list of files; the values it stands for are the defaults here
    return {str(key): value for key, value in content.items()}


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; a free-form dictionary is one value."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name == "_target_":  # Hydra's class names
            continue
        if isinstance(value, dict) and rename(key) not in all_keys():
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value
