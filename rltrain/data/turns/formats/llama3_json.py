"""Llama 3.1 to 3.3: the turn itself is a JSON object, or several with semicolons, at times behind a token."""

from typing import Any

from rltrain.data.turns.formats.reading import (
    MOST_CALLS,
    Call,
    CallFormat,
    Parsed,
    Schemas,
    Unreadable,
    call_of,
    dumped,
    read_json,
    scan,
)

_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")


def _parse(text: str, schemas: Schemas) -> Parsed:
    # Without calls: an answer and its reasoning.
    said = scan(text, _TAG, _TAG, _read)
    if said.calls or said.problems or not said.text.startswith("{"):
        return said
    # An answer may be JSON; one that begins as a call does was meant as one.
    begun = said.text[1:20].lstrip().startswith('"name"')
    try:
        value, _ = read_json(said.text, 0)
        if not isinstance(value, dict) or not value.keys() & set(_KEYS):
            return said
        calls, end = _read(said.text, 0)
    except Unreadable as problem:
        return Parsed([], [str(problem)], "", said.reasoning) if begun else said
    return Parsed(calls, [], said.text[end:].strip(), said.reasoning)


def _read(text: str, start: int) -> tuple[list[Call], int]:
    calls: list[Call] = []
    place = start
    while True:
        value, place = read_json(text, place)
        calls.append(call_of(value, _KEYS))
        rest = text[place : place + 100].lstrip()
        if not rest.startswith(";") or len(calls) >= MOST_CALLS:
            return calls, place
        place = text.index(";", place) + 1


def _write(name: str, arguments: dict[str, Any]) -> str:
    return dumped({"name": name, "parameters": arguments})


LLAMA3_JSON = CallFormat("llama3_json", _parse, _write, stop_tokens=("<|eom_id|>",))
