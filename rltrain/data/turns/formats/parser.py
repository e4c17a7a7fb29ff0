"""The parser of all formats whose calls stand between marks, and its two usual notations: JSON and tags.

A call is read only outside reasoning, and a mark inside an argument is not a mark of the turn: so the marks are visited
in order, and each call that can be read is stepped over as a whole.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from rltrain.data.turns.formats.reading import (
    MOST_CALLS,
    Call,
    CallFormat,
    Parsed,
    Schemas,
    Tools,
    Unreadable,
    arguments_of,
    call_of,
    dumped,
    read_json,
    skip_space,
    tools_of,
    typed,
    without_end,
)

NAME = r'[^\s<>{}\[\]"]{1,200}'
# JSON that may be a call, what precedes it inside other JSON, and what precedes another call.
_BARE = r"""(?:\[\s{0,99})?\{\s{0,99}["'](?:name|type|function|id|arguments|parameters)["']\s{0,99}:"""
_WITHIN_JSON = ("[", "{", '":', "},", "],", '",')
_NEXT = re.compile(r"[\s;,]*(?=\{|\[\s*\{)")
_FENCE = re.compile(r"\s*```\w*\s*")
_ARGUMENTS = re.compile(r"""(?:arguments|parameters)["']?\s{0,99}:?\s{0,99}[{"']""")
_NAME = re.compile(r"""name["']?\s{0,99}:?\s{0,99}["']([^"'\s]{1,200})["']""")
_WHOLE_TAG = re.compile(r"</?\w+>")


def any_of(marks: Iterable[str]) -> str:
    """Return a regular expression for any of the marks. White space in them may vary."""
    # A token of DeepSeek may be followed by a space.
    escaped = (re.escape(mark).replace("｜DSML｜", "｜DSML｜ ?") for mark in sorted(marks, key=len, reverse=True))
    return "|".join(re.sub(r"(?:\\\s)+", r"\\s{0,99}", mark) for mark in escaped)


class Notation(Protocol):
    """The notation of calls within a block."""

    def marks(self) -> dict[str, str]:
        """Return regular expressions, "" if there is none, for three kinds of text.

        "start": the beginning of a call without the block's opening mark; "inner": marks that occur only within calls;
        "bare": the beginning of text that may be a call without any marks.
        """

    def read(self, text: str, place: int, tools: Tools) -> tuple[list[Call], int]:
        """Return the calls at a place, and the place after them. Raises Unreadable."""

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return a call without the marks around it."""


@dataclass(frozen=True)
class Json:
    """JSON objects with names and arguments, one by one or in lists; or a head with the name before the arguments."""

    written: str = '{"name": "NAME", "arguments": ARGUMENTS}'
    """A call as the family writes it."""
    head: str = r"(?!)"
    """A regular expression for the text before the arguments, with the group "name"."""
    tail: str = ""
    """A regular expression for the text after them."""
    inner: tuple[str, ...] = ()
    """Marks that occur only within calls."""
    bare: str = _BARE

    def marks(self) -> dict[str, str]:
        return {"inner": any_of(self.inner), "bare": self.bare}

    def read(self, text: str, place: int, tools: Tools) -> tuple[list[Call], int]:
        calls: list[Call] = []
        try:
            if head := re.compile(self.head).match(text, place):
                value, place = read_json(text, head.end())
                calls = [Call(head["name"], arguments_of(value), head.groupdict().get("id") or "")]
                tail = re.compile(self.tail).match(text, place)
                return calls, tail.end() if tail else place
            while not calls or _NEXT.match(text, place):
                after = _NEXT.match(text, place) if calls else None
                value, place = read_json(text, after.end() if after else place)
                calls += [call_of(each, tools) for each in (value if isinstance(value, list) and value else [value])]
        except Unreadable as problem:
            raise Unreadable(str(problem), max(place, problem.place), calls) from problem
        return calls, place

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        parts = {"NAME": name, "ARGUMENTS": dumped(arguments)}
        return re.sub("NAME|ARGUMENTS", lambda match: parts[match.group()], self.written)


@dataclass(frozen=True)
class Tags:
    """A tag with the name of the tool, and in it one for each argument, whose values have no types."""

    start: str
    """With NAME where the name of the tool stands."""
    parameter: str
    """With KEY where the name of an argument stands; KIND is true or false: whether the value is text, not JSON."""
    end_of_parameter: str
    end: str
    border: str = ""
    """White space around a value."""
    otherwise: str = "any"
    """The type of a value that has none in the tool's schema, see `typed`."""

    def marks(self) -> dict[str, str]:
        starts = any_of([self.start.partition("NAME")[0]])
        return {"start": f"(?={starts})", "inner": any_of([self._next, self.end_of_parameter, self.end])}

    @property
    def _next(self) -> str:
        """The beginning of a parameter."""
        return self.parameter.partition("KEY")[0]

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        """Regular expressions for the start of a call, that of a parameter, the end of its value and of the call."""
        name = rf"\s{{0,9}}(?P<name>{NAME})\s{{0,9}}"
        kind = r'(?:\s{1,9}string\s{0,9}=\s{0,9}"(?P<kind>true|false)")?'
        parameter = any_of([self.parameter]).replace("KEY", name).replace(r'\s{0,99}string="KIND"', kind)
        # A value may hold the mark of its end: the one that ends it is followed by what may follow a parameter.
        value_end = rf"{any_of([self.end_of_parameter])}(?=\s{{0,99}}(?:{any_of([self._next, self.end])}))"
        start, end = any_of([self.start]).replace("NAME", name), any_of([self.end])
        return [re.compile(each) for each in (rf"\s*{start}", rf"\s*{parameter}", value_end, rf"\s*{end}")]

    def read(self, text: str, place: int, tools: Tools) -> tuple[list[Call], int]:
        calls: list[Call] = []
        while head := self._patterns[0].match(text, place):
            try:
                arguments, place = self._arguments(text, head.end(), tools.get(head["name"], {}))
            except Unreadable as problem:
                raise Unreadable(str(problem), problem.place, calls) from problem
            calls.append(Call(head["name"], arguments))
        if not calls:
            begun = re.compile(rf"\s*{self.marks()['start'][3:-1]}").match(text, place)
            raise Unreadable(f"a call begins with {self.start}, and that is missing.", begun.end() if begun else place)
        return calls, place

    def _arguments(self, text: str, place: int, known: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Return the arguments at a place, and the place after the end of the call."""
        _, parameter, value_end, call_end = self._patterns
        arguments: dict[str, Any] = {}
        while opened := parameter.match(text, place):
            name, start = opened["name"], opened.end()
            closed = value_end.search(text, start)
            value = text[start : closed.start() if closed else start].removeprefix(self.border)
            if not closed or re.search(any_of([self._next, *_WHOLE_TAG.findall(self.parameter)]), value):
                place = closed.end() if closed else max(text.find(self.end, start), start)
                raise Unreadable(f"the value of {name} does not end with {self.end_of_parameter}.", place)
            place = closed.end()
            if name in arguments:
                raise Unreadable(f"the call has the argument {name} twice.", place)
            is_text = opened.groupdict().get("kind") == "true"
            schema = {"type": "string"} if is_text else known.get(name)
            try:
                arguments[name] = typed(name, value.removesuffix(self.border), schema, self.otherwise)
            except Unreadable as problem:
                raise Unreadable(str(problem), place) from problem
        if not (ended := call_end.match(text, place)):
            raise Unreadable(f"the call is not complete: {self.end} is missing.", place)
        return arguments, ended.end()

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        lines = [self.start.replace("NAME", name)]
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            opened = self.parameter.replace("KIND", str(is_text).lower()).replace("KEY", key)
            lines.append(opened + (value if is_text else dumped(value)).join([self.border] * 2) + self.end_of_parameter)
        return "\n".join([*lines, self.end])


@dataclass(frozen=True)
class Family:
    """A model family's way to write calls."""

    name: str
    notation: Notation
    opening: tuple[str, ...] = ()
    """Marks that the family writes before a call, the block's first."""
    closing: tuple[str, ...] = ()
    """Marks that it writes after a call."""
    border: str = ""
    """White space inside these marks."""
    others: tuple[str, ...] = ()
    """Further marks that are read: closing ones begin with </."""
    thinking: tuple[str, str] = ("<think>", "</think>")
    stop_tokens: tuple[str, ...] = ()

    @property
    def format(self) -> CallFormat:
        """The format with this family's parser."""
        return CallFormat(self.name, self.parse, self.write, self.stop_tokens)

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        """Return the content of a turn."""
        return _Turn(self, without_end(text, self.closing), tools_of(schemas)).parsed()

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return a call as the family writes it."""
        parts = ["".join(self.opening), self.notation.write(name, arguments), "".join(self.closing)]
        return self.border.join(parts).strip()

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """A regular expression for any mark, in a group named for the method of `_Turn` that reads it."""
        opening = any_of([*self.opening, *(mark for mark in self.others if not mark.startswith("</"))])
        closing = any_of([*self.closing, *(mark for mark in self.others if mark.startswith("</"))])
        groups = {
            "think": any_of(self.thinking[:1]),
            "thought": any_of(self.thinking[1:]),
            "opening": rf"(?:{opening})(?:\s*(?:{opening}))*" if opening else "",
            "closing": rf"(?:{closing})(?:\s*(?:{closing}))*" if closing else "",
            **self.notation.marks(),
        }
        return re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in groups.items() if pattern))

    def block(self, text: str, place: int, tools: Tools) -> tuple[list[Call], int]:
        """Return the calls after an opening mark, and the place after them and their closing marks. Raises Unreadable.

        A closing mark may be missing before the end, another mark or words: then the calls are complete.
        """
        calls, place = self.notation.read(text, place, tools)
        after = skip_space(text, place)
        rest = text[after : after + 100]
        mark = self.marks.match(text, after)
        if mark and mark.lastgroup == "closing":
            place = mark.end()
        elif any(closing.startswith(rest) for closing in self.closing):  # cut, or the end
            place = len(text)
        elif not mark and rest and not rest[0].isalpha():
            raise Unreadable(f"the call goes on after its end, with {rest[:20]!r}.", after, calls[:-1])
        return calls, place


class _Turn:
    """A turn, up to a place."""

    def __init__(self, family: Family, text: str, tools: Tools) -> None:
        self._family, self._text, self._tools = family, text, tools
        self._place = self._fences = self._tries = 0
        self._calls: list[Call] = []
        self._problems: list[str] = []
        self._said: list[str] = []
        self._reasoning: list[str] = []
        self._before: tuple[int, ...] = ()
        """In open reasoning: where it begins, and how many calls, problems, texts and fences came before."""
        self._ends_with_call = False

    def parsed(self) -> Parsed:
        methods = {"think": self._think, "thought": self._thought, "bare": self._bare}
        methods |= {"closing": self._stray, "inner": self._stray}
        while match := self._family.marks.search(self._text, self._place):
            self._said.append(self._text[self._place : match.start()])
            self._fences += self._said[-1].count("```")
            self._place = match.end()
            methods.get(match.lastgroup or "", self._call)(match)
        self._said.append(self._text[self._place :])
        if self._before:
            has_calls = len(self._calls) > self._before[1]
            self._end_reasoning(len(self._text))
            why = f"the reasoning does not end with {self._family.thinking[1]}: the calls in it are not run."
            self._problems += [why] if has_calls else []
        reasoning = "\n".join(part.strip() for part in self._reasoning).strip()
        text = "".join(self._said).strip()
        if self._looks_like_call(text):
            text, self._problems = "", [*self._problems, "JSON looks like a call and cannot be read as one."]
        return Parsed(self._calls, self._problems, text, reasoning)

    def _looks_like_call(self, text: str) -> bool:
        """Return whether text outside Markdown code, for a family that writes JSON, names a tool or has arguments."""
        said = "".join(text.split("```")[::2]) if self._family.notation.marks().get("bare") else ""
        if any(name in self._tools for name in _NAME.findall(said)):
            return True
        return bool(_ARGUMENTS.search(said)) and (not self._family.opening or any(name in said for name in self._tools))

    def _think(self, match: re.Match[str]) -> None:
        counts = len(self._calls), len(self._problems), len(self._said), self._fences
        self._before = self._before or (match.end(), *counts)

    def _thought(self, match: re.Match[str]) -> None:
        if self._reasoning and not self._before:
            self._said.append(match.group())
        else:  # the prompt may have opened it
            self._end_reasoning(match.start())

    def _end_reasoning(self, place: int) -> None:
        start, calls, problems, said, self._fences = self._before or (0, 0, 0, 0, 0)
        del self._calls[calls:], self._problems[problems:], self._said[said:]
        self._reasoning.append(self._text[start:place])
        self._before, self._ends_with_call = (), False

    def _call(self, match: re.Match[str], start: int | None = None) -> None:
        """Read the call after a mark, or at ``start``."""
        problem = None
        try:
            calls, self._place = self._family.block(self._text, match.end() if start is None else start, self._tools)
        except Unreadable as error:
            after = max(match.end(), match.start() + 1)
            # A draft in reasoning may be cut by its end.
            calls, self._place, problem = error.calls, after if self._before else max(after, error.place), error
        room = max(0, MOST_CALLS - len(self._calls) - len(self._problems))
        self._calls += calls[:room]
        self._ends_with_call = bool(calls)
        if problem or len(calls) > room:
            self._refuse(str(problem or f"a turn may hold at most {MOST_CALLS} calls."), self._place)

    def _bare(self, match: re.Match[str]) -> None:
        """Read a call of a known tool without marks around it. Other JSON is text, and so is a part of other JSON."""
        text, start, self._tries = self._text, match.start(), self._tries + 1
        is_part = text[max(0, start - 99) : start].rstrip().endswith(_WITHIN_JSON) or self._tries > MOST_CALLS
        if not is_part and (not self._is_code(start) or _FENCE.fullmatch("".join(self._said))):
            try:
                calls, place = self._family.block(text, start, self._tools)
            except Unreadable as error:
                calls, place = error.calls, start
            has_arguments = _ARGUMENTS.search(text, start, place)
            known = [call for call in calls if call.name in self._tools]
            if any(has_arguments or call.arguments.keys() <= self._tools[call.name].keys() for call in known):
                return self._call(match, start)
        self._said.append(match.group())

    def _stray(self, match: re.Match[str]) -> None:
        """Refuse a mark that follows no call that can be read; after a call, one of its values held such marks."""
        if self._is_code(match.start()):
            self._said.append(match.group())
            return
        if self._ends_with_call:
            self._calls.pop()
        self._refuse(f"{match.group()} does not belong to a call that can be read.", match.start())

    def _is_code(self, place: int) -> bool:
        return self._text[max(0, place - 1) : place] == "`" or self._fences % 2 == 1

    def _refuse(self, why: str, place: int) -> None:
        """Note a call that cannot be read, and go to the next mark that can follow it."""
        self._problems.append(why)
        self._ends_with_call = False
        if len(self._calls) + len(self._problems) > MOST_CALLS:
            found = self._text.find(self._family.thinking[1], place)
            place = found if found >= 0 else len(self._text)
        while (mark := self._family.marks.search(self._text, place)) and mark.lastgroup in ("inner", "think", "bare"):
            place = mark.end()
        self._place = len(self._text) if not mark else mark.end() if mark.lastgroup == "closing" else mark.start()
