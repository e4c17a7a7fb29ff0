"""Kimi K2: special tokens around an id, which holds the name, and JSON."""

from dataclasses import replace
from typing import Any

from rltrain.data.turns.formats.reading import (
    Call,
    CallFormat,
    Parsed,
    Schemas,
    checked_arguments,
    dumped,
    expect,
    named,
    read_json,
    scan,
)

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_OPENING, _SEPARATOR, _CLOSING = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def _read(text: str, start: int) -> tuple[list[Call], int]:
    identity, place = named(text, start, _SEPARATOR)
    name, colon, number = identity.removeprefix("functions.").rpartition(":")
    value, place = read_json(text, place)
    name = name if colon and number.isdecimal() else identity.removeprefix("functions.")
    return [Call(name, checked_arguments(value), identity)], expect(text, place, _CLOSING)


def _parse(text: str, schemas: Schemas) -> Parsed:
    parsed = scan(text, _OPENING, _CLOSING, _read)
    return replace(parsed, text=parsed.text.replace(_SECTION, "").replace(_SECTION_END, "").strip())


def _write(name: str, arguments: dict[str, Any]) -> str:
    call = f"functions.{name}:0{_SEPARATOR}{dumped(arguments)}"
    return f"{_SECTION}{_OPENING}{call}{_CLOSING}{_SECTION_END}"


KIMI = CallFormat("kimi", _parse, _write)
