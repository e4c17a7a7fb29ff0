"""Parser of all formats whose calls are between marks.

Calls inside reasoning are ignored, and marks inside arguments do not count. Therefore the marks are visited in order,
and each readable call is skipped as a whole.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from rltrain.data.turns.formats import reading
from rltrain.data.turns.formats.reading import MOST_CALLS, Call, CallFormat, Parsed, Schemas, Tools, Unreadable

_MARK = re.compile(r"<[^<>]+>|\[[A-Z_]+\]")
_CODE = re.compile(r"```[\s\S]*?```|`[^`\n]*`")
_NAME = re.compile(r"""name["']?\s{0,99}:?\s{0,99}["']([^"'\s]{1,200})["']""")
_ARGUMENTS = re.compile(r"""(?:arguments|parameters)["']?\s{0,99}:?\s{0,99}[{"']""")


def any_of(marks: Iterable[str]) -> str:
    """Return a regular expression for any of the marks, with flexible white space."""
    escaped = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    # DeepSeek V3.2 and V4.1 have different names for V4's block, and a space after the token.
    escaped = escaped.replace("｜DSML｜tool_calls", "｜DSML｜(?:tool_|function_)?calls").replace(
        "｜DSML｜", "｜DSML｜ ?"
    )
    return re.sub(r"(?:\\\s)+", r"\\s{0,99}", escaped)


