"""The two common notations of calls: JSON, and tags around names and values."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rltrain.data.turns.formats.reading import Call, Tools, Unreadable, arguments_of, call_of, dumped, read_json, typed
from rltrain.data.turns.formats.scan import any_of

NAME = r'[^\s<>{}\[\]"]{1,200}'
_BARE = r"""(?:\[\s{0,99})?\{\s{0,99}["']"""
_NEXT = re.compile(r"[\s;,]*(?=\{|\[\s*\{)")


@dataclass(frozen=True)
class Json:
    """JSON objects with name and arguments, single or in lists; or arguments after a head with the name."""

    written: str = '{"name": "NAME", "arguments": ARGUMENTS}'
    """Template of a call as the family writes it."""
    head: str = r"(?!)"
    """A regular expression for the text before the arguments, with the group "name"."""
    tail: str = ""
    """A regular expression for the text after them."""
    inner: tuple[str, ...] = ()
    """Marks that occur only within calls."""
    bare: str = _BARE

    def marks(self) -> dict[str, str]:
        return {"inner": any_of(self.inner), **({"bare": self.bare} if self.bare else {})}

    def read(self, text: str, place: int, tools: Tools) -> tuple[list[Call], int]:
        if head := re.match(self.head, text[place : place + 999]):
            value, place = read_json(text, place + head.end())
            tail = re.compile(self.tail).match(text, place)
            call = Call(head["name"], arguments_of(value), head.groupdict().get("id") or "")
            return [call], tail.end() if tail else place
        calls: list[Call] = []
        after = _NEXT.match(text, place)
        while after or not calls:
            value, place = read_json(text, after.end() if after else place)
            calls += [call_of(item, tools) for item in (value if isinstance(value, list) and value else [value])]
            after = _NEXT.match(text, place)
        return calls, place

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        parts = {"NAME": name, "ARGUMENTS": dumped(arguments)}
        return re.sub("NAME|ARGUMENTS", lambda match: parts[match.group()], self.written)


@dataclass(frozen=True)
class Tags:
    """A tag with the tool's name that contains one tag per argument, with an untyped value."""

    start: str
    """Opening tag, with NAME for the name of the tool."""
    parameter: str
    """Parameter, with KEY and VALUE. KIND is "true" if the value is text, and "false" for JSON."""
    end: str
    otherwise: str = "any"
    """Type for values that have no type in the tool's schema (see `typed`)."""

    @cached_property
    def _marks(self) -> tuple[list[str], str]:
        """Marks before a value (the first starts a parameter), and the mark after it."""
        opened, closed = self.parameter.split("VALUE")
        return [opened.partition("KEY")[0], *re.findall(r"</?\w+>", opened)], closed.strip()

    def marks(self) -> dict[str, str]:
        starts = any_of([self.start.partition("NAME")[0]])
        return {"start": f"(?={starts})", "inner": any_of([*self._marks[0], self._marks[1], self.end])}

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        """Regular expressions for the starts of a call and a parameter, and the ends of a value and the call."""
        name = rf"\s{{0,9}}(?P<name>{NAME})\s{{0,9}}"
        kind = r'(?:\s{1,9}string\s{0,9}=\s{0,9}"(?P<kind>true|false)")?'
        parameter = any_of([self.parameter.partition("VALUE")[0].rstrip()]).replace("KEY", name)
        # A value may contain its end mark; the real end mark is followed by the next parameter or the end of the call.
        value_end = rf"{any_of([self._marks[1]])}(?=\s{{0,99}}(?:{any_of([self._marks[0][0], self.end])}))"
        start, rest = (any_of([part]) for part in self.start.split("NAME"))
        patterns = f"{start}(?:{name}{rest})?", parameter.replace(r'\s{0,99}string="KIND"', kind)
        return [re.compile(item) for item in (*(rf"\s*{item}" for item in (*patterns, any_of([self.end]))), value_end)]

    def read(self, text: str, place: int, tools: Tools) -> tuple[list[Call], int]:
        start, parameter, end, value_end = self._patterns
        head = start.match(text, place)
        if not head or not head["name"]:
            raise Unreadable(f"a call must begin with {self.start}.", head.end() if head else place)
        place, known = head.end(), tools.get(head["name"], {})
        arguments: dict[str, Any] = {}
        while opened := parameter.match(text, place):
            name, begin = opened["name"], opened.end()
            closed = value_end.search(text, begin)
            value = text[begin : closed.start() if closed else begin]
            place = closed.end() if closed else text.find(self.end, begin) % (len(text) + 1)
            if not closed or re.search(any_of(self._marks[0]), value):
                raise Unreadable(f"the value of {name} does not end with {self._marks[1]}.", place)
            if name in arguments:
                raise Unreadable(f"the call has the argument {name} twice.", place)
            value = value.removeprefix("\n").removesuffix("\n") if "\nVALUE" in self.parameter else value
            schema = {"type": "string"} if opened.groupdict().get("kind") == "true" else known.get(name)
            arguments[name] = typed(name, value, schema, self.otherwise, place)
        if not (ended := end.match(text, place)):
            raise Unreadable(f"the call is not complete: {self.end} is missing.", place)
        return [Call(head["name"], arguments)], ended.end()

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        lines = [self.start.replace("NAME", name)]
        for key, value in arguments.items():
            opened, closed = self.parameter.split("VALUE")
            opened = opened.replace("KEY", key).replace("KIND", str(isinstance(value, str)).lower())
            lines.append(f"{opened}{value if isinstance(value, str) else dumped(value)}{closed}")
        return "\n".join([*lines, self.end])
