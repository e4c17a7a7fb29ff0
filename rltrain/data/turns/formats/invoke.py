"""The tags that MiniMax and DeepSeek V4 share: a block of invocations, each with a name and parameters."""

import re
from collections.abc import Callable
from typing import Any

from rltrain.data.turns.formats.reading import (
    MOST_CALLS,
    Call,
    Reader,
    Schemas,
    Unreadable,
    dumped,
    expect,
    named,
    properties,
    skip_space,
    typed,
)

# Of a parameter's tag, behind its name: whether its value is text, in the families that say so.
_KIND = re.compile(r'"(?:\s{1,9}string\s{0,9}=\s{0,9}"(true|false)")?\s{0,9}>')


class Tags:
    """The tags of a family, which has ``prefix`` in front of their names. closing: of a block of calls."""

    def __init__(self, prefix: str, closing: str) -> None:
        self._invoke, self._parameter = f'<{prefix}invoke name="', f'<{prefix}parameter name="'
        self._end, self._end_of_parameter = f"</{prefix}invoke>", f"</{prefix}parameter>"
        self._closing = closing
        # A value may hold the closing tag itself: the one that ends it is followed by what may follow a parameter.
        follows = "|".join(map(re.escape, (self._parameter, self._end)))
        self._end_of_value = re.compile(rf"{re.escape(self._end_of_parameter)}(?=\s{{0,99}}(?:{follows}))")

    def reader(self, schemas: Schemas) -> Reader:
        """Of a block of calls behind its opening mark."""

        def read(text: str, start: int) -> tuple[list[Call], int]:
            calls: list[Call] = []
            place = start
            try:
                while not calls or text.startswith(self._invoke, skip_space(text, place)):
                    if len(calls) >= MOST_CALLS:
                        raise Unreadable(f"a turn may hold at most {MOST_CALLS} calls.")
                    call, place = self._read(text, place, schemas)
                    calls.append(call)
                # The closing tag may be missing or cut at the end of the turn, as with other formats of tags.
                place = skip_space(text, place)
                if self._closing.startswith(text[place : place + len(self._closing)]):
                    return calls, min(place + len(self._closing), len(text))
                return calls, expect(text, place, self._closing)
            except Unreadable as problem:
                raise Unreadable(str(problem), calls) from problem

        return read

    def _read(self, text: str, start: int, schemas: Schemas) -> tuple[Call, int]:
        name, place = named(text, expect(text, start, self._invoke), '">')
        known = properties(schemas, name)
        arguments: dict[str, Any] = {}
        while text.startswith(self._parameter, skip_space(text, place)):
            place = expect(text, place, self._parameter)
            key, place = named(text, place, '"')
            kind = _KIND.match(text, place - 1)
            if not kind:
                raise Unreadable(f"the tag of the parameter {key} does not end.")
            end = self._end_of_value.search(text, kind.end())
            if not end:
                raise Unreadable(f"the parameter {key} does not end with {self._end_of_parameter} before {self._end}.")
            value = text[kind.end() : end.start()]
            arguments[key] = value if kind.group(1) == "true" else typed(value, known.get(key), "any")
            place = end.end()
        return Call(name, arguments), expect(text, place, self._end)

    def written(self, name: str, arguments: dict[str, Any], kind: Callable[[bool], str]) -> str:
        """One call. kind: what the tag of a parameter says of whether its value is text."""
        tags = [
            f'{self._parameter}{key}"{kind(isinstance(value, str))}>'
            f"{value if isinstance(value, str) else dumped(value)}{self._end_of_parameter}\n"
            for key, value in arguments.items()
        ]
        return f'{self._invoke}{name}">\n{"".join(tags)}{self._end}'
