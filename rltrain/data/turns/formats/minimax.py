"""MiniMax M2: a block of invocations, whose parameters have no types."""

from typing import Any

from rltrain.data.turns.formats.invoke import Tags
from rltrain.data.turns.formats.reading import CallFormat, Parsed, Schemas, scan

_OPENING, _CLOSING = "<minimax:tool_call>", "</minimax:tool_call>"
_TAGS = Tags("", _CLOSING)


def _parse(text: str, schemas: Schemas) -> Parsed:
    return scan(text, _OPENING, _CLOSING, _TAGS.reader(schemas))


def _write(name: str, arguments: dict[str, Any]) -> str:
    return f"{_OPENING}\n{_TAGS.written(name, arguments, lambda is_text: '')}\n{_CLOSING}"


MINIMAX = CallFormat("minimax", _parse, _write)
