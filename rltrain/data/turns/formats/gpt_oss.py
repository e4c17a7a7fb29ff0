"""The harmony format of gpt-oss: messages with a channel, a recipient where it is a call, and reasoning of their own.

The recipient stands before the channel (as the chat template writes it) or behind it (as the models do).
"""

import re
from typing import Any

from rltrain.data.turns.formats.reading import (
    MOST_CALLS,
    Call,
    CallFormat,
    Parsed,
    Schemas,
    Unreadable,
    checked_arguments,
    dumped,
    read_json,
)

_START, _CHANNEL, _MESSAGE, _CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]{1,200})")
_WORD = re.compile(r"\s*(\w*)")


def _parse(text: str, schemas: Schemas) -> Parsed:
    calls: list[Call] = []
    problems: list[str] = []
    said: list[str] = []
    reasoning: list[str] = []
    place = 0
    while place < len(text):
        end = _ENDS.search(text, place)
        message, mark = text[place : end.start() if end else len(text)], end.group() if end else ""
        place = end.end() if end else len(text)
        header, found, body = message.partition(_MESSAGE)
        word = _WORD.match(header.partition(_CHANNEL)[2])
        channel = word.group(1) if word else ""
        recipient = _RECIPIENT.search(header, 0, 1000)
        if not recipient:
            (reasoning if channel == "analysis" else said).append(body if found or channel else header)
        elif channel == "analysis":
            reasoning.append(body)
            if mark == _CALL:
                problems.append("a call belongs to the commentary channel, and stood in analysis.")
        elif len(calls) + len(problems) < MOST_CALLS:
            try:
                calls.append(_read(recipient.group(1), body, bool(found), mark == _CALL))
            except Unreadable as problem:
                problems.append(str(problem))
    return Parsed(calls, problems, "\n".join(said).strip(), "\n".join(reasoning).strip())


def _read(name: str, body: str, has_message: bool, ended: bool) -> Call:
    if not has_message:
        raise Unreadable(f"the call has no {_MESSAGE}.")
    if ended and not body.strip():
        return Call(name, {})
    value, end = read_json(body, 0)
    if body[end:].strip():
        raise Unreadable("the call goes on behind its JSON object.")
    return Call(name, checked_arguments(value))


def _write(name: str, arguments: dict[str, Any]) -> str:
    return f" to=functions.{name}{_CHANNEL}commentary json{_MESSAGE}{dumped(arguments)}{_CALL}"


GPT_OSS = CallFormat("gpt-oss", _parse, _write, stop_tokens=(_CALL,))
