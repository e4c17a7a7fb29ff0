"""The ground that all call formats share: what a turn says, its reasoning, JSON, and values without types.

A policy in training writes anything, so nothing here raises but `Unreadable`, which `scan` turns into words for the
model; and every reader goes forward only, so that the time grows with the length of the text.
"""

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

# Of one turn. A text that repeats the opening of a call is not worth reading to its end.
MOST_CALLS = 64
THINKING = ("<think>", "</think>")

Schemas = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Call:
    """A tool that a turn asks for."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default="", compare=False)
    """As the model wrote it, in the formats where it does."""


@dataclass(frozen=True)
class Parsed:
    """The content of a turn of the policy, read from its text with special tokens."""

    calls: list[Call]
    problems: list[str]
    """One per call that was begun and cannot be read: what is wrong, in words for the model."""
    text: str
    """Without calls, reasoning and the token that ends the turn."""
    reasoning: str


@dataclass(frozen=True)
class CallFormat:
    """The way in which a model family writes calls."""

    name: str
    parse: Callable[[str, Schemas], Parsed]
    """Of a turn's text with special tokens, and the JSON schemas of the tools. Never raises."""
    write: Callable[[str, dict[str, Any]], str] | None
    """A call as the family writes it; None where that is not known."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens that end a turn besides the model's eos."""


class Unreadable(ValueError):
    """A call that was begun and cannot be read. The text says what is wrong, in words for the model."""

    def __init__(self, why: str, calls: Sequence[Call] = ()) -> None:
        super().__init__(why)
        self.calls = list(calls)
        """Those of the same block that were read before it."""


Reader = Callable[[str, int], tuple[list[Call], int]]


def scan(text: str, opening: str, closing: str, read: Reader, thinking: tuple[str, str] = THINKING) -> Parsed:
    """Read a turn whose calls stand between two marks.

    read: the calls behind ``opening``, which ends at a place of the text, and the place behind them; raises Unreadable.
    What follows an unreadable call is read from the next ``closing`` on.
    """
    text = without_end(text, closing)
    begun = re.compile("|".join(map(re.escape, (opening, thinking[0]))))
    reasoning, place = _opened_by_the_prompt(text, thinking)
    calls: list[Call] = []
    problems: list[str] = []
    rest: list[str] = []
    while place < len(text):
        match = begun.search(text, place)
        if not match:
            break
        rest.append(text[place : match.start()])
        start = match.end()
        if match.group() == thinking[0]:
            end, place = _closed(text, thinking[1], start)
            reasoning.append(text[start:end])
            continue
        if len(calls) + len(problems) >= MOST_CALLS:
            problems.append(f"a turn may hold at most {MOST_CALLS} calls.")
            place = len(text)
            break
        try:
            read_calls, place = read(text, start)
            calls += read_calls
        except Unreadable as problem:
            calls += problem.calls
            problems.append(str(problem))
            _, place = _closed(text, closing, start)
    rest.append(text[place:])
    return Parsed(calls, problems, "".join(rest).strip(), "\n".join(part.strip() for part in reasoning).strip())


def spoken(text: str, thinking: tuple[str, str] = THINKING) -> tuple[str, str]:
    """What a turn without calls says, and its reasoning."""
    parsed = scan(text, thinking[0], "", lambda text, start: ([], start), thinking)
    return parsed.text, parsed.reasoning


def _closed(text: str, mark: str, place: int) -> tuple[int, int]:
    """Where the next mark begins and ends; the end of the text where there is none."""
    found = text.find(mark, place)
    return (found, found + len(mark)) if found >= 0 else (len(text), len(text))


def _opened_by_the_prompt(text: str, thinking: tuple[str, str]) -> tuple[list[str], int]:
    """Reasoning whose opening mark the generation prompt has written, and the place behind it."""
    end, start = text.find(thinking[1]), text.find(thinking[0])
    return ([text[:end]], end + len(thinking[1])) if end >= 0 and not 0 <= start < end else ([], 0)


# <|im_end|>, <｜end▁of▁sentence｜>, <turn|>, </s>, <seed:eos>, [e~[ and the like.
_END = re.compile(r"\s*(?:<[|｜][^<>\s]{1,60}[|｜]>|<\w{1,30}\|>|</s>|<(?:\w{1,30}:)?eos>|<end_of_turn>|\[e~\[)\s*\Z")


