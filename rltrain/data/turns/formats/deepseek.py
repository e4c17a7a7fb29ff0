"""DeepSeek V3 and R1 (a fence of JSON behind the name) and V3.1 (the arguments alone), between special tokens."""

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

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_OPENING, _SEPARATOR, _CLOSING = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"


def _read(text: str, start: int) -> tuple[list[Call], int]:
    name, place = named(text, start, _SEPARATOR)
    fenced = not text[place : place + 20].lstrip().startswith("{")
    if fenced:
        name, place = named(text, place, "\n")
        place = expect(text, place, f"{_FENCE}json")
    value, place = read_json(text, place)
    if fenced:
        place = expect(text, place, _FENCE)
    return [Call(name, checked_arguments(value))], expect(text, place, _CLOSING)


def _parse(text: str, schemas: Schemas) -> Parsed:
    parsed = scan(text, _OPENING, _CLOSING, _read)
    return replace(parsed, text=parsed.text.replace(_SECTION, "").replace(_SECTION_END, "").strip())


def _write(name: str, arguments: dict[str, Any]) -> str:
    call = f"function{_SEPARATOR}{name}\n{_FENCE}json\n{dumped(arguments)}\n{_FENCE}"
    return f"{_SECTION}{_OPENING}{call}{_CLOSING}{_SECTION_END}"


DEEPSEEK_V3 = CallFormat("deepseek_v3", _parse, _write)
