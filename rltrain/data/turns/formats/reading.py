"""Records of a parsed turn, and readers for values that the policy wrote: JSON or untyped text. A policy in training
can write anything, so only `Unreadable` is raised, which becomes an error message for the policy. Readers never go back
in the text, so their time is linear in its length.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

MOST_CALLS = 64
"""Limit per turn."""

Schemas = Sequence[dict[str, Any]]
Tools = Mapping[str, dict[str, Any]]
"""JSON schemas of the parameters, by tool and name."""


@dataclass(frozen=True)
class Call:
    """Tool call in a turn."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default="", compare=False)
    """Id that the model wrote, in formats with ids."""


@dataclass(frozen=True)
class Parsed:
    """Content of a turn of the policy, parsed from its text with special tokens."""

    calls: list[Call]
    problems: list[str]
    """One error message per unreadable call, addressed to the model."""
    text: str
    """Text without calls, reasoning and the token that ends the turn."""
    reasoning: str


@dataclass(frozen=True)
class CallFormat:
    """Format of a model family's calls."""

    name: str
    parse: Callable[[str, Schemas], Parsed]
    """Function of a turn's text with special tokens and the JSON schemas of the tools. Never raises."""
    write: Callable[[str, dict[str, Any]], str] | None
    """Function that formats a call, or None if the notation is unknown."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens that end a turn, in addition to the model's eos."""


class Unreadable(ValueError):
    """Error for an unreadable call. The message explains it to the model."""

    def __init__(self, why: str, place: int = 0) -> None:
        super().__init__(why)
        self.place = place
        """End index of the text that belongs to the call."""


# <|im_end|>, <｜end▁of▁sentence｜>, <turn|>, </s>, <seed:eos>, [e~[ and similar.
_END = re.compile(r"\s*(?:<[|｜][^<>\s]{1,60}[|｜]>|<\w{1,30}\|>|</s>|<(?:\w{1,30}:)?eos>|<end_of_turn>|\[e~\[)\s*\Z")


def without_end(text: str, closings: Sequence[str] = ()) -> str:
    """Remove the tokens that end a turn, except ``closings``, the marks that end a call."""
    for _ in range(8):
        match = _END.search(text, max(0, len(text) - 80))
        text = text[: match.start()] if match and match.group().strip() not in closings else text
    return text


def _finite(number: str) -> float:
    if not math.isfinite(float(number)):
        raise ValueError(f"{number} is not a JSON number")
    return float(number)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object has the same key twice")
    return values


_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite, object_pairs_hook=_unique)
_SPACE = re.compile(r"\s*")


def skip_space(text: str, place: int) -> int:
    """Return the index of the next character that is not white space."""
    match = _SPACE.match(text, place)
    return match.end() if match else place


def read_json(text: str, place: int) -> tuple[Any, int]:
    """Return the JSON value at an index, and the index after it. Raises Unreadable."""
    place = stop = skip_space(text, place)
    try:
        value, end = _DECODER.raw_decode(text, place)
        if "\\u" in text[place:end]:  # half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
        return value, end
    except json.JSONDecodeError as error:
        stop = len(text) if error.msg.startswith("Unterminated") else error.pos
        reason = f"{error.msg} at character {error.pos - place}"
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    raise Unreadable(f"the call is not valid JSON: {reason}.", stop)


def call_of(value: Any, tools: Tools | None = None) -> Call:
    """Return the call that a JSON object describes. Raises Unreadable.

    The arguments are under ``arguments`` or ``parameters``, or next to the name.
    """
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        raise Unreadable("a call must be a JSON object with the keys name and arguments.")
    keys = [key for key in ("arguments", "parameters") if key in value]
    known, identity = (tools or {}).get(name, {}), value.get("id")
    named = ("name", *(key for key in ("id", "type") if key not in known or keys), *keys)
    beside = {key: value[key] for key in value if key not in named}
    if len(keys) > 1 or (keys and beside) or (known and beside.keys() - known.keys()):
        raise Unreadable(f"all arguments of {name} belong in one object: not in {', '.join([*keys, *beside])}.")
    arguments = arguments_of(value[keys[0]]) if keys else beside
    return Call(name, arguments, identity if isinstance(identity, str) else "")


def arguments_of(value: Any) -> dict[str, Any]:
    """Return the arguments of a call: an object, the JSON text of one, or nothing. Raises Unreadable."""
    if isinstance(value, str) and value.strip():
        value, end = read_json(text := value.strip(), 0)
        value = value if end == len(text) else text
    if value in (None, ""):
        return {}
    if not isinstance(value, dict):
        raise Unreadable("the arguments of a call must be a JSON object.")
    return value


def dumped(value: Any) -> str:
    """Return JSON as the chat templates of transformers write it."""
    return json.dumps(value, ensure_ascii=False)


_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
_TYPES = {"string", "null", *_ALIASES.values()}
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def tools_of(schemas: Schemas) -> Tools:
    """Return the schemas of the parameters, by tool and name."""
    functions = [_object(schema.get("function", schema)) for schema in schemas]
    return {str(item.get("name")): _object(_object(item.get("parameters")).get("properties")) for item in functions}


def typed(name: str, value: str, schema: Any, otherwise: str, place: int) -> Any:
    """Return the value of the argument ``name``. Raises Unreadable with ``place`` if it has the wrong type.

    A string is the text as written. otherwise: type if the schema has none; "any" is JSON if it can be parsed, else a
    string.
    """
    types = _types(schema) & _TYPES or {otherwise}
    with suppress(Unreadable):
        bare = value.strip()
        parsed, end = read_json(bare if types & {"string", "any"} else _PYTHON.get(bare, bare), 0)
        kind = _ALIASES.get(type(parsed).__name__, "null")
        if kind == "number" and "number" not in types and parsed.is_integer():
            parsed, kind = int(parsed), "integer"
        fits = kind in types - {"string"} or "any" in types or (kind == "integer" and "number" in types)
        if fits and end >= len(bare) - (bare in _PYTHON):
            return parsed
    if types & {"string", "any"}:
        return value
    raise Unreadable(f"the argument {name} must be {' or '.join(sorted(types))}, and {value!r:.100} is not.", place)


def _types(schema: Any) -> set[str]:
    kind = _object(schema).get("type")
    types = {_ALIASES.get(name, name) for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        choices = _object(schema).get(key)
        types |= set().union(*map(_types, choices)) if isinstance(choices, list) else set()
    return types | {"null"} if _object(schema).get("nullable") is True else types
