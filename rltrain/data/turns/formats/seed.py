"""Seed-OSS: the tags of Qwen 3 Coder between marks of its own, without line ends around values."""

from functools import partial
from typing import Any

from rltrain.data.turns.formats.qwen3_coder import read_function, written_function
from rltrain.data.turns.formats.reading import CallFormat, Parsed, Schemas, scan

_OPENING, _CLOSING = "<seed:tool_call>", "</seed:tool_call>"
_THINKING = ("<seed:think>", "</seed:think>")


def _parse(text: str, schemas: Schemas) -> Parsed:
    read = partial(read_function, schemas=schemas, closing=_CLOSING, border="", otherwise="any")
    return scan(text, _OPENING, _CLOSING, read, _THINKING)


def _write(name: str, arguments: dict[str, Any]) -> str:
    return f"{_OPENING}\n{written_function(name, arguments, border='')}\n{_CLOSING}"


SEED = CallFormat("seed", _parse, _write)
