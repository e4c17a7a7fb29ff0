"""Selection of layers by a list of names or a pattern, for adapters (`models.weights.lora`)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from rltrain.common.errors import ConfigError


def matching(key: str, wanted: Any, linear: list[str], *, required: bool = True) -> set[str]:
    """Return the layers that a list of names (or ends of names) or a pattern selects.

    Raises ConfigError if there is no match and one is ``required``.
    """
    chosen = set()
    for wish in [wanted] if isinstance(wanted, str) else wanted:
        matches = {name for name in linear if f".{name}".endswith(f".{wish}")}
        if not matches and isinstance(wanted, str):
            try:
                matches = {name for name in linear if re.fullmatch(wanted, name)}
            except re.error as error:
                raise ConfigError(f"{key}={wanted} is neither a name nor a pattern: {error}") from error
        if not matches and required:
            leaves = sorted({name.rpartition(".")[2] for name in linear})
            near = difflib.get_close_matches(wish, [*leaves, *linear], n=3, cutoff=0.5)
            hint = f"Did you mean {', '.join(near)}?" if near else f"There are {', '.join(leaves[:20])}."
            raise ConfigError(f"{key}={wanted}: no linear layer below the head matches '{wish}'. {hint}")
        chosen |= matches
    return chosen


def in_short(names: list[str], model: nn.Module) -> list[str]:
    """Return only the last parts of the names if these select exactly the same layers, else the full names."""
    leaves = {name.rpartition(".")[2] for name in names}
    same = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in leaves} == set(names)
    return sorted(leaves) if same else names


def experts_among(weights: Iterable[str], wanted: Any) -> list[str]:
    """Return the expert ``weights`` that a name in ``wanted`` selects, such as experts.down_proj or experts.

    A name without ``experts``, such as down_proj, selects linear layers instead.
    """
    return [weight for weight in weights if any(is_of(wish, weight) for wish in names_of(wanted))]


def names_of(wanted: Any) -> list[str]:
    """Return a list of one or several names."""
    return [wanted] if isinstance(wanted, str) else list(wanted)


def is_of(wish: str, weight: str) -> bool:
    """Return whether ``wish`` names this expert weight."""
    experts = weight.rpartition(".")[0]
    return "experts" in wish.split(".") and any(f".{name}".endswith(f".{wish}") for name in (weight, experts))
