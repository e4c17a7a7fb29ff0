"""The keys of the schema, with type, default, rules and help text. Needs only the schema's source.

Help, checks, notes and the reader of overrides use this list. The help texts are read from the source, so that they are
next to their fields.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rltrain.config.schema import Config
from rltrain.config.schema.fields import Rules


@dataclass(frozen=True)
class Key:
    """One leaf of the configuration."""

    name: str
    type_name: str
    default: Any
    help: str
    free_form: bool
    """True for a dictionary with arbitrary keys."""
    choices: tuple[Any, ...]
    """The allowed values; empty if any value is allowed."""
    rules: Rules
    only_with: tuple[tuple[str, str, str], ...]
    """(section in which the condition is written, condition, reason) of the key and of the enclosing sections,
    outermost first."""


def get(config: Config, key: str) -> Any:
    """Return the value of a dotted key or property."""
    return functools.reduce(getattr, key.split(".") if key else (), config)


@functools.cache
def all_keys() -> dict[str, Key]:
    """Return every leaf key by its dotted name, in schema order."""
    return {key.name: key for key in _walk(Config, "", ())}


@functools.cache
def sections() -> dict[str, str]:
    """Return every inner key ("actor_rollout_ref.actor") with its description."""
    return dict(_sections(Config, ""))


def plugin_keys() -> list[str]:
    """Return the keys that may name a user's function: FILE.py:NAME."""
    return [key.name for key in all_keys().values() if key.rules.plugin]


def is_known(name: str) -> bool:
    """Return whether ``name`` is a leaf, or in a free-form dictionary."""
    keys = all_keys()
    return name in keys or free_form_parent(name) is not None


def free_form_parent(name: str) -> str | None:
    """Return the free-form key that contains ``name``, or None."""
    parts = name.split(".")
    parents = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    keys = all_keys()
    return next((parent for parent in parents if parent in keys and keys[parent].free_form), None)


def followed(name: str) -> str | None:
    """Return the key that ``name`` follows unless it is set, or None."""
    key = all_keys().get(name)
    match = re.fullmatch(r"\$\{([\w.]+)\}", str(key.default)) if key else None
    return match[1] if match else None


def similar_keys(name: str) -> list[str]:
    """Return up to three keys that a mistyped ``name`` may mean.

    They are from its section, because keys of other sections have different meanings.
    """
    section, _, leaf = name.rpartition(".")
    inside = [candidate for candidate in all_keys() if candidate.startswith(f"{section}." if section else "")]
    keys = {candidate.rpartition(".")[2]: candidate for candidate in inside if candidate.rpartition(".")[0] == section}
    near = [keys[match] for match in difflib.get_close_matches(leaf, keys, n=2, cutoff=0.8)]
    below = [candidate for candidate in inside if candidate.endswith(f".{leaf}")]
    # The start of the name was omitted or mistyped, but the rest exists.
    whole = [candidate for candidate in all_keys() if section and candidate.endswith(f".{name}")]
    sections_like = difflib.get_close_matches(section, sections(), n=2, cutoff=0.85)
    whole += [candidate for like in sections_like if (candidate := f"{like}.{leaf}") in all_keys()]
    return list(dict.fromkeys([*near, *below, *whole]))[:3]


def nearest(name: str) -> list[str]:
    """Return up to three known keys that ``name`` may mean: similar as a whole, or with the same last part."""
    names = list(all_keys())
    leaf = name.rpartition(".")[2]
    alike = difflib.get_close_matches(name, names, n=2, cutoff=0.8)
    # Reversed, so that among several keys with the same last part the first in the schema is suggested.
    by_leaf = {candidate.rpartition(".")[2]: candidate for candidate in reversed(names)}
    same = [candidate for candidate in names if candidate.rpartition(".")[2] == leaf]
    leaves = [by_leaf[match] for match in difflib.get_close_matches(leaf, by_leaf, n=2, cutoff=0.8)]
    return list(dict.fromkeys([*alike, *same, *leaves]))[:3]


def _walk(owner: type, prefix: str, around: tuple[tuple[str, str, str], ...]) -> Iterator[Key]:
    # Annotations are strings under `from __future__ import annotations`; only resolved ones can be distinguished.
    hints, texts = typing.get_type_hints(owner), texts_of(owner)
    for field in dataclasses.fields(owner):
        name, kind = prefix + field.name, hints[field.name]
        rules = field.metadata.get("rules", Rules())
        only_with = (*around, *((prefix.rstrip("."), *condition) for condition in rules.only_with.items()))
        if dataclasses.is_dataclass(kind):
            yield from _walk(typing.cast(type, kind), name + ".", only_with)
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        choices = rules.among or _literals(kind)
        # The text of a `Literal` would repeat its values, which are in `choices`.
        type_name = "str" if choices and not str(field.type).startswith("list") else str(field.type)
        yield Key(name, type_name, default, texts[field.name], type_name.startswith("dict"), choices, rules, only_with)


def _literals(kind: Any) -> tuple[Any, ...]:
    """Return the values of a `Literal`, with None if it is optional."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        values = [value for part in typing.get_args(kind) for value in _literals(part)]
        return (None, *values) if values else ()
    return ()


def _sections(owner: type, prefix: str) -> Iterator[tuple[str, str]]:
    hints = typing.get_type_hints(owner)
    for field in dataclasses.fields(owner):
        kind: type = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield prefix + field.name, (inspect.getdoc(kind) or "").splitlines()[0]
            yield from _sections(kind, f"{prefix}{field.name}.")


def texts_of(owner: type) -> dict[str, str]:
    """Return the help texts of a section's fields, including inherited ones."""
    every = (_module_texts(base.__module__).get(base.__name__, {}) for base in reversed(owner.__mro__[:-1]))
    return {name: text for texts in every for name, text in texts.items()}


@functools.cache
def _module_texts(module: str) -> dict[str, dict[str, str]]:
    """Return the string after each field, by class and field. Python does not keep it."""
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            texts[node.name] = {
                statement.target.id: inspect.cleandoc(after.value.value)
                for statement, after in zip(node.body, node.body[1:], strict=False)
                if isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            }
    return texts
