"""The harmony format of gpt-oss: messages with a channel, a recipient if they are calls, and separate reasoning.

The recipient stands before the channel (as the chat template writes it) or after it (as the models do).
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
    arguments_of,
    dumped,
    read_json,
)

_CALL = "<|call|>"
_MESSAGE = re.compile(r"(.*?)(?:(<\|(?:end|call|return|start)\|>)|\Z)", re.DOTALL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=(functions\.)?([^\s<]{1,200})")


def _parse(text: str, schemas: Schemas) -> Parsed:
    parsed = Parsed([], [], "", "")
    said: dict[bool, list[str]] = {False: [], True: []}
    for message, mark in _MESSAGE.findall(text):
        header, found, body = message.partition("<|message|>")
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header, 0, 1000)
        is_reasoning = bool(channel and channel[1] == "analysis")
        is_call = recipient and (found or channel or recipient[1])
        if is_reasoning or not is_call:
            said[is_reasoning].append(body if found or channel else header)
        if len(parsed.calls) + len(parsed.problems) >= MOST_CALLS:
            continue
        try:
            if mark == _CALL and (is_reasoning or not is_call):
                raise Unreadable("a call is in the commentary channel, and names its tool: to=functions.NAME.")
            if recipient and is_call and not is_reasoning:
                parsed.calls.append(Call(recipient[2], _arguments(body, bool(found), mark == _CALL)))
        except Unreadable as problem:
            parsed.problems.append(str(problem))
    return Parsed(parsed.calls, parsed.problems, "\n".join(said[False]).strip(), "\n".join(said[True]).strip())


def _arguments(body: str, has_message: bool, ended: bool) -> dict[str, Any]:
    if not has_message:
        raise Unreadable("the call has no <|message|>.")
    if ended and not body.strip():
        return {}
    value, end = read_json(body, 0)
    if body[end:].strip():
        raise Unreadable("the call goes on after its JSON object.")
    return arguments_of(value)


def _write(name: str, arguments: dict[str, Any]) -> str:
    return f" to=functions.{name}<|channel|>commentary json<|message|>{dumped(arguments)}{_CALL}"


GPT_OSS = CallFormat("gpt-oss", _parse, _write, stop_tokens=(_CALL,))
