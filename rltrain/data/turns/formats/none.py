"""Turns without calls: what the model writes for an environment, or an agent without tools."""

from typing import Any

from rltrain.data.turns.formats.reading import CallFormat, Parsed, Schemas, spoken


def _parse(text: str, schemas: Schemas) -> Parsed:
    said, reasoning = spoken(text)
    return Parsed([], [], said, reasoning)


def _write(name: str, arguments: dict[str, Any]) -> str:
    return ""


NO_CALLS = CallFormat("none", _parse, _write)
