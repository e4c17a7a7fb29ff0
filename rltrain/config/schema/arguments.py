"""KEY=VALUE arguments of a command, read into a dataclass."""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar

from rltrain.common.errors import ConfigError, short
from rltrain.config.schema.fields import Rules

T = TypeVar("T")
_SWITCHES = {"true": True, "false": False, "1": True, "0": False}


def required(meaning: str, **rules: Any) -> Any:
    """Declare a field that must be given. meaning: for the message if it is not; rules: bounds, as of `key`."""
    return field(metadata={"rules": Rules(**rules), "meaning": meaning})


def read_arguments(
    kind: type[T],
    arguments: Sequence[str],
    *,
    where: str = "",
    hint: str = "",
    others: list[str] | None = None,
    elsewhere: Sequence[str] = (),
    problems: Sequence[str] = (),
) -> T:
    """Return a ``kind`` with the values of ``arguments``; a later argument wins. Raises ConfigError.

    kind: a dataclass with fields of type str, bool, int, float, lists of these, and None. Its bounds are declared with
    `key`; a field without a default (`required`) must be given. where: prefix of messages, such as "--assume". hint:
    last line of the error. others: receives the arguments whose key is not a field of ``kind``, instead of an error,
    unless they look like a misspelt field of it or of ``elsewhere``, the names that a later reader knows. problems:
    earlier problems, which are reported too.
    """
    known = {known_field.name: known_field for known_field in fields(kind)}  # type: ignore[arg-type]
    kinds = typing.get_type_hints(kind)
    wrong, values = list(problems), dict[str, Any]()
    for argument in arguments:
        name, equals, text = argument.partition("=")
        shown = f"{where} {short(argument)}".strip()
        if not equals or name not in known:
            may_be_near = equals and "." not in name and name not in elsewhere
            near = difflib.get_close_matches(name, [*known, *elsewhere], n=1) if may_be_near else []
            advice = f"Did you mean {near[0]}=?" if near else f"Known are {', '.join(known)}."
            reason = f"unknown key {short(name)}" if equals else "not of the form KEY=VALUE"
            if others is not None and not near:
                others.append(argument)
            else:
                wrong.append(f"{shown}: {reason}. {advice}")
            continue
        try:
            values[name] = value = _value(text, kinds[name])
        except ValueError as error:
            wrong.append(f"{shown}: {error}.")
            continue
        rules = known[name].metadata.get("rules")
        if rules and rules.among and value not in rules.among:
            wrong.append(f"{shown}: use one of {', '.join(rules.among)}.")
        numbers = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int | float)]
        if rules and not all(map(rules.within, numbers)):
            finite = all(map(math.isfinite, numbers))
            wrong.append(f"{shown}: it must be {rules.bounds() if finite else 'finite'}.")
    named = {argument.partition("=")[0] for argument in arguments}
    for name, known_field in known.items():
        is_missing = name not in named or values.get(name) in ("", [])
        if "meaning" in known_field.metadata and is_missing:
            wrong.append(f"{where} {name}= is not given: {known_field.metadata['meaning']}.".strip())
    if wrong:
        raise ConfigError("\n".join([*wrong, *filter(None, [hint])]))
    return kind(**values)


def _value(text: str, kind: Any) -> Any:
    """Return ``text`` as a value of ``kind``. Raises ValueError with the expected form."""
    if typing.get_origin(kind) is list:
        (inner,) = typing.get_args(kind)
        return [_value(part, inner) for part in listed(text)]
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if types.NoneType in kinds and text.lower() in ("null", "none"):
        return None
    if bool in kinds:
        if text.lower() not in _SWITCHES:
            raise ValueError("expected true or false")
        return _SWITCHES[text.lower()]
    for number, name in ((int, "a whole number"), (float, "a number")):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                more = " or null" if types.NoneType in kinds else ""
                raise ValueError(f"{short(text)!r} is not {name}{more}") from None
    return text


def listed(text: str) -> list[str]:
    """Split ``A,B`` and ``[A,B]``; an existing path may have commas."""
    if text and Path(text).expanduser().exists():
        return [text]
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [part.strip(" '\"") for part in inner.split(",") if part.strip(" '\"")]
