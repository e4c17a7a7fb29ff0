"""Notation of Gemma 4: JSON with unquoted keys, and a token as quotation mark."""

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
    """Notation of a call between its marks."""

    def marks(self) -> dict[str, str]:
        return {"start": r"(?=\bcall:[\w.-]{1,200}\{)", "inner": re.escape(_QUOTE)}

    def read(self, text: str, place: int, tools: Tools) -> tuple[list[Call], int]:
        head = _HEAD.match(text, place)
        if not head:
            raise Unreadable("a call must have the form call:NAME{KEY:VALUE}.", place)
        place, depth = head.end(), 0
        written: list[str] = []
        while depth or not written:
            if not (token := _TOKEN.match(text, place)):
                is_open = text[place : place + 99].lstrip().startswith((_QUOTE, '"'))
                raise Unreadable(
                    "the call is not complete: } or a quotation mark is missing.", len(text) if is_open else place
                )
            place, kind = token.end(), token.lastgroup or ""
            value = token[kind].strip() if kind == "word" else token[kind]
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(value, 0) if kind == "json" else 0
            is_json = kind == "json" or (
                kind == "word" and _LITERAL.fullmatch(value) and text[place : place + 1] != ":"
            )
            written.append((value.lower() if kind == "word" else value) if is_json else dumped(value))
        return [Call(head["name"], read_json("".join(written), 0)[0])], place

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        return f"call:{name}{_written(arguments)}"


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(value[key])}" for key in sorted(value)) + "}"
    return "[" + ",".join(map(_written, value)) + "]" if isinstance(value, list) else dumped(value)
