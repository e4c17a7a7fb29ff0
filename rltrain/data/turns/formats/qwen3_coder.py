"""Qwen 3 Coder, Qwen 3.5, Nemotron 3: tags of a function and its parameters, whose values have no types."""

import re
from typing import Any

from rltrain.data.turns.formats.reading import (
    Call,
    CallFormat,
    Parsed,
    Schemas,
    Unreadable,
    dumped,
    expect,
    named,
    properties,
    scan,
    typed,
)

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
# A value may hold the closing tag itself: the one that ends it is followed by what may follow a parameter.
_END_OF_VALUE = re.compile(r"</parameter>(?=\s{0,99}(?:<parameter=|</function>))")


def _parse(text: str, schemas: Schemas) -> Parsed:
    def read(text: str, start: int) -> tuple[list[Call], int]:
        name, place = named(text, expect(text, start, _FUNCTION), ">")
        known = properties(schemas, name)
        arguments: dict[str, Any] = {}
        while True:
            try:
                place = expect(text, place, _PARAMETER)
            except Unreadable:
                break
            key, place = named(text, place, ">")
            end = _END_OF_VALUE.search(text, place)
            if not end:
                raise Unreadable(f"the parameter {key} does not end with </parameter> before </function>.")
            value = text[place : end.start()]
            arguments[key] = typed(value.removeprefix("\n").removesuffix("\n"), known.get(key))
            place = end.end()
        place = expect(text, place, "</function>")
        if text[place:].strip():  # the closing tag may be missing at the end of the turn, as in verl
            place = expect(text, place, _CLOSING)
        return [Call(name, arguments)], place

    return scan(text, _OPENING, _CLOSING, read)


def _write(name: str, arguments: dict[str, Any]) -> str:
    values = {key: value if isinstance(value, str) else dumped(value) for key, value in arguments.items()}
    parameters = "".join(f"{_PARAMETER}{key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"{_OPENING}\n{_FUNCTION}{name}>\n{parameters}</function>\n{_CLOSING}"


QWEN3_CODER = CallFormat("qwen3_coder", _parse, _write)
