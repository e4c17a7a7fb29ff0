"""Reader of settings in any known spelling, which collects notes and errors.

Known keys are stored in a typed tree at once. Other keys are handled at the end, when all values are known.
"""

from __future__ import annotations

import functools
import pickle
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rltrain.common.errors import ConfigError
from rltrain.common.logs import count
from rltrain.common.plugin import is_plugin
from rltrain.config.budgets import share_of_rank
from rltrain.config.schema import Config
from rltrain.config.schema.conditions import as_text, is_off
from rltrain.config.schema.keys import Key, all_keys, free_form_parent, is_known, sections, similar_keys
from rltrain.config.verl.hydra import OPENINGS, SWITCHES, parsed, unquoted
from rltrain.config.verl.keys import aliases, classes, leaves_of, refused_null, rename, verdict
from rltrain.config.verl.old_keys import OVERRIDES, is_old, read_by_version, sizes_not_written, translate_old_keys
from rltrain.config.verl.other_trainers import recipes_named, rltrain_name
from rltrain.config.verl.references import repoint, target
from rltrain.config.verl.table import releases_with, rows, sentence

_NULLS, _TEMPLATE = ("", "~", "null"), ("{%", "{{", "{#")
# Keys of type text whose values may look like numbers.
_NUMBERS_AS_TEXT = (".rollout_is_threshold", ".rollout_rs_threshold")


@functools.cache
def _defaults() -> bytes:
    """Return the tree of defaults as a pickle. Unpickling it is several times as fast as copying a tree with OmegaConf,
    and tens of times as fast as reading the dataclasses.
    """
    return pickle.dumps(OmegaConf.structured(Config))


