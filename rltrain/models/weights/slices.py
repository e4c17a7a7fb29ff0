"""Weights read from checkpoint files by slices: every rank reads only its rows.

If one rank read a 72B model for all, it would need 291 GB of host memory, and every device would wait for minutes.
safetensors files are memory-mapped, so a rank copies only its rows. `KeyMapping` determines the entries of a weight.
For rules other than renaming and stacking, weights are built completely, one at a time, and each rank keeps its rows.
Not supported: files other than safetensors, and quantised weights (`NotSliceable`).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rltrain.models.files.entries import NoEntries, read_entries
from rltrain.models.weights.key_mapping import KeyMapping
from rltrain.models.weights.missing_keys import refuse, unknown_rule


class NotSliceable(Exception):
    """Reason why ranks cannot read slices of a checkpoint, although transformers can load it."""


class SlicedCheckpoint:
    """Weights of a folder or hub name under the names of ``plain``, an empty model on the meta device.

    key: config key, for messages. Raises NotSliceable, and ConfigError for files that lack a weight.
    """

    def __init__(self, path: str, plain: PreTrainedModel, key: str = "model.path") -> None:
        if getattr(plain.config, "quantization_config", None):
            raise NotSliceable("its weights are quantised")
        try:
            self._entries = read_entries(path, fetch=True)
        except NoEntries as error:
            raise NotSliceable(str(error)) from error
        self._key_mapping = KeyMapping(self._entries.empty, plain)
        refuse(key, self._entries, self._key_mapping)
        if len(self._entries.opened) < len(self._entries.empty):
            raise NotSliceable("its files are not safetensors")
        if self._key_mapping.ignored:
            raise NotSliceable(f"its files have no {self._key_mapping.ignored[0]}")
        if unknown := unknown_rule(self._key_mapping):
            raise NotSliceable(unknown)

    def rows(self, name: str, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Return rows [first, last) of a weight, in the dtype of its file, or in ``dtype`` if a converter builds it."""
        entry, pattern = self._key_mapping.entries(name)[0]
        if pattern is None:
            part: Tensor = self._slice(entry)[first:last]
            return part
        stacks = _stacks_rows(self._key_mapping.converter(pattern))
        if stacks and first == last:
            return torch.empty(0, *self._key_mapping.shapes[name][1:])
        # The n-th entry that matches a pattern is row n of the stack.
        weight = self._key_mapping.make(
            name, lambda piece: self._slice(piece)[:].to(dtype), lambda number: stacks and not first <= number < last
        )
        return (weight if stacks else weight[first:last]).to(dtype)

    def files(self, name: str) -> list[Path]:
        """Return the files of a weight."""
        entries = (entry for entry, _ in self._key_mapping.entries(name))
        return list(dict.fromkeys(self._entries.files[entry][-1] for entry in entries))

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        """All buffers, on the CPU: from the files, or computed from the configuration, such as rotary frequencies."""
        plain, parts = self._key_mapping.plain, self._key_mapping.parts
        for module in plain.modules():
            # The flag was set when the model was built on the meta device, although no buffer was computed then.
            module._is_hf_initialized = False  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        for parameter in plain.parameters():  # on the meta device, where random initialization would waste time
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        plain.initialize_weights()
        buffers = dict(plain.named_buffers())
        return buffers | {name: self._entries.read(parts[name][0][0]) for name in buffers if name in parts}

    def _slice(self, entry: str) -> Any:
        return self._entries.opened[entry].get_slice(entry)


def _stacks_rows(converter: Any) -> bool:
    """Return whether row n of the result depends only on the n-th entries: experts with separate entries."""
    first, *others = converter.operations
    if type(first).__name__ != "MergeModulelist" or first.dim != 0:
        return False
    dims = {"Concatenate": ("dim",), "Transpose": ("dim0", "dim1")}
    return all(min((getattr(step, dim) for dim in dims.get(type(step).__name__, ())), default=0) > 0 for step in others)
