"""Rows of weights on their way into an engine that fuses and renames weights as it likes.

Its own loader is asked where a weight belongs: it is given one that takes no memory, and the copies it makes of it are noted. From then
on rows are written there, and read from there for the fingerprint: nothing here knows the layout of a model. The functions are those that
SGLang calls in its own process (``custom_weight_loader``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rltrain.device import Device
from rltrain.workers.rollout.base import WeightPiece, fingerprint_of


@dataclass(frozen=True)
class _Landing:
    """Where a weight belongs (tied weights: several places), and the dtype it was sent in."""

    places: list[Tensor]
    dtype: torch.dtype
    counted: bool


# During one sync: what is known of each weight, and the weights that the engine did not take.
_LANDINGS: dict[str, _Landing] = {}
_REFUSED: dict[str, str] = {}


def header_of(piece: WeightPiece) -> str:
    """The name under which the values of a piece are handed to `load_rows`."""
    return json.dumps([piece.name, piece.shape, piece.start, not piece.buffer])


def load_rows(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Write pieces of weights into ``model``, whose ``load_weights`` takes (name, tensor) pairs; for names see `header_of`."""
    for header, values in named_tensors:
        name, shape, start, counted = json.loads(header)
        if name not in _LANDINGS:
            _LANDINGS[name] = _Landing(_places(model, name, shape, values), values.dtype, counted)
        for place in _LANDINGS[name].places:
            place[start : start + len(values)].copy_(values)
        # The sender may overwrite them as soon as this returns.
        Device(values.device.type).synchronize()


def report_rows(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """End a sync: write a JSON of ``fingerprint`` and ``refused`` (weight -> why) to the file that the only tensor is named after."""
    total = 0
    for name, landing in _LANDINGS.items():
        # Copies of one weight that are not alike add up to a number that nobody expects.
        shares = {fingerprint_of(name, 0, place.to(landing.dtype)) for place in landing.places}
        total += sum(shares) if landing.counted else 0
    Path(named_tensors[0][0]).write_text(
        json.dumps({"fingerprint": total % 2**64, "refused": _REFUSED, "model": type(model).__name__})
    )
    _LANDINGS.clear()
    _REFUSED.clear()


def _places(model: Any, name: str, shape: Sequence[int], like: Tensor) -> list[Tensor]:
    probe = torch.zeros(1, dtype=like.dtype, device=like.device)
    with _Copies(probe) as copies:
        try:
            model.load_weights([(name, probe.expand(*shape))])
        except (LookupError, AttributeError, AssertionError, TypeError, ValueError, RuntimeError) as error:
            # It would end the engine's process without a word; it is reported instead.
            _REFUSED[name] = repr(error)
            return []
    if not copies.places or any(list(place.shape) != list(shape) for place in copies.places):
        _REFUSED[name] = f"of shape {list(shape)}, was copied to {[list(place.shape) for place in copies.places]}"
        return []
    return copies.places


class _Copies(TorchDispatchMode):
    """Notes the targets of copies from ``probe``, and does not make them."""

    def __init__(self, probe: Tensor) -> None:
        super().__init__()
        self.places: list[Tensor] = []
        self._source = probe.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].untyped_storage().data_ptr() == self._source:
            self.places.append(args[0])
            return args[0]
        return func(*args, **(kwargs or {}))
