"""DeepSeek V4, and V3.2 and V4.1 before and after it: invocations whose parameters say whether they are text or JSON.

The three differ in the name of the block and in a space behind the token of the tags: all are read as V4.
"""

import re
from typing import Any

from rltrain.data.turns.formats.invoke import Tags
from rltrain.data.turns.formats.reading import CallFormat, Parsed, Schemas, scan

_TOKEN = "｜DSML｜"
_OPENING, _CLOSING = f"<{_TOKEN}tool_calls>", f"</{_TOKEN}tool_calls>"
_TAGS = Tags(_TOKEN, _CLOSING)
_BLOCK = re.compile(f"(</?{_TOKEN})(?:function_calls| calls)>")


def _parse(text: str, schemas: Schemas) -> Parsed:
    text = _BLOCK.sub(r"\1tool_calls>", text).replace(f"{_TOKEN} ", _TOKEN)
    return scan(text, _OPENING, _CLOSING, _TAGS.reader(schemas))


def _write(name: str, arguments: dict[str, Any]) -> str:
    call = _TAGS.written(name, arguments, lambda is_text: f' string="{str(is_text).lower()}"')
    return f"{_OPENING}\n{call}\n{_CLOSING}"


DEEPSEEK_V4 = CallFormat("deepseek_v4", _parse, _write)
