"""The text of ``--help``: an index of sections, the keys of one section, or all keys.

It reads only the schema, so it is fast and needs no network.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from rltrain.common.errors import ConfigError
from rltrain.config.schema.conditions import as_text
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.keys import Key, all_keys, nearest, sections
from rltrain.config.verl.keys import rename, verdict
from rltrain.config.verl.other_trainers import names_elsewhere

_START = Path(__file__).with_name("help.txt")


def help_text(topic: str = "") -> str:
    """Return the output of ``--help topic``.

    topic: empty, "all", a section, a key, the end of the name of one, or words to search for. Raises ConfigError.
    """
    if not topic:
        return "\n".join([_START.read_text(encoding="utf-8").rstrip(), *map(_index_line, sections())]) + "\n"
    if topic == "all":
        return "\n".join(_section(name, _keys_of(name)) for name in sections())
    topic = rename("_".join(topic.split()))
    names = [*sections(), *all_keys()]
    matches = [topic] if topic in names else [name for name in names if name.endswith(f".{topic}")]
    # The common prefix of a model's keys is often omitted.
    for key in (topic, f"actor_rollout_ref.{topic}") if not matches else ():
        # Only the key matters, so the value is `...`, which a configuration cannot contain.
        if ruling := verdict(key, ...):
            return f"{key}: {'refused' if ruling.forbids else 'accepted, and has no effect'}: {ruling.why}\n"
    if not matches and (found := _search(topic)):
        lines = [_wrapped(f"  {key.name}: {' '.join(key.help.split()).partition('. ')[0]}", 6) for key in found]
        return "\n".join([f"Keys about {topic.replace('_', ' ')} (--help KEY explains one):", *lines]) + "\n"
    if not matches:
        near = ", ".join(f"--help {name}" for name in nearest(topic)) or "--help"
        raise ConfigError(f"--help {topic}: no such section or key. Try {near}.")
    if len(matches) == 1 and matches[0] in sections():
        return _layer(matches[0])
    lines = [_index_line(name, "") if name in sections() else _entry(all_keys()[name], name) for name in matches]
    return "\n".join(lines) + "\n"


def _search(topic: str) -> list[Key]:
    """Return the keys whose names and help texts contain all words of ``topic``, matching names first."""
    # Word endings are removed, so that "stopping" finds "stops".
    words = [
        re.sub(r"(?:(?<=([a-z]))\1)?(?:ing|ed|e|s)$", "", word) for word in re.split(r"[\W_]+", topic.lower()) if word
    ]

    def has_all(text: str) -> bool:
        return all(re.search(rf"(?<![a-z]){re.escape(word)}", text.lower()) for word in words)

    named = {key.name: " ".join([key.name, *names_elsewhere(key.name)]) for key in all_keys().values()}
    found = [key for key in all_keys().values() if words and has_all(f"{named[key.name]} {key.help}")]
    return sorted(found, key=lambda key: not has_all(named[key.name]))


def _layer(section: str) -> str:
    """Return the keys of one section, and an index of its subsections."""
    text = _section(section, _keys_of(section))
    if inner := [name for name in sections() if name.startswith(section + ".")]:
        text += "\nSections in it:\n" + "\n".join(_index_line(name, section + ".") for name in inner) + "\n"
    return text


def _section(name: str, keys: Sequence[Key]) -> str:
    return "\n".join([_wrapped(f"{name}: {sections()[name]}", 4), *map(_entry, keys)]) + "\n"


def _entry(key: Key, name: str = "") -> str:
    head = f"  {name or key.name.rpartition('.')[2]} ({key.type_name}) = {as_text(key.default)}"
    return _wrapped(head, 4) + "\n" + _wrapped(" " * 6 + " ".join([*key.help.split(), *_rules(key)]), 6)


def _rules(key: Key) -> Iterator[str]:
    """Yield sentences to append to a key's help text: its choices, its bounds, and the engines that ignore it."""
    # The choices are listed only if the help text does not name all of them.
    if any(as_text(choice) not in key.help for choice in key.choices):
        yield f"One of {', '.join(map(as_text, key.choices))}."
    if bounds := key.rules.bounds():
        yield f"{bounds[0].upper()}{bounds[1:]}."
    if unused := [name for name, engine in ENGINES.items() if key.name.rpartition(".")[2] in engine.unused_keys]:
        yield f"No effect with name={' and name='.join(unused)}."


def _index_line(section: str, inside: str | None = None) -> str:
    """Return name, number of keys, and description of a section.

    inside: prefix of the name to omit; then the line is not indented.
    """
    leaf = "  " * section.count(".") + section.rpartition(".")[2] if inside is None else section.removeprefix(inside)
    count = len(_keys_of(section))
    width = 22 if inside is None else 35
    return _wrapped(f"  {leaf:<{width}} {count or '':>2}  {sections()[section]}", width + 7)


def _keys_of(section: str) -> list[Key]:
    """Return the keys of a section, without the keys of its subsections."""
    return [key for key in all_keys().values() if key.name.rpartition(".")[0] == section]


def _wrapped(line: str, indent: int) -> str:
    # At least 40 columns are used, because on a narrower terminal a line would have only a word or two.
    width = max(shutil.get_terminal_size().columns, 40)
    if len(line) <= width:
        return line
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
