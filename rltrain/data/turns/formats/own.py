"""Call formats defined by a user's function that reads the calls of a turn. The function gets arbitrary output of the
policy, so its exceptions count as unreadable calls, like all errors between two turns. Before the run, the function is
tried on plain texts. If it finds calls in them, ConfigError is raised.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from rltrain.common.errors import ConfigError
from rltrain.common.plugin import load_plugin, user_traceback
from rltrain.data.turns.formats.reading import MOST_CALLS, Call, CallFormat, Parsed, Schemas, call_of, without_end

log = logging.getLogger(__name__)

_CONTRACT = (
    'It is a function of (text, schemas) that returns a list of {"name": …, "arguments": {…}}, empty for a turn '
    "without calls; for an unreadable call it raises ValueError, whose text the model reads."
)


def own_format(key: str, name: str, schemas: Schemas) -> CallFormat:
    """Return the format of the function ``key=name``. Its optional attribute ``stop_tokens`` also ends turns.

    Raises ConfigError if it cannot be imported, or finds calls in a turn without any.
    """
    function = load_plugin(key, name)
    for text in ("", "42"):
        try:
            calls = _calls(function, text, schemas)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            why = user_traceback(error)
            raise ConfigError(f"{key}={name} cannot read the turn {text!r}:\n{why}\n{_CONTRACT}") from None
        if calls:
            raise ConfigError(f"{key}={name} found calls in the turn {text!r}. {_CONTRACT}")
    stop_tokens = getattr(function, "stop_tokens", ())
    if not isinstance(stop_tokens, tuple | list) or not all(isinstance(token, str) for token in stop_tokens):
        raise ConfigError(f"{key}={name}: its attribute stop_tokens is {stop_tokens!r}, not a list of token texts.")
    return CallFormat(name, partial(_parse, f"{key}={name}", function, set()), None, tuple(stop_tokens))


def _parse(setting: str, function: Callable[..., Any], logged: set[str], text: str, schemas: Schemas) -> Parsed:
    """Parse a turn with the function (see `CallFormat.parse`). logged: non-empty once a failure was logged."""
    text = without_end(text)
    try:
        calls = _calls(function, text, schemas)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        why = str(error) if isinstance(error, ValueError) else ""
        if not why and not logged:
            logged.add(setting)
            words = "%s failed for a turn, which counts as a call that cannot be read:\n%s"
            log.warning(words, setting, user_traceback(error))
        return Parsed([], [why or "the call cannot be read."], text, "")
    excess = [f"a turn may hold at most {MOST_CALLS} calls."] if len(calls) > MOST_CALLS else []
    return Parsed(calls[:MOST_CALLS], excess, text, "")


def _calls(function: Callable[..., Any], text: str, schemas: Schemas) -> list[Call]:
    returned = function(text, list(schemas))
    if not isinstance(returned, list):
        raise TypeError(f"it returned {type(returned).__name__}, not a list")
    return [call_of(item) for item in returned]
