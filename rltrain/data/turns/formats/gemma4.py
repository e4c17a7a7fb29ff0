"""The notation of Gemma 4: JSON in which keys have no quotation marks and a token is the quotation mark."""

import re
from dataclasses import dataclass
from typing import Any

from rltrain.data.turns.formats.reading import Call, Tools, Unreadable, dumped, read_json

_QUOTE = '<|"|>'
_HEAD = re.compile(r'\s*call:\s{0,9}(?P<name>[^\s<>{}\[\]"]{1,200})\s{0,9}(?=\{)')
_TOKEN = re.compile(
    r'\s*(?:<\|"\|>(?P<text>.*?)<\|"\|>|(?P<json>"(?:[^"\\]|\\.)*"|[{}\[\]:,])|(?P<word>[^{}\[\]:,<"]{1,300}))',
    re.DOTALL,
)
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9]\d{0,300})(?:\.\d{1,300})?(?:[eE][+-]?\d{1,3})?", re.IGNORECASE)


@dataclass(frozen=True)
class Gemma:
    """The notation, between marks."""

    def marks(self) -> dict[str, str]:
        return {"start": r"(?=\bcall:[\w.-]{1,200}\{)", "inner": re.escape(_QUOTE)}

    def read(self, text: str, place: int, tools: Tools) -> tuple[list[Call], int]:
        head = _HEAD.match(text, place)
        if not head:
            raise Unreadable("a call is written call:NAME{KEY:VALUE}.", place)
        written, place = _as_json(text, head.end())
        try:
            arguments, _ = read_json(written, 0)
        except Unreadable as problem:
            raise Unreadable(str(problem), place) from problem
        return [Call(head["name"], arguments)], place

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        return f"call:{name}{_written(arguments)}"


def _as_json(text: str, place: int) -> tuple[str, int]:
    """Return the object at a place as JSON, and the place after it. Raises Unreadable."""
    written: list[str] = []
    depth = 0
    while depth or not written:
        token = _TOKEN.match(text, place)
        if not token:
            is_open = text[place : place + 99].lstrip().startswith((_QUOTE, '"'))
            why = "a text has no closing quotation mark" if is_open else "an object is not closed"
            raise Unreadable(f"the call cannot be read: {why}.", len(text) if is_open else place)
        place = token.end()
        kind, value = token.lastgroup, token[token.lastgroup or 0].strip() if token["text"] is None else token["text"]
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(value, 0) if kind == "json" else 0
        if kind == "word" and _LITERAL.fullmatch(value) and text[place : place + 1] != ":":
            kind, value = "json", value.lower()
        written.append(value if kind == "json" else dumped(value))
    return "".join(written), place


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(value[key])}" for key in sorted(value)) + "}"
    return "[" + ",".join(map(_written, value)) + "]" if isinstance(value, list) else dumped(value)
