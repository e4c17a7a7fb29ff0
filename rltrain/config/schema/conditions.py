"""Syntax of conditions on the value of a key, as used in tables and at fields.

    key            it is on: not null, False, 0, "", [], {} or "disabled"
    key=a|b        it is one of these; 0 and 1 are False and True as well
    key!=a|b       it is none of these
    key<1, key>1   it is a number in this range; text never is
    a or b         one of several conditions holds

``${other.key}`` among the values is the value of another key. At the fields of the schema a key is looked up in its
section, then in the enclosing sections. In the tables of verl's keys (`config.verl`) it may contain "*", for any text.
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
        """Return whether it holds for a value of the key. lookup: returns the value of another key."""
        if not self.operator:
            return not is_off(value)
        if self.operator in "<>":
            limit = float(self.values[0])
            if not isinstance(value, int | float):  # a word, not a number: trainer.save_freq=epoch
                return False
            return value < limit if self.operator == "<" else value > limit
        values = [as_text(lookup(text[2:-1])) if text.startswith("${") else text for text in self.values]
        # Booleans are often typed as 0 and 1.
        is_among = as_text(value) in values or (value in (0, 1) and str(bool(value)) in values)
        return is_among == (self.operator == "=")


@functools.cache
def parse(text: str) -> Condition:
    """Return one condition without "or"."""
    parts = _FORM.fullmatch(text)
    assert parts, text
    return Condition(parts["key"], parts["operator"] or "", tuple((parts["values"] or "").split("|")))


def is_met(config: Config, section: str, text: str) -> bool:
    """Return whether a condition at a field in ``section`` of the schema holds."""
    conditions = map(parse, text.split(" or "))
    return any(condition.holds(get(config, _full_name(config, section, condition.key))) for condition in conditions)


def unmet(config: Config, section: str, text: str) -> str:
    """Return the values that make a condition fail, and the condition under which the key has an effect."""
    conditions = [parse(clause) for clause in text.split(" or ")]
    keys = dict.fromkeys(_full_name(config, section, condition.key) for condition in conditions)
    values = " and ".join(f"{key}={as_text(get(config, key))}" for key in keys)
    if not any(condition.operator for condition in conditions):
        return values
    return f"{values}; it has an effect with {text.replace('|', ' or ')}"


def _full_name(config: Config, section: str, name: str) -> str:
    """Return the full name of the key that ``name`` means in a section."""
    around = section
    # Sections are searched from the inside out, so that a condition can use short names in its section and still refer
    # to any key.
    while not hasattr(get(config, around), name.partition(".")[0]):
        assert around, f"{name} is not known in {section}"
        around = around.rpartition(".")[0]
    return f"{around}.{name}".lstrip(".")


def is_off(value: Any) -> bool:
    """Return whether a value turns a key off. An interpolation in a file counts as off."""
    return not value or value == "disabled" or follows(value)


def follows(value: Any) -> bool:
    """Return whether a value is an interpolation, whose value is not known yet."""
    return isinstance(value, str) and "${" in value


def as_text(value: Any) -> str:
    """Return a value as a user types it."""
    return "null" if value is None else str(value)
