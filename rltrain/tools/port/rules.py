"""Conversion of keys of verl's other training backends that have the same meaning under FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rltrain.config.verl import hydra


def parsed_or_text(text: str) -> Any:
    """Return the value of a text on the command line, or the text if it cannot be parsed."""
    try:
        return hydra.parsed(text)
    except (YAMLError, OmegaConfBaseException):
        return text


@dataclass(frozen=True)
class Rule:
    """The conversion of a key."""

    target: str = ""
    """rltrain's key, with {role}, {fsdp} and {model} for the paths of the key's model; empty if nothing need be set."""
    why: str = ""
    turn: Callable[[str], str | None] = str
    """Converts the value as typed; returns None if it cannot be carried over."""
    is_unknown: bool = False
    """True for a key whose effect is unknown."""


def _only(*allowed: str) -> Callable[[str], str | None]:
    return lambda value: value if value in (*allowed, "null", "") else None


def _modules(value: str) -> str | None:
    """Convert Megatron's names of a layer's matrices to Hugging Face's."""
    names = {"linear_qkv": "q_proj,k_proj,v_proj", "linear_proj": "o_proj", "linear_fc1": "gate_proj,up_proj"}
    names["linear_fc2"] = "down_proj"
    modules = parsed_or_text(value)
    modules = modules if isinstance(modules, list) else [modules]
    if set(names) <= set(modules):
        return "all-linear"
    return f"[{','.join(names.get(str(name), str(name)) for name in modules)}]"


SPREAD = (
    "FSDP2 shards weights, gradients and optimizer over all devices instead of PP; a device computes "
    "whole layers, so where memory runs out raise ulysses_sequence_parallel_size or lower *_max_token_len_per_gpu"
)
_SENTENCES = {"@spread": SPREAD, "@same": "it changes how the backend computes, not what"}
_TURNS: dict[str, Callable[[str], str | None]] = {
    "recompute": lambda value: str(value not in ("null", "None", "")),
    "offloaded": lambda value: str(value.lower() not in ("false", "0", "0.0", "null")),
    "modules": _modules,
    "": str,
}


@cache
def _rules() -> tuple[dict[str, Rule], dict[str, Rule]]:
    """Return the conversions by key of verl's other backends, of which the first that matches decides, and the rules of
    keys without an effect on results, by the last part of a key that has no other rule.

    ``rules.tsv`` has the fields of `Rule`. The turn ``only A B`` converts these values, and ``only`` none.
    """
    rules: dict[str, Rule] = {}
    harmless: dict[str, Rule] = {}
    for line in Path(__file__).with_name("rules.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        key, target, why, turn, *_ = *line.split("\t"), "", "", ""
        convert = _only(*turn.split()[1:]) if turn.startswith("only") else _TURNS.get(turn, str)
        (harmless if turn == "harmless" else rules)[key] = Rule(
            target, _SENTENCES.get(why, why), convert, turn == "only"
        )
    return rules, harmless


def rule_of(key: str) -> Rule | None:
    """Return the conversion of a verl key, or None without a rule."""
    rules, harmless = _rules()
    rule = _first(rules, key)
    return _first(harmless, key.rpartition(".")[2]) or rule if rule and rule.is_unknown else rule


def _first(rules: dict[str, Rule], key: str) -> Rule | None:
    return next((rule for pattern, rule in rules.items() if fnmatchcase(key, pattern)), None)
