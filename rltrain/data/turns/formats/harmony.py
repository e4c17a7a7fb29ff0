"""Harmony format of gpt-oss: messages with a channel, a recipient for calls, and separate reasoning.

The recipient is before the channel (in the chat template) or after it (in the models' output).
"""

import re
from typing import Any

from rltrain.data.turns.formats import reading
from rltrain.data.turns.formats.reading import MOST_CALLS, Call, CallFormat, Parsed, Schemas, Unreadable

_MESSAGE = re.compile(r"(.*?)(?:(<\|(?:end|call|return|start)\|>)|\Z)", re.DOTALL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=(functions\.)?([^\s<]{1,200})")


def _parse(text: str, schemas: Schemas) -> Parsed:
    parsed = Parsed([], [], "", "")
    texts: dict[bool, list[str]] = {False: [], True: []}
    for message, mark in _MESSAGE.findall(text):
        header, has_body, body = message.partition("<|message|>")
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header, 0, 1000)
        is_reasoning = bool(channel and channel[1] == "analysis")
        is_call = bool(recipient and (has_body or channel or recipient[1]) and not is_reasoning)
        if not is_call:
            texts[is_reasoning].append(body if has_body or channel else header)
        if (is_call or mark == "<|call|>") and len(parsed.calls) + len(parsed.problems) < MOST_CALLS:
            try:
                if not recipient or not is_call or not has_body:
                    raise Unreadable(
                        "a call must be in the commentary channel, with to=functions.NAME and a <|message|>."
                    )
                value, end = reading.read_json(body, 0) if body.strip() or mark != "<|call|>" else ({}, len(body))
                if body[end:].strip():
                    raise Unreadable("there is text after the JSON object of the call.")
                parsed.calls.append(Call(recipient[2], reading.arguments_of(value)))
            except Unreadable as problem:
                parsed.problems.append(str(problem))
    return Parsed(parsed.calls, parsed.problems, "\n".join(texts[False]).strip(), "\n".join(texts[True]).strip())


def _write(name: str, arguments: dict[str, Any]) -> str:
    return f" to=functions.{name}<|channel|>commentary json<|message|>{reading.dumped(arguments)}<|call|>"


GPT_OSS = CallFormat("gpt-oss", _parse, _write, stop_tokens=("<|call|>",))
