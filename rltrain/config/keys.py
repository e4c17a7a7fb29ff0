"""The keys of the schema, with type, default and help text. Needs nothing but the schema's source."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rltrain.config.schema import Config


@dataclass(frozen=True)
class Key:
    """One leaf: a value, or (``free_form``) a dictionary with keys of the user's own."""

    name: str
    type_name: str
    default: Any
    help: str
    free_form: bool


def get(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


@functools.cache
def all_keys() -> dict[str, Key]:
    """Every leaf key by its dotted name, in schema order."""
    return {key.name: key for key in _walk(Config, "")}


@functools.cache
def sections() -> dict[str, str]:
    """Every inner key ("actor_rollout_ref.actor") and what it is about."""
    return dict(_sections(Config, ""))


def is_known(name: str) -> bool:
    """Whether ``name`` is a leaf, or lies inside a free-form dictionary."""
    keys = all_keys()
    return name in keys or free_form_parent(name) is not None


def free_form_parent(name: str) -> str | None:
    """The free-form key that ``name`` lies in, or None."""
    parts = name.split(".")
    parents = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    keys = all_keys()
    return next((parent for parent in parents if parent in keys and keys[parent].free_form), None)


def nearest(name: str) -> list[str]:
    """Up to three known keys that ``name`` may have meant: alike as a whole, or with the same last part."""
    names = list(all_keys())
    leaf = name.rpartition(".")[2]
    alike = difflib.get_close_matches(name, names, n=2, cutoff=0.8)
    by_leaf = {known.rpartition(".")[2]: known for known in reversed(names)}
    same = [known for known in names if known.rpartition(".")[2] == leaf]
    leaves = [by_leaf[match] for match in difflib.get_close_matches(leaf, by_leaf, n=2, cutoff=0.8)]
    return list(dict.fromkeys([*alike, *same, *leaves]))[:3]


def _walk(owner: type, prefix: str) -> Iterator[Key]:
    hints, texts = _hints(owner), _texts(owner)
    for field in dataclasses.fields(owner):
        name = prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _walk(hints[field.name], name + ".")
        else:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            type_name = str(field.type).replace("typing.", "")
            yield Key(name, type_name, default, texts[field.name], type_name.startswith("dict"))


def _sections(owner: type, prefix: str) -> Iterator[tuple[str, str]]:
    hints = _hints(owner)
    for field in dataclasses.fields(owner):
        kind: type = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield prefix + field.name, (inspect.getdoc(kind) or "").splitlines()[0]
            yield from _sections(kind, f"{prefix}{field.name}.")


def _hints(owner: type) -> dict[str, Any]:
    return typing.get_type_hints(owner)


def _texts(owner: type) -> dict[str, str]:
    return _module_texts(owner.__module__)[owner.__name__]


@functools.cache
def _module_texts(module: str) -> dict[str, dict[str, str]]:
    """The string that follows each field, by class and field."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    texts: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            pairs = zip(node.body, node.body[1:], strict=False)
            texts[node.name] = {
                one.target.id: after.value.value.strip()
                for one, after in pairs
                if isinstance(one, ast.AnnAssign)
                and isinstance(one.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            }
    return texts
