"""Gemma 4: objects of a notation of its own, in which a token is the quotation mark."""

import re
from typing import Any

from rltrain.data.turns.formats.reading import (
    Call,
    CallFormat,
    Parsed,
    Schemas,
    Unreadable,
    expect,
    named,
    scan,
)

_OPENING, _CLOSING, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_THINKING = ("<|channel>", "<channel|>")
_DEEPEST = 64
_BARE = re.compile(r"[^,}\]<]{0,200}")
_NUMBER = re.compile(r"-?\d{1,300}(?:\.\d{1,300})?(?:[eE][+-]?\d{1,3})?")


def _value(text: str, place: int, depth: int) -> tuple[Any, int]:
    if depth > _DEEPEST:
        raise Unreadable("the arguments are nested too deeply.")
    if text.startswith(_QUOTE, place):
        return _quoted(text, place)
    if text.startswith("{", place):
        return _object(text, place + 1, depth)
    if text.startswith("[", place):
        values = []
        place += 1
        while not text.startswith("]", place):
            value, place = _value(text, place, depth + 1)
            values.append(value)
            place = _next(text, place, "]")
        return values, place + 1
    match = _BARE.match(text, place)
    word = match.group().strip() if match else ""
    if not match or not word:
        raise Unreadable(f"a value is missing: text stands between two {_QUOTE}.")
    if word.lower() in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[word.lower()], match.end()
    if _NUMBER.fullmatch(word):
        number = float(word)
        whole = word.lstrip("-").isdecimal()
        return (int(word) if whole else number if abs(number) < float("inf") else word), match.end()
    return word, match.end()


def _object(text: str, place: int, depth: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    while not text.startswith("}", place):
        if text.startswith(_QUOTE, place):
            key, place = _quoted(text, place)
            place = expect(text, place, ":")
        else:
            key, place = named(text, place, ":")
        values[key], place = _value(text, place, depth + 1)
        place = _next(text, place, "}")
    return values, place + 1


def _next(text: str, place: int, closing: str) -> int:
    """The place of the next part of an object or a list, or of its end."""
    if text.startswith(closing, place):
        return place
    return expect(text, place, ",")


def _quoted(text: str, place: int) -> tuple[str, int]:
    end = text.find(_QUOTE, place + len(_QUOTE))
    if end < 0:
        raise Unreadable(f"a text is opened by {_QUOTE} and not closed.")
    return text[place + len(_QUOTE) : end], end + len(_QUOTE)


def _read(text: str, start: int) -> tuple[list[Call], int]:
    name, place = named(text, expect(text, start, "call:"), "{")
    arguments, place = _object(text, place, 0)
    # The token that ends the call ends the turn as well, and may have been left out with it.
    return [Call(name, arguments)], expect(text, place, _CLOSING) if text[place:].strip() else place


def _parse(text: str, schemas: Schemas) -> Parsed:
    parsed = scan(text, _OPENING, _CLOSING, _read, _THINKING)
    return Parsed(parsed.calls, parsed.problems, parsed.text, parsed.reasoning.removeprefix("thought").strip())


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return str(value)


def _write(name: str, arguments: dict[str, Any]) -> str:
    return f"{_OPENING}call:{name}{_written(arguments)}{_CLOSING}"


GEMMA4 = CallFormat("gemma4", _parse, _write, stop_tokens=(_CLOSING,))
