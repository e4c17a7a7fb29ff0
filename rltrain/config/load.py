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
from rltrain.config.hydra import compose
from rltrain.config.keys import Key, all_keys, followed, free_form_parent, is_known, meant, sections
from rltrain.config.renames import answer, rename, shown, turned_off
from rltrain.config.schema import Config
from rltrain.config.verl_defaults import as_written
from rltrain.env import devices_here, engine_here
from rltrain.errors import ConfigError

OmegaConf.register_resolver("devices_here", devices_here, replace=True)
OmegaConf.register_resolver("engine_here", engine_here, replace=True)
# Names of keys whose values nobody else should see. "token" counts only as the last word, because max_token_len and
# the like are lengths.
SECRET = re.compile(r"password|secret|api[-_]?key|access_key|(^|[-_])tokens?$|authorization|cookie", re.IGNORECASE)
# What stands before the host in an address: user:password@
_KEYS = re.compile(r"\b[a-z]\w*(?:\.\w+)+")
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


@dataclass(frozen=True)
class LoadedConfig:
    """config: resolved. explicit: the keys the user set, in our spelling. warnings: renames, and keys without effect.
    written: the user's spelling of each key that was set by another name."""

    config: Config
    explicit: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()
    written: Mapping[str, str] = field(default_factory=dict)

    def as_written(self, text: str) -> str:
        """A message with the keys as the user wrote them: by the user's name, and in place of a key that follows
        another one, that one."""
        return _KEYS.sub(lambda found: self._origin(found[0]), text)

    def _origin(self, key: str) -> str:
        while key not in self.explicit and (source := followed(key)):
            key = source
        return self.written.get(key, key)


@dataclass
class _Reader:
    tree: DictConfig = field(default_factory=lambda: OmegaConf.structured(Config))
    explicit: set[str] = field(default_factory=set)
    renamed: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    # Keys that the schema lacks, in our spelling -> (as written, value). Judged when all values are known, so that a
    # later setting takes an earlier one back.
    foreign: dict[str, tuple[str, Any]] = field(default_factory=dict)
    # Keys that one source has set by our name, which the same source's other spellings do not overrule.
    direct: set[str] = field(default_factory=set)

    def set(self, written: str, value: Any) -> None:
        """Take over one key, in any spelling. A mapping is taken over key by key."""
        for each, leaf in _leaves({written: value}, ""):
            self._set_leaf(each, leaf)

    def _set_leaf(self, written: str, value: Any) -> None:
        key = rename(written)
        if not is_known(key):
            self.foreign[key] = (written, value)
        elif key == written:
            self.direct.add(key)
            self.written.pop(key, None)
            self._assign(key, written, value)
        elif value is None and self.written.get(key) != written:
            pass  # a name that is not used, as in the files of versions that know both
        elif key in self.direct:
            self.renamed[written] = f"{written}: no effect: {key} is set too"
        else:
            self.renamed[written] = f"{written} is called {key} here"
            self.written[key] = written
            self._assign(key, written, value)

    def _assign(self, key: str, written: str, value: Any) -> None:
        known = all_keys().get(key)
        if known:
            value = _plain(known, value)
            if value is None and not _null_is_a_value(known):
                OmegaConf.update(self.tree, key, known.default, merge=False)
                self.explicit.discard(key)
                return
        try:
            # A structured tree refuses keys that the schema lacks; only free-form dictionaries may get them.
            OmegaConf.update(self.tree, key, value, force_add=free_form_parent(key) is not None)
        except OmegaConfBaseException:
            self.problems.append(f"{written}={shown(value)}: {_expected(known, key, value)}.")
        self.explicit.add(key)

    def judge(self, config: Config | None) -> None:
        """Adds what is to be said of foreign keys to the notes and to the problems."""
        told: dict[tuple[str, bool], list[str]] = {}
        for key, (written, value) in self.foreign.items():
            if is_known(f"{key}_per_gpu"):
                # As in a file of verl's, null means that the size is not given.
                if value is not None:
                    self.problems.append(total_problem(config, key, value))
            elif found := answer(key, value, self._value):
                if found.why:
                    text = f"{written}={shown(value)}" if found.refused else written
                    told.setdefault((found.why, found.refused), []).append(text)
            elif not (key in sections() and turned_off(value)):
                told_of = self.notes if turned_off(value) and not meant(key) else self.problems
                told_of.append(_unknown(written, key))
        for (why, refused), keys in told.items():
            # A section of verl's has up to thirty keys, and one sentence says it of all.
            several = f"{', '.join(keys[:2])} and {len(keys) - 2} more" if len(keys) > 3 else ""
            lines = [f"{each}: {why if refused else f'no effect: {why}'}" for each in ([several] if several else keys)]
            (self.problems if refused else self.notes).extend(f"{line}." if refused else line for line in lines)

    def _value(self, key: str) -> Any:
        try:
            return OmegaConf.select(self.tree, key)
        except OmegaConfBaseException:  # it follows a key that is not there, which is told elsewhere
            return None


