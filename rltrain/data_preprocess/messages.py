"""Conversion of messages in common formats to the roles and texts of verl's schema."""

import json
from collections.abc import Mapping
from typing import Any

from rltrain.common.errors import DataError, short

# Role names of ShareGPT, LLaMA-Factory, OpenAI and others.
_ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "ipython": "tool",
}  # fmt: skip
_TEXTS = ("content", "value", "text")


def messages_of(value: Any, field: str) -> str | list[dict[str, str]]:
    """Return a text unchanged, or messages with ``role`` and ``content``. Raises DataError, which names ``field``.

    value: a text (JSON of messages counts as messages), one message, or a list of them, each with ``role`` or ``from``,
    and ``content`` or ``value``, which is a text or parts.
    """
    if isinstance(value, str):
        value = _of_json(value)
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        inside = value.get("messages") or value.get("conversations")
        value = inside if isinstance(inside, list) else [value]
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    if not isinstance(value, list) or not value:
        raise DataError(f"{field} is {_kind(value)}; it must be text, or a list of messages.")
    return [_message(message, f"{field}[{number}]") for number, message in enumerate(value)]


def _message(value: Any, field: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise DataError(f"{field} is {_kind(value)}; a message is {{'role': 'user', 'content': the text}}.")
    role = value.get("role") or value.get("from")
    text = next((value[name] for name in _TEXTS if value.get(name) is not None), None)
    if not isinstance(role, str) or role.lower() not in _ROLES:
        have = f"is {short(repr(role), 40)}" if role else f"is missing (the message has {_names(value)})"
        raise DataError(f"{field}: the role {have}; supported are {', '.join(_ROLES)}, under 'role' or 'from'.")
    if text is None or ((calls := value.get("tool_calls")) is not None and calls):
        flaw = "has tool_calls, which are not read" if text is not None else f"has no content; it has {_names(value)}"
        raise DataError(f"{field} {flaw}.")
    return {"role": _ROLES[role.lower()], "content": _text(text, field)}


def _text(content: Any, field: str) -> str:
    """Return a text, or the texts and image slots of parts, as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{field}: the content is {_kind(content)}; it must be text, or parts.")
    pieces = []
    for part in content:
        kind = part.get("type", "text" if "text" in part else None) if isinstance(part, Mapping) else None
        if isinstance(part, str) or (kind in ("text", "input_text") and isinstance(part.get("text"), str)):
            pieces.append(part if isinstance(part, str) else part["text"])
        elif kind == "image":
            pieces.append("<image>")
        else:
            part_kind = f"a part of type {short(repr(kind), 40)}" if isinstance(part, Mapping) else _kind(part)
            raise DataError(
                f"{field}: the content holds {part_kind}; supported are text and image (with --image-column)."
            )
    return "".join(pieces)


def _of_json(text: str) -> Any:
    """Parse messages that are stored as JSON text, as in csv cells. Other text is returned unchanged."""
    if not text.lstrip().startswith(("[{", '{"role"', '{"from"')):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    messages = value if isinstance(value, list) else [value]
    are_messages = all(isinstance(message, dict) and {"role", "from"} & message.keys() for message in messages)
    return value if are_messages else text


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {short(repr(value), 60)}"


def _names(value: Mapping[str, Any]) -> str:
    return short(", ".join(map(str, value)) or "nothing")
