"""Mapping of checkpoint entries to the weights of a model, and the weights that are then missing.

Only transformers knows the mapping: most of its rules rename, some stack the separate entries of experts, some split.
Therefore its rules are applied to a model on the meta device, and to the names and shapes in the files' headers. This
finds missing weights, which transformers would silently initialize randomly.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from rltrain.models.weights.names import CheckpointNames

# Name suffixes of trained buffers. Other buffers are computed from the configuration.
_LEARNT = re.compile(r"(bias|scalar)$")


class KeyMapping:
    """Mapping of entries (``empty``: names and shapes) to the weights of ``plain``. Both are on the meta device."""

    def __init__(self, empty: Mapping[str, Tensor], plain: PreTrainedModel) -> None:
        self.plain = plain
        self._empty = empty
        weights = plain.state_dict(keep_vars=True)
        self.shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        rules = get_model_conversion_mapping(plain)
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self.parts: dict[str, list[tuple[str, str | None]]] = {}
        """Entries of each weight, with the pattern of their converter."""
        self.home: dict[str, str] = {}
        """For weights that are not in ``parts``: the name in ``parts`` under which their entries are. These are further
        outputs of a converter, and tied weights."""
        self.left: list[str] = []
        """Unused entries, such as the head if a critic has another one."""
        for entry in sorted(empty, key=dot_natural_key):
            self._place(entry, renamings)
        self._tie(weights)
        ignored = plain._keys_to_ignore_on_load_missing or ()
        missing = [name for name in self.shapes if self.home.get(name, name) not in self.parts]
        buffers = {name for name, _ in plain.named_buffers() if not _LEARNT.search(name)}
        self.ignored = [name for name in missing if any(re.search(pattern, name) for pattern in ignored)]
        """Weights without entries that transformers does not require."""
        self.computed = [name for name in missing if name in buffers and name not in self.ignored]
        """Buffers without entries, which are computed from the configuration."""
        again = {id(weight): name for name, weight in reversed(weights.items())}
        once = {name for name, weight in weights.items() if again[id(weight)] == name}
        self.missing = [name for name in missing if name in once and name not in {*buffers, *self.ignored}]
        """Missing weights."""
        self.total = len(once - set(self.computed))
        """Number of the model's weights. Tied ones count once."""

    def _place(self, entry: str, renamings: list[Any]) -> None:
        prefix = self.plain.base_model_prefix
        name, pattern = rename_source_key(entry, renamings, self._converters, prefix, self.shapes)
        if name not in self.shapes and entry in self.shapes:
            name, pattern = rename_source_key(entry, [], [], prefix, self.shapes)
        if name not in self.shapes:
            self.left.append(entry)
            return
        self.parts.setdefault(name, []).append((entry, pattern))
        if pattern is not None:
            first, *others = self.converter(pattern).target_patterns
            self.home |= {name.replace(first, other): name for other in others}

    def _tie(self, weights: dict[str, Tensor]) -> None:
        """Map tied weights to the name that the files contain."""
        groups: dict[int, list[str]] = {}
        for name, weight in weights.items():
            groups.setdefault(id(weight), []).append(name)
        tied = (getattr(self.plain, "all_tied_weights_keys", None) or {}).items()
        for names in [*groups.values(), *map(list, tied)]:
            present = next((name for name in names if self.home.get(name, name) in self.parts), None)
            if present is not None:
                missing = [name for name in names if self.home.get(name, name) not in self.parts]
                self.home |= dict.fromkeys(missing, self.home.get(present, present))

    def twice(self) -> list[tuple[str, str]]:
        """Return pairs of entries for the same weight, by name or by a tie of the model."""
        pairs = []
        for parts in self.parts.values():
            plain = [entry for entry, pattern in parts if pattern is None]
            pairs += [(plain[0], other) for other in plain[1:]]
        for name, other in (getattr(self.plain, "all_tied_weights_keys", None) or {}).items():
            if name in self.parts and other in self.parts:
                pairs.append((self.parts[other][0][0], self.parts[name][0][0]))
        return pairs

    def converter(self, pattern: str | None) -> Any:
        """Return the converter with this pattern."""
        return next(converter for converter in self._converters if pattern in converter.source_patterns)

    def entries(self, name: str) -> list[tuple[str, str | None]]:
        """Return the entries of a weight, with the pattern of their converter."""
        return self.parts[self.home.get(name, name)]

    def make(self, name: str, read: Callable[[str], Tensor], skip: Callable[[int], bool] = lambda _: False) -> Tensor:
        """Build a weight by its converter. skip(n): returns whether to skip the n-th entry of each pattern."""
        home, parts = self.home.get(name, name), self.entries(name)
        converter = copy.deepcopy(self.converter(parts[0][1]))
        numbers: dict[str | None, int] = {}
        for entry, pattern in parts:
            number = numbers[pattern] = numbers.get(pattern, -1) + 1
            if not skip(number):
                converter.add_tensor(home, entry, pattern, read(entry))
        weight = converter.convert(home, model=self.plain, config=self.plain.config)[name]
        return weight[0] if isinstance(weight, list) else weight

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight that is built from its entries. If shapes are unexpected, a rule may raise any
        error."""
        entry, pattern = self.entries(name)[0]
        # On the meta device, running a rule is free.
        return tuple((self.make(name, self._empty.__getitem__) if pattern else self._empty[entry]).shape)

    def in_files(self, names: Iterable[str]) -> list[str]:
        """Return the names of these weights in a checkpoint, for messages about missing weights."""
        try:
            names_in_files = CheckpointNames(self.plain)(
                {name: torch.empty(self.shapes[name], device="meta") for name in names}
            )
        except Exception:  # noqa: BLE001 - rules of hundreds of families, needed only for a name
            return list(names)
        return list(names_in_files)
