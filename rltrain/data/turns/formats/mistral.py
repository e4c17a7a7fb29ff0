"""Mistral: a list of JSON objects behind a token; newer models: a name, a token and the arguments, once per call."""

import re
from typing import Any

from rltrain.data.turns.formats.reading import (
    MOST_CALLS,
    Call,
    CallFormat,
    Parsed,
    Schemas,
    Unreadable,
    call_of,
    checked_arguments,
    dumped,
    read_json,
    scan,
)

_OPENING = "[TOOL_CALLS]"
_THINKING = ("[THINK]", "[/THINK]")
_HEAD = re.compile(r"\s{0,9}([\w.-]{1,200})(?:\[CALL_ID\](\w{1,50}))?(?:\[ARGS\])?(?=\s{0,9}\{)")


def _read(text: str, start: int) -> tuple[list[Call], int]:
    if head := _HEAD.match(text, start):
        value, place = read_json(text, head.end())
        return [Call(head.group(1), checked_arguments(value), head.group(2) or "")], place
    value, place = read_json(text, start)
    values = value if isinstance(value, list) else [value]
    if not 0 < len(values) <= MOST_CALLS:
        raise Unreadable(f"{_OPENING} is followed by a list of 1 to {MOST_CALLS} calls.")
    return [call_of(each) for each in values], place


def _parse(text: str, schemas: Schemas) -> Parsed:
    return scan(text, _OPENING, "[/TOOL_CALLS]", _read, _THINKING)


def _write(name: str, arguments: dict[str, Any]) -> str:
    return f"{_OPENING}[{dumped({'name': name, 'arguments': arguments})}]"


MISTRAL = CallFormat("mistral", _parse, _write)