@dataclass
class Reader:
    """Collector of settings, one key at a time."""

    tree: DictConfig = field(default_factory=lambda: pickle.loads(_defaults()))
    explicit: set[str] = field(default_factory=set)
    """Keys that were set, in rltrain's spelling."""
    wrong: set[str] = field(default_factory=set)
    """Keys with invalid values."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Notes on renamed keys."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    """The other spelling of keys that were set by another name."""
    # Keys that the schema lacks, in rltrain's spelling -> (as written, value). Handled when all values are known,
    # because a later setting may revoke an earlier one.
    foreign: dict[str, tuple[str, Any]] = field(default_factory=dict)
    # Keys that were written with Hydra's mark of a new key, "+".
    added: set[str] = field(default_factory=set)
    # Keys that have their default because null was written, in rltrain's spelling -> as written.
    nulls: dict[str, str] = field(default_factory=dict)
    # Keys that a source has set by rltrain's name, which other spellings in the same source do not override.
    direct: set[str] = field(default_factory=set)

    def set(self, written: str, value: Any) -> None:
        """Store one key, in any spelling. A mapping is stored key by key."""
        for key, leaf in leaves_of({written: value}):
            self._set_leaf(key, leaf)

    def _set_leaf(self, written: str, value: Any) -> None:
        key = rename(written)
        if not is_known(key):
            self.foreign[key] = (written, value)
        elif key == written:
            other_spelling = self.written.get(key, "")
            if OVERRIDES in other_spelling and other_spelling not in self.wrong:
                self.renamed[written] = f"{written}: no effect: {other_spelling} is set too"
                return
            self.direct.add(key)
            if self.written.pop(key, ""):
                self.renamed[other_spelling] = f"{other_spelling}: no effect: {key} is set too"
            self._assign(key, written, value)
        elif (value is None and self.written.get(key) != written) or target(value) == key:
            pass  # ignored: null, as in files for several versions, or an interpolation of our name
        elif key in self.direct and OVERRIDES not in written:
            self.renamed[written] = f"{written}: no effect: {key} is set too"
        else:
            self.set_as(key, written, value)

    def set_as(self, key: str, written: str, value: Any) -> None:
        """Store one key that was written by another name."""
        row = next((row for row in rows("renamed") if row.key == written and row.note), None)
        more = f"; {row.note}" if row and row.condition.holds(value) else ""
        self.renamed[written] = f"{written} is called {key} here{more}"
        self.written[key] = written
        self._assign(key, written, value)

    def _assign(self, key: str, written: str, value: Any) -> None:
        schema_key = all_keys().get(key)
        self.nulls.pop(key, None)
        if schema_key:
            value = _normalised(schema_key, value)
            old = f"={as_text(value).lower()}"
            if row := next((row for row in rows("value") if (row.key, row.when) == (key, old)), None):
                why = f": {row.note}" if row.note else ""
                self.renamed[written] = f"{written}={as_text(value)} is {key}={row.to} here{why}"
                value = row.to
            if value is None and not _null_is_a_value(schema_key):
                OmegaConf.update(self.tree, key, schema_key.default, merge=False)
                self.explicit.discard(key)
                self.nulls[key] = written
                return
            if expected := _other_type(schema_key, value):
                ruling = verdict(key, value)
                why = ruling.why if ruling and ruling.refused else expected
                self.problems.append(f"{written}={as_text(value)}: {why}.")
                self.wrong.add(written)
                return
        try:
            # A structured tree refuses keys that the schema lacks. Only free-form dictionaries accept them.
            OmegaConf.update(self.tree, key, value, force_add=free_form_parent(key) is not None)
        except OmegaConfBaseException:
            self.problems.append(f"{written}={as_text(value)}: {_expected(schema_key, key, value)}.")
            self.wrong.add(written)
        self.explicit.add(key)

    def translate(self) -> None:
        """Translate keys of earlier versions of verl, and switches that represent several keys."""
        self._repoint_interpolations()
        old = {key: value for key, (_, value) in self.foreign.items() if is_old(key, value)}
        for key in old:
            del self.foreign[key]
        try:
            for key, value, note in translate_old_keys(old, self._value):
                self._assign(key, key, value)
                self.notes += [note] if note else []
        except ConfigError as error:
            self.problems.append(str(error))
            # Rules of the current keys would only repeat the problem.
            self.wrong.add("algorithm.rollout_correction.rollout_")
        for key, (written, value) in list(self.foreign.items()):
            names = next((row.to.split() for row in rows("turns on") if fnmatchcase(key, row.key)), ())
            if not names or value != 1:  # True equals 1
                continue
            section = key.rpartition(".")[0]
            turned_on = [name for name in names if is_known(f"{section}.{name}")]
            for name in turned_on:
                self._assign(f"{section}.{name}", written, True)
            self.renamed[written] = f"{written} turns on {' and '.join(turned_on)} here"
            del self.foreign[key]
        for key in [key for key in self.foreign if is_known(f"{key}_per_gpu")]:
            self._divide_by_ranks(key, *self.foreign.pop(key))
        for key, written, value, note in read_by_version(self.explicit, self.foreign, self._value):
            self._assign(key, written, value)
            self.written |= {key: written} if written != key else {}
            self.notes.append(note)
        for key, size, note in sizes_not_written(self.explicit, self._value):
            self._assign(key, key, size)
            self.explicit.discard(key)
            self.notes.append(note)

    def _repoint_interpolations(self) -> None:
        """Make interpolations name keys of the schema, and resolve interpolations in keys that `translate` reads."""
        tree: Any = OmegaConf.to_container(self.tree, resolve=False)
        for key in self.explicit:
            value = functools.reduce(lambda part, name: dict(part or {}).get(name), key.split("."), tree)
            if (new := repoint(value, self.foreign)) != value:
                self._assign(key, self.written.get(key, key), new)
        for key, (written, value) in self.foreign.items():
            if (source := target(new := repoint(value, self.foreign))) and is_known(source):
                new = self._value(source)
            if new != value and (is_old(key, new) or is_known(f"{key}_per_gpu") or key.endswith(".offload_policy")):
                self.foreign[key] = (written, new)

    def _divide_by_ranks(self, key: str, written: str, total: Any) -> None:
        """Store a size that counts samples over all ranks."""
        own_key = f"{key}_per_gpu"
        if total is None:  # as in verl's files, where the size is not given
            return
        if isinstance(total, bool) or not isinstance(total, int) or total < 1:
            self.problems.append(f"{written}={as_text(total)}: give a number of samples, at least 1, or {own_key}.")
        elif own_key in self.explicit:
            self.renamed[written] = f"{written}: no effect: {own_key} is set too"
        else:
            try:
                size, ranks = share_of_rank(key, total, self._value)
            except TypeError:  # a number of devices is invalid, which is reported elsewhere
                return
            rounded = "" if size * ranks == total else " (rounded, as in verl)"
            self.renamed[written] = f"{written}={total} over {count(ranks, 'rank')} is {own_key}={size} here{rounded}"
            self._assign(own_key, own_key, size)

    def pass_to_user_classes(self) -> None:
        """Join path and name of the user's classes, and pass unknown keys of data to them."""
        for (path, name), key in classes().items():
            (written, place), (stated, value) = (self.foreign.pop(setting, (setting, None)) for setting in (path, name))
            if place and value:
                self.renamed[written] = f"{written} and {stated} are {key}={place}:{value} here"
                self.written[key] = written
                self._assign(key, written, f"{place}:{value}")
            elif place:
                self.problems.append(f"{written}={place}: name the class in it with {stated}.")
        if not (self._value("data.custom_cls") or is_plugin(str(self._value("data.sampler.name")))):
            return
        for key, (written, value) in list(self.foreign.items()):
            ruling = verdict(key, value)
            mistyped = written not in self.added and similar_keys(key)
            if key.startswith("data.") and not (ruling and ruling.refused) and not mistyped:
                del self.foreign[key]
                OmegaConf.update(self.tree, key.replace("data.", "data.own_keys.", 1), value, force_add=True)
                if not ruling and not is_off(value):
                    self.notes.append(f"{written}: passed to your own class only")

    def report_foreign(self, config: Config | None) -> None:
        """Add notes and problems on keys that the schema lacks."""
        keys_by_reason: dict[tuple[str, bool], list[str]] = {}
        self.problems += recipes_named({key: self._value(key) for key in self.explicit})
        self.problems += [
            f"{written}=null: {why}." for key, written in self.nulls.items() if (why := refused_null(key))
        ]
        for key, (written, value) in self.foreign.items():
            if ruling := verdict(key, value, self._value):
                why = _contradicted(ruling.why, config) if ruling.applies else ""
                if ruling.refused or why:
                    keys_by_reason.setdefault((why or ruling.why, True), []).append(f"{written}={as_text(value)}")
                elif ruling.applies:
                    keys_by_reason.setdefault((ruling.why, False), []).append(written)
            elif not (key in sections() and is_off(value)):
                # An unknown key that is turned off does no harm, unless it resembles a key of the schema and so is
                # mistyped.
                if is_off(value) and (releases_with(written, key) or not similar_keys(key)):
                    keys_by_reason.setdefault(("unknown, and turned off", False), []).append(written)
                else:
                    self.problems.append(_unknown(written, key))
        for (why, refused), keys in keys_by_reason.items():
            # Up to thirty keys of a verl section share one sentence, so only some of them are named.
            several = f" and {len(keys) - 3} more" if len(keys) > 4 else ""
            named = ", ".join(keys[:3] if several else keys) + several
            (self.problems if refused else self.notes).append(
                f"{named}: {f'{why}.' if refused else f'no effect: {why}'}"
            )

    def _value(self, key: str) -> Any:
        try:
            return OmegaConf.select(self.tree, key)
        except OmegaConfBaseException:  # follows a missing key, which is reported elsewhere
            return None

    def override(self, word: str) -> None:
        """Store one ``key=value``."""
        key, equals, text = word.partition("=")
        # Hydra's prefix of a new key, which is always allowed here, so that verl's commands run.
        added, key = key.startswith("+"), key.lstrip("+").strip()
        if key.startswith("~"):  # Hydra's prefix of a removed key
            self._remove(key[1:])
            return
        if not equals or not key:
            is_file = word.endswith((".yaml", ".yml", ".toml", ".json"))
            meant = f" Did you mean --config {word}? Configuration files are YAML." if is_file else ""
            self.problems.append(
                f"'{word}' is not of the form key=value.{meant} Quote values with spaces; flags are listed by --help."
            )
            return
        if added:
            self.added.add(key)
        schema_key = all_keys().get(rename(key))
        says_nothing = (
            schema_key
            and text.strip() in _NULLS
            and not refused_null(schema_key.name)
            and not _null_is_a_value(schema_key)
        )
        if schema_key and says_nothing and schema_key.default and not str(schema_key.default).startswith("${"):
            how = "is" if text.strip() else "is empty, so it is"
            self.notes.append(f"{word} {how} {as_text(schema_key.default)}, the default")
        try:
            self.set(key, _parse_value(key, text))
        except (YAMLError, OmegaConfBaseException) as error:
            self.problems.append(f"{key}={text}: the value is not valid YAML ({str(error).splitlines()[0]}). Quote it.")

    def _remove(self, written: str) -> None:
        """Reset a key, or all keys of a section, to the default."""
        key = rename(written) if is_known(rename(written)) else rename(f"{written}.")[:-1]

        def below(name: str) -> bool:
            return f"{name}.".startswith((f"{key}.", f"{written}."))

        schema_keys = [name for name in all_keys() if below(name) or below(self.written.get(name, ""))]
        foreign = [name for name in self.foreign if below(name)]
        if free_form_parent(key):
            inside, _, last = key.rpartition(".")
            if isinstance(around := self._value(inside), DictConfig):
                around.pop(last, None)
            self.explicit.discard(key)
        elif not (
            schema_keys or foreign or verdict(key, None) or verdict(f"{key}.x", None) or any(map(below, aliases()))
        ):
            self.problems.append(_unknown(f"~{written}", key))
        for name in schema_keys:
            OmegaConf.update(self.tree, name, all_keys()[name].default, merge=False)
            self.nulls.pop(name, None)
            self.written.pop(name, None)
        for name in foreign:
            del self.foreign[name]
        self.explicit = {name for name in self.explicit if (free_form_parent(name) or name) not in schema_keys}
        self.direct -= set(schema_keys)
        self.renamed = {
            name: note for name, note in self.renamed.items() if not (below(name) or rename(name) in schema_keys)
        }