def without_end(text: str, closing: str = "") -> str:
    """A turn's text without the tokens that end it; ``closing``, which a call ends with, stays."""
    end = len(text)
    for _ in range(8):
        match = _END.search(text, max(0, end - 80), end)
        if not match or match.group().strip() == closing:
            break
        end = match.start()
    return text[:end]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def skip_space(text: str, place: int) -> int:
    """The place of the next character that is no white space."""
    match = _SPACE.match(text, place)
    return match.end() if match else place


def read_json(text: str, place: int) -> tuple[Any, int]:
    """The JSON value at a place, and the place behind it. Raises Unreadable."""
    place = skip_space(text, place)
    try:
        value, end = _DECODER.raw_decode(text, place)
        if "\\u" in text[place:end]:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise Unreadable(f"the call is not valid JSON: {error.msg} at character {error.pos - place}.") from error
    except UnicodeEncodeError as error:
        raise Unreadable("the call is not valid JSON: it holds half of a surrogate pair.") from error
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Unreadable(f"the call is not valid JSON: {reason}.") from error
    return value, end


def call_of(value: Any, keys: Sequence[str] = ("arguments",)) -> Call:
    """The call that a JSON object with a name and arguments, under one of ``keys``, is. Raises Unreadable."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise Unreadable(f"a call is a JSON object with the keys name and {keys[0]}.")
    arguments: Any = next((value[key] for key in keys if value.get(key) is not None), {})
    identity = value.get("id")
    return Call(value["name"], checked_arguments(arguments), identity if isinstance(identity, str) else "")


def checked_arguments(arguments: Any) -> dict[str, Any]:
    """Arguments, if they are an object. Raises Unreadable."""
    if not isinstance(arguments, dict):
        raise Unreadable("the arguments of a call are a JSON object.")
    return arguments


def expect(text: str, place: int, mark: str) -> int:
    """The place behind a mark, which only white space may precede. Raises Unreadable."""
    place = skip_space(text, place)
    if not text.startswith(mark, place):
        raise Unreadable(f"the call is not complete: {mark} is missing.")
    return place + len(mark)


def named(text: str, start: int, mark: str) -> tuple[str, int]:
    """The name that ends at a mark, and the place behind the mark. Raises Unreadable."""
    end = text.find(mark, start, start + 300)
    name = text[start:end].strip() if end >= 0 else ""
    if not re.fullmatch(r"[^\s<>{}\[\]\"]+", name):
        raise Unreadable(f"no name stands before {mark}.")
    return name, end + len(mark)


def dumped(value: Any) -> str:
    """JSON as the chat templates of transformers write it."""
    return json.dumps(value, ensure_ascii=False)


def properties(schemas: Schemas, tool: str) -> dict[str, Any]:
    """The schemas of the parameters of a tool, by name; empty where it is not known."""
    for schema in schemas:
        function = schema.get("function", schema)
        if isinstance(function, dict) and function.get("name") == tool:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, dict) else None
            return found if isinstance(found, dict) else {}
    return {}


def typed(value: str, schema: Any, otherwise: str = "string") -> Any:
    """A value that was written without a type, by its JSON schema; the text itself where it does not fit.

    otherwise: the type where the schema has none; "any" is JSON where the text is that.
    As in verl, ``null`` is None whatever the type, and a list or object may be written as Python writes it.
    """
    types = _types(schema) or {otherwise}
    bare = value.strip()
    if bare.lower() == "null":
        return None
    if types & {"boolean", "bool"} and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    if types & {"integer", "int", "number", "float"}:
        number = _number(bare, whole=not types & {"number", "float"})
        if number is not None:
            return number
    if types & {"array", "object", "list", "dict"} or types == {"any"}:
        return _structure(bare, value, literal=types != {"any"})
    return value


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    said = schema.get("type")
    types = {said} if isinstance(said, str) else {each for each in said if isinstance(each, str)} if said else set()
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list) else ():
            types |= _types(choice)
    return types


def _number(text: str, whole: bool) -> int | float | None:
    if not re.fullmatch(r"[+-]?\d{1,400}" if whole else r"[+-]?\d{0,400}\.?\d{0,400}([eE][+-]?\d{1,3})?", text):
        return None
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        return None
    if isinstance(number, float) and not abs(number) < float("inf"):
        return None
    return int(number) if number == int(number) else number


def _structure(bare: str, value: str, literal: bool) -> Any:
    try:
        found, end = read_json(bare, 0)
        if end == len(bare):
            return found
    except Unreadable:
        pass
    if not literal or len(bare) > 10_000:
        return value
    try:
        found = ast.literal_eval(bare)
        return json.loads(json.dumps(found, allow_nan=False)) if isinstance(found, list | dict | tuple) else value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value
