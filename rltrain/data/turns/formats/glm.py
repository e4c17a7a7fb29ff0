"""GLM 4.5 to 4.7: a name, then keys and values in tags; what is no text is JSON."""

import re
from typing import Any

from rltrain.data.turns.formats.reading import (
    Call,
    CallFormat,
    Parsed,
    Schemas,
    Unreadable,
    dumped,
    expect,
    named,
    properties,
    scan,
    typed,
)

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_KEY, _VALUE = "<arg_key>", "<arg_value>"
_END_OF_VALUE = re.compile(r"</arg_value>(?=\s{0,99}(?:<arg_key>|</tool_call>))")


def _parse(text: str, schemas: Schemas) -> Parsed:
    def read(text: str, start: int) -> tuple[list[Call], int]:
        key, end = text.find(_KEY, start), text.find(_CLOSING, start)
        if end < 0:
            raise Unreadable(f"the call does not end with {_CLOSING}.")
        mark = _KEY if 0 <= key < end else _CLOSING
        name, place = named(text, start, mark)
        known = properties(schemas, name)
        arguments: dict[str, Any] = {}
        while mark == _KEY:
            key_name, place = named(text, place, "</arg_key>")
            place = expect(text, place, _VALUE)
            stop = _END_OF_VALUE.search(text, place)
            if not stop:
                raise Unreadable(f"the value of {key_name} does not end with </arg_value>.")
            arguments[key_name] = typed(text[place : stop.start()], known.get(key_name), "any")
            try:
                place = expect(text, stop.end(), _KEY)
            except Unreadable:
                place, mark = expect(text, stop.end(), _CLOSING), _CLOSING
        return [Call(name, arguments)], place

    return scan(text, _OPENING, _CLOSING, read)


def _write(name: str, arguments: dict[str, Any]) -> str:
    values = {key: value if isinstance(value, str) else dumped(value) for key, value in arguments.items()}
    pairs = "".join(f"{_KEY}{key}</arg_key>\n{_VALUE}{value}</arg_value>\n" for key, value in values.items())
    return f"{_OPENING}{name}\n{pairs}{_CLOSING}"


GLM = CallFormat("glm", _parse, _write, stop_tokens=("<|observation|>",))
