"""Selection of a run's call format: by name, by the user's function, or from the chat template."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from rltrain.common.errors import ConfigError, DataError
from rltrain.common.plugin import is_plugin
from rltrain.data.chat import ChatEncoder, Message
from rltrain.data.turns.calls import FORMATS, Call, CallFormat
from rltrain.data.turns.formats.families import NO_CALLS
from rltrain.data.turns.formats.own import own_format
from rltrain.data.turns.turn_delta import ASK, shared

_KEY = "actor_rollout_ref.rollout.multi_turn.format"


def format_of(name: str, encoder: ChatEncoder) -> CallFormat:
    """Return the format of the model's calls (``multi_turn.format``). Raises ConfigError if it cannot be determined."""
    if name == "auto" and not encoder.tools:
        return NO_CALLS
    if is_plugin(name):
        return own_format(_KEY, name, encoder.tools)
    call_format = detect_format(encoder, encoder.tools) if name == "auto" else FORMATS.get(name)
    if call_format is None:
        why = "the chat template writes calls in no known format" if name == "auto" else "no format has this name"
        raise ConfigError(
            f"{_KEY}={name}: {why}. Known formats are {', '.join(FORMATS)}, or your own function: FILE.py:NAME. A "
            "template with tools can be set by actor_rollout_ref.model.custom_chat_template."
        )
    return call_format


def detect_format(encoder: ChatEncoder, schemas: Sequence[dict[str, Any]]) -> CallFormat | None:
    """Return the format in which the chat template writes a call, or None if no format can parse it."""
    names = [schema.get("function", schema).get("name") for schema in schemas]
    known = Call(str(next(iter(names), None) or "look_up"), {"text": "some words"})
    texts = (known.arguments, '{"text": "some words"}')
    probe = [*schemas, {"name": known.name, "parameters": {"properties": {"text": {"type": "string"}}}}]
    # In some formats only the id contains the name.
    for arguments, identity in product(texts, ("call00000", f"functions.{known.name}:0")):
        function = {"name": known.name, "arguments": arguments}
        turn: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": identity, "type": "function", "function": function}],
        }
        try:
            before = encoder.render([ASK], tools=schemas)
            bare = encoder.render([ASK], answered=True, tools=schemas)
            text = encoder.render([ASK, turn], answered=True, tools=schemas)
            answer = encoder.render([ASK, {"role": "assistant", "content": "Yes."}], answered=True, tools=schemas)
        except DataError:
            continue
        for start in (shared(before, text), shared(bare, text)):
            for call_format in FORMATS.values():
                parsed = call_format.parse(text[start:], probe)
                # The rest must be text that the template writes in any turn, such as the role. If it is not, it
                # contains marks of another format.
                rest = call_format.parse(answer[start:], probe).text.replace("Yes.", "").strip()
                if parsed.calls == [known] and not parsed.problems and parsed.text == rest:
                    return call_format
    return None
