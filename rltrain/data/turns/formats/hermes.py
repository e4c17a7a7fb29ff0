"""Hermes, Qwen 2.5, Qwen 3: a JSON object between two tags."""

from typing import Any

from rltrain.data.turns.formats.reading import (
    Call,
    CallFormat,
    Parsed,
    Schemas,
    call_of,
    dumped,
    expect,
    read_json,
    scan,
)

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"


def _read(text: str, start: int) -> tuple[list[Call], int]:
    value, place = read_json(text, start)
    call = call_of(value)
    return [call], expect(text, place, _CLOSING)


def _parse(text: str, schemas: Schemas) -> Parsed:
    return scan(text, _OPENING, _CLOSING, _read)


def _write(name: str, arguments: dict[str, Any]) -> str:
    return f"{_OPENING}\n{dumped({'name': name, 'arguments': arguments})}\n{_CLOSING}"


HERMES = CallFormat("hermes", _parse, _write)