def _parse_value(key: str, text: str) -> Any:
    """Return the value of a word; ``${other.key}`` is kept. A text key takes the whole text: 007 is a name, not a
    number, and " #1" is part of it."""
    word, schema_key = text.strip(), all_keys().get(rename(key))
    takes_text = schema_key and schema_key.type_name.startswith(("str", "Any")) and word.lower() not in _NULLS
    # A chat template starts with braces too.
    if not (schema_key and takes_text) or (word.startswith(OPENINGS) and not word.startswith(_TEMPLATE)):
        return parsed(word)
    return word if schema_key.choices else text


def _null_is_a_value(key: Key) -> bool:
    """Return whether null has a meaning given in the help text; for other keys it means the default."""
    follows = isinstance(key.default, str) and key.default.startswith("${")
    return key.type_name.endswith("None") and key.default is not None and not follows


def _normalised(key: Key, value: Any) -> Any:
    """Return a value in the form of the schema."""
    if value is False and key.name.endswith("_freq"):
        return -1  # never
    if key.type_name.endswith("int | str"):
        value = unquoted(value, switches=key.type_name.startswith("bool"))
    if isinstance(value, float) and str(value) in key.choices:
        return str(value)
    # A list of one is often typed without brackets.
    if key.type_name.startswith("list") and isinstance(value, str) and value and not target(value):
        return [value]
    return None if value == "" else value