class Notation(Protocol):
    """Notation of calls within a block."""

    def marks(self) -> dict[str, str]:
        """Return regular expressions for the marks of the notation, of three kinds.

        "start": beginning of a call without the block's opening mark; "inner": marks that occur only within calls;
        "bare": beginning of JSON, which is a call if it names a known tool.
        """

    def read(self, text: str, place: int, tools: Tools) -> tuple[list[Call], int]:
        """Return the calls at an index, and the index after them. Raises Unreadable."""

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return a call without the marks around it."""


@dataclass(frozen=True)
class Family:
    """Call format of a model family."""

    name: str
    notation: Notation
    written: str = "{}"
    """Text around a call, with {} in place of the call."""
    optional: str = ""
    """Optional mark before calls."""
    thinking: str = "<think>{}</think>"
    stop: tuple[str, ...] = ()
    """Tokens that end a turn, in addition to the model's eos."""

    @property
    def format(self) -> CallFormat:
        """The format with this family's parser."""
        return CallFormat(self.name, self.parse, self.write, self.stop)

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        """Return the content of a turn."""
        closing = _MARK.findall(self.written.split("{}")[1])
        return _Turn(self, reading.without_end(text, closing), reading.tools_of(schemas)).parsed()

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return a call as the family writes it."""
        return self.written.replace("{}", self.notation.write(name, arguments))

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """Regular expression for any mark, with one group per kind."""
        before, after = (any_of(_MARK.findall(side)) for side in f"{self.optional}{self.written}".split("{}"))
        kinds = {
            kind: any_of([mark]) for kind, mark in zip(("think", "thought"), self.thinking.split("{}"), strict=True)
        }
        kinds |= {"opening": before, "closing": after, **self.notation.marks()}
        begun = "|".join(filter(None, (before, kinds.get("start")))) or "(?!)"
        # Markdown code is text, unless a call starts in it.
        kinds["code"] = rf"```(?:(?!```|{begun})[\s\S])*```|`(?:(?!{begun})[^`\n])*`"
        for kind in ("opening", "closing"):
            kinds[kind] = kinds[kind] and rf"(?:{kinds[kind]})(?:\s*(?:{kinds[kind]}))*"
        return re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in kinds.items() if pattern))

    def block(self, text: str, place: int, tools: Tools) -> tuple[list[Call], int]:
        """Return the calls after an opening mark, and the index after them and their closing marks. Raises Unreadable.

        Closing marks may be missing before the end of the text, another mark, or text.
        """
        calls, place = self.notation.read(text, place, tools)
        after = reading.skip_space(text, place)
        rest = text[after : after + 100]
        mark = self.marks.match(text, after)
        if mark and mark.lastgroup == "closing":
            return calls, mark.end()
        if rest and not rest[0].isalpha() and (not mark or mark.lastgroup == "code"):
            raise Unreadable(f"there is text after the end of the call: {rest[:20]!r}.", after)
        return calls, place


class _Turn:
    """State of the parser of a turn, up to an index."""

    def __init__(self, family: Family, text: str, tools: Tools) -> None:
        self._family, self._text, self._tools = family, text, tools
        self._place = self._tries = 0
        self._calls: list[Call] = []
        self._problems: list[str] = []
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._before: tuple[int, ...] = ()
        """State of open reasoning: its start, and the numbers of calls, problems and texts before it."""
        self._ends_with_call = False

    def parsed(self) -> Parsed:
        kinds = {"think": self._think, "thought": self._thought, "bare": self._bare, "code": self._text_of}
        kinds |= {"closing": self._stray, "inner": self._stray}
        while match := self._family.marks.search(self._text, self._place):
            self._texts.append(self._text[self._place : match.start()])
            self._place = match.end()
            kinds.get(match.lastgroup or "", self._call)(match)
        self._texts.append(self._text[self._place :])
        if self._before:
            has_calls = len(self._calls) > self._before[1]
            self._end_reasoning(len(self._text))
            why = (
                f"the reasoning does not end with {self._family.thinking.split('{}')[1]}: the calls in it are not run."
            )
            self._problems += [why] if has_calls else []
        text = "".join(self._texts).strip()
        if "bare" in self._family.notation.marks() and self._looks_like_call(text):
            text, self._problems = "", [*self._problems, "JSON looks like a call and cannot be read as one."]
        return Parsed(self._calls, self._problems, text, "\n".join(map(str.strip, self._reasoning)).strip())

    def _looks_like_call(self, text: str) -> bool:
        """Return whether JSON outside of Markdown code names a tool or has arguments."""
        text = text if text.startswith("```") else _CODE.sub("", text)
        names_tool = self._family.written == "{}" or any(name in text for name in self._tools)
        return any(name in self._tools for name in _NAME.findall(text)) or bool(names_tool and _ARGUMENTS.search(text))

    def _text_of(self, match: re.Match[str]) -> None:
        self._texts.append(match.group())

    def _think(self, match: re.Match[str]) -> None:
        self._before = self._before or (match.end(), len(self._calls), len(self._problems), len(self._texts))

    def _thought(self, match: re.Match[str]) -> None:
        if self._reasoning and not self._before:
            self._texts.append(match.group())
        else:  # the prompt may have opened the reasoning
            self._end_reasoning(match.start())

    def _end_reasoning(self, place: int) -> None:
        start, calls, problems, texts = self._before or (0, 0, 0, 0)
        del self._calls[calls:], self._problems[problems:], self._texts[texts:]
        self._reasoning.append(self._text[start:place])
        self._before, self._ends_with_call = (), False

    def _call(self, match: re.Match[str], start: int | None = None) -> None:
        """Read the call after a mark, or at ``start``."""
        why = ""
        try:
            calls, self._place = self._family.block(self._text, match.end() if start is None else start, self._tools)
        except Unreadable as problem:
            after = max(match.end(), match.start() + 1)
            # Inside reasoning, skip only the mark, because the reasoning may end in the middle of a drafted call.
            self._place = after if self._before else max(after, problem.place)
            calls, why = [], str(problem)
        room = max(0, MOST_CALLS - len(self._calls) - len(self._problems))
        self._calls += calls[:room]
        self._ends_with_call = bool(calls)
        if why or len(calls) > room:
            self._refuse(why or f"a turn may hold at most {MOST_CALLS} calls.", self._place)

    def _bare(self, match: re.Match[str]) -> None:
        """Read JSON without marks: a call of a known tool, or text."""
        text, start, self._tries = self._text, match.start(), self._tries + 1
        calls: list[Call] = []
        try:
            if self._tries <= 4 * MOST_CALLS:
                _, self._place = reading.read_json(text, start)
                calls, _ = self._family.block(text, start, self._tools)
        except Unreadable as problem:
            if problem.place == len(text) and self._looks_like_call(text[start:]):  # the call was cut off
                return self._refuse(str(problem), problem.place)
        has_arguments = _ARGUMENTS.search(text, start, self._place)
        known = [call for call in calls if call.name in self._tools]
        if any(has_arguments or call.arguments.keys() <= self._tools[call.name].keys() for call in known):
            self._call(match, start)
        else:
            self._texts.append(text[start : self._place])

    def _stray(self, match: re.Match[str]) -> None:
        """Report a mark that follows no readable call. After a call, it belongs to one of the call's values."""
        if self._ends_with_call:
            self._calls.pop()
        self._refuse(f"{match.group()} does not belong to a call that can be read.", match.start())

    def _refuse(self, why: str, place: int) -> None:
        """Record an unreadable call, and skip to the next mark that can follow it."""
        self._problems.append(why)
        self._ends_with_call = False
        if len(self._calls) + len(self._problems) > MOST_CALLS:
            # Skip to the end of the reasoning. If there is none, the modulo turns the result -1 into the end of the
            # text.
            place = self._text.find(self._family.thinking.split("{}")[1], place) % (len(self._text) + 1)
        skipped = ("inner", "think", "bare", "code")
        while (mark := self._family.marks.search(self._text, place)) and mark.lastgroup in skipped:
            place = mark.end()
        self._place = len(self._text) if not mark else mark.end() if mark.lastgroup == "closing" else mark.start()
