"""Weights straight from the files of a checkpoint: every rank reads the rows that it holds, and no others.

Were one rank to read a 72B model for all, it would need 291 GB of host memory, and every device would wait for minutes.
safetensors files are mapped into memory, so that a rank copies its own rows out of them. Which tensors of the files
make a weight is known to transformers alone, so its rules are asked: most rename, some stack experts that have a file
entry each. A rule that does more makes one weight at a time, whole, of which the rank keeps its rows. Left out: other
files than safetensors, quantised weights, and files that lack a weight (`NotSliceable`).
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils import cached_file


class NotSliceable(Exception):
    """Why ranks cannot read slices of a checkpoint; transformers can read it whole."""


class SlicedCheckpoint:
    """The weights of a folder or hub name under the names that ``plain``, an empty model on the meta device, has.

    Raises NotSliceable.
    """

    def __init__(self, path: str, plain: PreTrainedModel) -> None:
        self._plain = plain
        if getattr(plain.config, "quantization_config", None):
            raise NotSliceable("its weights are quantised")
        self._files = _open(path)
        self._shapes = {name: tuple(weight.shape) for name, weight in plain.state_dict().items()}
        rules = get_model_conversion_mapping(plain)
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        # By name of a weight: the entries of the files that it is made of, and of each the pattern of its converter.
        self._parts: dict[str, list[tuple[str, str | None]]] = {}
        # A converter may make several weights at once; the entries stand under the first. Tied weights likewise.
        self._home: dict[str, str] = {}
        for entry in sorted(self._files, key=dot_natural_key):
            self._place(entry, renamings)
        self._check()

    def _place(self, entry: str, renamings: list[Any]) -> None:
        prefix = self._plain.base_model_prefix
        name, pattern = rename_source_key(entry, renamings, self._converters, prefix, self._shapes)
        if name not in self._shapes and entry in self._shapes:
            name, pattern = rename_source_key(entry, [], [], prefix, self._shapes)
        if name not in self._shapes:  # such as the head, where a critic has its own
            return
        self._parts.setdefault(name, []).append((entry, pattern))
        if pattern is not None:
            first, *others = self._converter(pattern).target_patterns
            self._home |= {name.replace(first, other): name for other in others}

    def _check(self) -> None:
        # Files may hold a tied weight under either name.
        for name, other in (getattr(self._plain, "all_tied_weights_keys", None) or {}).items():
            if name in self._parts and other not in self._parts:
                self._home[other] = name
        for name, _ in self._plain.named_parameters():
            home = self._home.get(name, name)
            if home not in self._parts:
                raise NotSliceable(f"its files have no {name}")
            entry, pattern = self._parts[home][0]
            try:
                # On the meta device a rule costs nothing, and shows what it makes.
                made = self._made(name, 0, sys.maxsize, self._empty) if pattern else self._empty(entry)
            except Exception as error:  # whatever a rule raises, transformers then reads the model itself
                raise NotSliceable(f"{name} is not made of {entry} as known: {error!r}") from error
            if tuple(made.shape) != self._shapes[name]:
                raise NotSliceable(f"{entry} makes {tuple(made.shape)}, and {name} is {self._shapes[name]}")

    def rows(self, name: str, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Rows ``first`` up to ``last`` of a weight; in the dtype of the files, or in ``dtype`` where it is made."""
        entry, pattern = self._parts[self._home.get(name, name)][0]
        if pattern is None:
            return self._slice(entry)[first:last]
        return self._made(name, first, last, lambda each: self._slice(each)[:].to(dtype)).to(dtype)

    def _made(self, name: str, first: int, last: int, read: Callable[[str], Tensor]) -> Tensor:
        home = self._home.get(name, name)
        parts = self._parts[home]
        converter = copy.deepcopy(self._converter(parts[0][1]))
        stacks = _stacks_rows(converter)
        if stacks and first == last:
            return torch.empty(0, *self._shapes[name][1:])
        seen: dict[str | None, int] = {}
        for entry, of in parts:
            # The n-th entry of a pattern is row n of what is stacked.
            number = seen[of] = seen.get(of, -1) + 1
            if not stacks or first <= number < last:
                converter.add_tensor(home, entry, of, read(entry))
        made = converter.convert(home, model=self._plain, config=self._plain.config)[name]
        made = made[0] if isinstance(made, list) else made
        return made if stacks else made[first:last]

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        """All buffers, on the CPU: from the files, or computed from the configuration, such as rotary frequencies."""
        for module in self._plain.modules():
            # Set when the model was built, on the meta device, where nothing is computed.
            module._is_hf_initialized = False  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        # Parameters stay on the meta device, so this costs nothing but the buffers.
        self._plain.initialize_weights()
        found = dict(self._plain.named_buffers())
        return found | {name: self._files[self._parts[name][0][0]].get_tensor(self._parts[name][0][0])
                        for name in found if name in self._parts}  # fmt: skip

    def _slice(self, entry: str) -> Any:
        return self._files[entry].get_slice(entry)

    def _empty(self, entry: str) -> Tensor:
        return torch.empty(self._slice(entry).get_shape(), device="meta")

    def _converter(self, pattern: str | None) -> Any:
        return next(each for each in self._converters if pattern in each.source_patterns)


def _stacks_rows(converter: Any) -> bool:
    """Whether row n of the result is made of the n-th entries alone: experts, each with entries of its own."""
    first, *others = converter.operations
    if type(first).__name__ != "MergeModulelist" or first.dim != 0:
        return False
    dims = {"Concatenate": ("dim",), "Transpose": ("dim0", "dim1")}
    return all(min((getattr(each, dim) for dim in dims.get(type(each).__name__, ())), default=0) > 0 for each in others)


def _open(path: str) -> dict[str, Any]:
    """By entry: the open file that holds it. Files are mapped, so open ones take address space and no memory."""
    quiet = {"_raise_exceptions_for_missing_entries": False}
    index = cached_file(path, "model.safetensors.index.json", **quiet)
    names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values())) if index else ["model.safetensors"]
    entries: dict[str, Any] = {}
    for name in names:
        if (file := cached_file(path, name, **quiet)) is None:
            raise NotSliceable(f"it has no file {name}")
        try:
            opened = safe_open(file, "pt")
        except (OSError, SafetensorError) as error:
            raise NotSliceable(f"{file}: {error}") from error
        entries |= dict.fromkeys(opened.keys(), opened)
    return entries
