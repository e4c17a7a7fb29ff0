"""The one small language of the tables: a condition on the value of a key, in a line that reads as one types it.

    key            it is on: not null, False, 0, "", [], {} or "disabled"
    key=a|b        it is one of these; 0 and 1 are False and True as well
    key!=a|b       it is none of these
    key<1, key>1   a number, which no word is
    a or b         of several conditions one holds

``${other.key}`` among the values is the value of another key. At the fields of the schema a key is looked up in its
own section, then in the sections around it. In the tables of verl's keys (`config.verl`) it may hold "*", for any text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rltrain.config.schema import Config
from rltrain.config.schema.keys import get

_FORM = re.compile(r"(?P<key>[^=!<>]+)(?:(?P<operator>!=|=|<|>)(?P<values>.+))?")


@dataclass(frozen=True)
class Condition:
    """A condition on one key."""

    key: str
    operator: str = ""
    values: tuple[str, ...] = ()

    def holds(self, value: Any, lookup: Callable[[str], Any] = lambda key: None) -> bool:
        """Whether it holds for a value of the key. lookup: the value of another key."""
        if not self.operator:
            return not is_off(value)
        if self.operator in "<>":
            limit = float(self.values[0])
            if not isinstance(value, int | float):  # a word where a number may stand: trainer.save_freq=epoch
                return False
            return value < limit if self.operator == "<" else value > limit
        values = [as_text(lookup(text[2:-1])) if text.startswith("${") else text for text in self.values]
        # Switches are often typed as 0 and 1.
        is_among = as_text(value) in values or (value in (0, 1) and str(bool(value)) in values)
        return is_among == (self.operator == "=")


@functools.cache
def parse(text: str) -> Condition:
    """One condition without "or"."""
    parts = _FORM.fullmatch(text)
    assert parts, text
    return Condition(parts["key"], parts["operator"] or "", tuple((parts["values"] or "").split("|")))


def is_met(config: Config, section: str, text: str) -> bool:
    """Whether a condition holds that stands in ``section`` of the schema."""
    conditions = map(parse, text.split(" or "))
    return any(condition.holds(get(config, _full_name(config, section, condition.key))) for condition in conditions)


def unmet(config: Config, section: str, text: str) -> str:
    """The values on which a condition failed, and where the key would count."""
    conditions = [parse(clause) for clause in text.split(" or ")]
    keys = dict.fromkeys(_full_name(config, section, condition.key) for condition in conditions)
    values = " and ".join(f"{key}={as_text(get(config, key))}" for key in keys)
    if not any(condition.operator for condition in conditions):
        return values
    return f"{values}; it counts with {text.replace('|', ' or ')}"


def _full_name(config: Config, section: str, name: str) -> str:
    """The whole name of the key that ``name`` means in a section."""
    around = section
    # Outwards, so that a condition reads as in its own section and may still name a key anywhere.
    while not hasattr(get(config, around), name.partition(".")[0]):
        assert around, f"{name} is not known in {section}"
        around = around.rpartition(".")[0]
    return f"{around}.{name}".lstrip(".")


def is_off(value: Any) -> bool:
    """Whether a value says that a thing is not wanted. One that follows another key of a file says nothing."""
    return not value or value == "disabled" or follows(value)


def follows(value: Any) -> bool:
    """Whether a value is that of another key, which is not known yet."""
    return isinstance(value, str) and "${" in value


def as_text(value: Any) -> str:
    """A value as a user types it."""
    return "null" if value is None else str(value)
