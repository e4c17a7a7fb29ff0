"""Qwen 3 Coder, Qwen 3.5, Nemotron 3: tags of a function and its parameters, whose values have no types."""

import re
from functools import partial
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


def read_function(
    text: str, start: int, *, schemas: Schemas, closing: str, border: str = "\n", otherwise: str = "string"
) -> tuple[list[Call], int]:
    """The call behind its opening mark, and the place behind ``closing``. Raises Unreadable.

    border: what stands around a value; otherwise: the type of one without a schema (`typed`).
    """
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
        arguments[key] = typed(value.removeprefix(border).removesuffix(border), known.get(key), otherwise)
        place = end.end()
    place = expect(text, place, "</function>")
    if text[place:].strip():  # the closing tag may be missing at the end of the turn, as in verl
        place = expect(text, place, closing)
    return [Call(name, arguments)], place


def written_function(name: str, arguments: dict[str, Any], border: str = "\n") -> str:
    """The function and its parameters, as `read_function` reads them."""
    values = {key: value if isinstance(value, str) else dumped(value) for key, value in arguments.items()}
    parameters = "".join(f"{_PARAMETER}{key}>{border}{value}{border}</parameter>\n" for key, value in values.items())
    return f"{_FUNCTION}{name}>\n{parameters}</function>"


def _parse(text: str, schemas: Schemas) -> Parsed:
    return scan(text, _OPENING, _CLOSING, partial(read_function, schemas=schemas, closing=_CLOSING))


def _write(name: str, arguments: dict[str, Any]) -> str:
    return f"{_OPENING}\n{written_function(name, arguments)}\n{_CLOSING}"


QWEN3_CODER = CallFormat("qwen3_coder", _parse, _write)