def load_config(
    overrides: Sequence[str], files: Sequence[str | Mapping[str, Any]] = (), problems: Sequence[str] = ()
) -> LoadedConfig:
    """Defaults < each file (or what one would hold) < each ``key=value``; later wins. Raises ConfigError with every
    problem found, after those that were found before (``problems``)."""
    reader = _Reader(problems=list(problems))
    for file in files:
        reader.direct.clear()
        try:
            for key, value in (as_written(compose(Path(file))) if isinstance(file, str) else file).items():
                reader.set(key, value)
        except ConfigError as error:
            reader.problems.append(str(error))
    reader.direct.clear()
    for override in overrides:
        _read_override(reader, override)
    config: Any = None
    try:
        # Only now do defaults that follow other keys get their values, and a value of the wrong type may show only
        # here.
        config = OmegaConf.to_object(reader.tree)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        reader.problems.append(f"{where}{str(error).splitlines()[0]}")
    reader.judge(config)
    if reader.problems:
        raise ConfigError("\n".join(dict.fromkeys(reader.problems)))
    assert isinstance(config, Config)
    return LoadedConfig(config, frozenset(reader.explicit), (*reader.renamed.values(), *reader.notes), reader.written)


def _read_override(reader: _Reader, override: str) -> None:
    key, equals, text = override.partition("=")
    # Hydra's mark of a new key. Here it is never needed and always allowed, so that verl's commands run.
    key = key.lstrip("+").strip()
    if key.startswith("~"):  # Hydra's mark of a key that is left out
        key, equals, text = key[1:], "=", "null"
    if not equals or not key:
        reader.problems.append(
            f"'{override}' is not of the form key=value. Quote values with spaces; flags are listed by --help."
        )
        return
    try:
        reader.set(key, _parse_value(key, text))
    except (YAMLError, OmegaConfBaseException) as error:
        reader.problems.append(f"{key}={text}: the value is not valid YAML ({str(error).splitlines()[0]}). Quote it.")


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


def _null_is_a_value(key: Key) -> bool:
    """Whether null means something of its own, which the help text tells. Elsewhere it means the default."""
    follows = isinstance(key.default, str) and key.default.startswith("${")
    return key.type_name.endswith("None") and key.default is not None and not follows


def _plain(key: Key, value: Any) -> Any:
    """A value in the form that the schema has."""
    if value is False and key.name.endswith("_freq"):
        return -1  # never
    # A list of one is often typed without brackets.
    if key.type_name.startswith("list") and isinstance(value, str) and value:
        return [value]
    return None if value == "" else value


def _expected(known: Key | None, key: str, value: Any) -> str:
    """What a value of the wrong type or choice should have been."""
    if (found := answer(key, value)) and found.refused:
        return found.why
    if known and known.choices:
        return f"use one of {', '.join(map(shown, known.choices))}"
    expected = known.type_name.replace("None", "null") if known else "a plain value"
    return f"expected {expected}, got {'null' if value is None else type(value).__name__}"


def _unknown(written: str, key: str) -> str:
    """What is said of a key that no table knows."""
    if key in sections():
        return f"'{written}' is a section, not a value. Its keys: --help {key}."
    near = meant(key)
    around = next((key[:end] for end in _ends(key) if key[:end] in sections()), "")
    hint = f"Did you mean {', '.join(near)}?" if near else f"See --help {around}".rstrip() + "."
    return f"unknown key '{written}'. {hint}"


def _ends(key: str) -> list[int]:
    """The ends of the sections around a key, innermost first."""
    return [found.start() for found in re.finditer(r"\.", key)][::-1]


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