def _other_type(key: Key, value: Any) -> str:
    """Return the expected type of a value that OmegaConf would silently convert; "" if it would not."""
    if key.type_name.removesuffix(" | None") == "bool" and value is not None and "${" not in str(value):
        return "" if as_text(value).lower() in SWITCHES else "expected true or false"
    if key.type_name.startswith("list") and isinstance(value, list) and any(isinstance(x, list | dict) for x in value):
        return f"expected {key.type_name.replace('None', 'null')}, without lists and mappings in it"
    is_text = key.type_name.startswith("str") and not key.choices and not key.name.endswith(_NUMBERS_AS_TEXT)
    # YAML reads 1.10 as the number 1.1, and no as False.
    return "expected a text: put it in quotes" if is_text and isinstance(value, bool | float) else ""


def _contradicted(why: str, config: Config | None) -> str:
    """Return why a key that usually has no effect conflicts with other settings, or ""."""
    if not (config and why == sentence("no_server") and config.custom_reward_function.path):
        return ""
    model = config.reward_model
    # With a rule_weight the two scores are added, so the user does not expect the model to be a server.
    return sentence("generative") if model.classifies and model.rule_weight is None else ""


def _expected(schema_key: Key | None, key: str, value: Any) -> str:
    """Describe the expected value, for a value of the wrong type or choice."""
    if (ruling := verdict(key, value)) and ruling.refused:
        return ruling.why
    if schema_key and schema_key.choices:
        return f"use one of {', '.join(map(as_text, schema_key.choices))}"
    if schema_key and schema_key.type_name.startswith("str") and isinstance(value, list | dict):
        return "expected a text; one that begins with a bracket needs quotes inside the shell's quotes"
    expected = schema_key.type_name.replace("None", "null") if schema_key else "a plain value"
    return f"expected {expected}, got {'null' if value is None else type(value).__name__}"


def _unknown(written: str, key: str) -> str:
    """Return the error for a key that is neither in the schema nor in the table."""
    if key in sections():
        return f"'{written}' is a section, not a value. Its keys: --help {key}."
    if releases := releases_with(written, key):
        return f"{written}: verl {releases.replace(' ', ' and ')} has this key, and rltrain does not. Leave it out."
    elsewhere = rltrain_name(key)
    near = [elsewhere] if elsewhere else similar_keys(key)
    around = next((key[:end] for end in _ends(key) if key[:end] in sections()), "")
    hint = f"Did you mean {', '.join(near)}?" if near else f"See --help {around}".rstrip() + "."
    # A user of a verl script needs to know whether a key is from verl or from a fork.
    read = (
        "" if elsewhere or "." not in key else f": none of verl {', '.join(sentence('releases').split())} has this key"
    )
    return f"unknown key '{written}'{read}. {hint}"


def _ends(key: str) -> list[int]:
    """Return the end positions of the sections around a key, innermost first."""
    return [dot.start() for dot in re.finditer(r"\.", key)][::-1]
