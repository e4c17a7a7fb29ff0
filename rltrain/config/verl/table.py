"""The rows of ``keys.tsv``: every key of verl's releases, and rltrain's answer to each.

``scripts/verl_keys.py`` writes the columns ``verl`` (the releases that have the key) and ``default`` and the action
``same``; the rest is written by hand. A row without an action is a key that a row with ``*`` answers, or one without an
answer, which the script lists.

action      meaning of the row
same        the schema has the key
renamed     the schema has it as ``to``; a ``*`` at the end stands for the rest of the name
value       ``to`` is the new name of the value ``when`` of a key of the schema
path, name  path and name of a class that ``to`` holds as PATH:NAME
translated  `old_keys.translate_old_keys` translates it, together with others, to keys of the schema
turns on    a switch for the keys ``to`` of the same section
refused     an error: the run would be another experiment
section     an error for every key of a section, or only for the key ``to`` that turns the section on
no effect   a note. A ``*`` at the start stands for the sections of @owners
other       an error for a key of a recipe or of another trainer, after all other rows
file        the configuration file of a recipe
elsewhere   ``to``: other trainers' names for a key of the schema
trainer     ``note``: top-level names of another trainer's files, of which two (or the only one) must occur; ``to``:
            the page about its keys
differs     a note on a key of the schema that means something else in some version of verl. ``to``: further conditions,
            joined by " and "; ``!key``: that key was not written
named       a recipe (``to``) whose launches have this word in the name of the run, and no special key
unchosen    a key of the schema whose default differs: with a value of the list ``note``, it counts as not written in a
            configuration that verl saved (`defaults`)
saved       the same for the last part of a key that the schema lacks
follows     the last part of a key that has in a saved configuration the value of the key ``to``
sft         a key of verl's SFT trainer, which the schema has as ``to``; without effect if that is empty (`sft`)
sft preset  a default of verl's SFT trainer, as JSON
sentence    a text that notes include as @name
list        @releases: the releases that were read; @owners: sections of verl

``when`` is a condition on the value, as in `config.schema.conditions`. ``note`` is the sentence for the user; it may
contain {to} and the places of `keys.places_of`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rltrain.config.schema.conditions import Condition, parse

FILE = Path(__file__).with_name("keys.tsv")


class Row(NamedTuple):
    """One line of the file."""

    key: str
    verl: str = ""
    default: str = ""
    action: str = ""
    when: str = ""
    to: str = ""
    note: str = ""

    @property
    def condition(self) -> Condition:
        """The condition on the value of the key."""
        return parse(self.key + self.when)


def read(lines: Iterable[str]) -> list[Row]:
    """Return the rows of the file's lines, without the header."""
    return [Row(*line.rstrip("\n").split("\t")) for line in lines][1:]


@cache
def table() -> tuple[Row, ...]:
    """Return all rows, with sentences inserted into their notes."""
    rows_read = read(FILE.read_text(encoding="utf-8").splitlines())
    sentences = {row.key: row.note for row in rows_read if row.action == "sentence"}

    def whole(note: str) -> str:
        return re.sub(r"@\w+", lambda name: sentences[name[0]], note)

    return tuple(row._replace(note=whole(row.note)) if "@" in row.note else row for row in rows_read)


@cache
def rows(*actions: str) -> tuple[Row, ...]:
    """Return the rows with one of the actions, in the order of the file."""
    return tuple(row for row in table() if row.action in actions)


def sentence(name: str) -> str:
    """Return the sentence or the list ``@name``."""
    return next(row.note for row in rows("sentence", "list") if row.key == f"@{name}")


@cache
def keys_of_verl() -> dict[str, Row]:
    """Return the rows of the keys that some release of verl has."""
    return {row.key: row for row in table() if row.verl}


def releases_with(*spellings: str) -> str:
    """Return the releases of verl that have a key by a spelling, or a free-form key around it; "" for none."""
    for key in spellings:
        if row := keys_of_verl().get(key):
            return row.verl
        while key := key.rpartition(".")[0]:
            if (row := keys_of_verl().get(key)) and "{}" in row.default:
                return row.verl
    return ""
