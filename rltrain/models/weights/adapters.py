"""Exact mean of LoRA adapters: an adapter whose rank is the sum of their ranks.

W + s B A is linear in the product B A, but the mean of products is not the product of means. Concatenating the rows of
all A and the columns of all B (each times its scale and share) gives the mean: sum_i w_i s_i B_i A_i = [w_1 s_1 B_1,
w_2 s_2 B_2, …] [A_1; A_2; …]. This requires plain LoRA of one base model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

from rltrain.common.errors import CheckpointError
from rltrain.models.files.hashed import Digests, write_weights
from rltrain.models.files.safe import UNREADABLE
from rltrain.models.weights.average import refuse_differences
from rltrain.models.weights.finite import all_finite
from rltrain.models.weights.lora import NOT_PLAIN, PLAIN_STARTS

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_UNSET: tuple[Any, ...] = (None, False, "none", [], {})
# Settings of peft, with the values for which a layer computes W + s B A.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    **dict.fromkeys((*NOT_PLAIN, "rank_pattern", "alpha_pattern"), _UNSET),
    "init_lora_weights": (None, *PLAIN_STARTS),
}
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class Adapter:
    """Contents of an adapter folder of peft."""

    path: str
    config: dict[str, Any]
    weights: dict[str, Tensor]
    scale: float
    """Factor of B A."""

    @property
    def layers(self) -> set[str]:
        """Names of the adapted layers."""
        return {name.rpartition(".lora_")[0] for name in self.weights}


def read_adapter(path: str) -> Adapter:
    """Read an adapter. Raises CheckpointError if it is not plain LoRA or has non-finite numbers."""
    try:
        config = json.loads((Path(path) / CONFIG).read_text("utf-8"))
        root = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
        adapter = Adapter(path, config, load_file(Path(path) / WEIGHTS), config["lora_alpha"] / root)
    except (*UNREADABLE, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"{path} is not a readable LoRA adapter of peft: {error!r}. Copy it again.") from error
    problems = [f"{name}={config.get(name)}" for name, values in _PLAIN.items() if config.get(name) not in values]
    problems += sorted({f"{layer}{end}" for layer in adapter.layers for end in (_A, _B)} ^ adapter.weights.keys())
    for name, weight in adapter.weights.items():
        # A is [rank, inputs] and B [outputs, rank]; adapters of convolutions have more dimensions.
        if weight.dim() != 2 or weight.shape[name.endswith(_B)] != config["r"]:
            problems.append(f"{name} of shape {list(weight.shape)}")
        elif not all_finite(weight):
            problems.append(f"{name} with numbers that are not finite (NaN or infinity)")
    if problems:
        raise CheckpointError(f"{path} is not plain LoRA with finite numbers (it has {problems[0]}). Remove it.")
    return adapter


def write_mean(adapters: Sequence[Adapter], shares: Sequence[float], folder: Path, digests: Digests) -> None:
    """Write the mean of ``adapters``, weighted by ``shares``. Raises CheckpointError for different base models."""
    key, first = "base_model_name_or_path", adapters[0]
    for other in adapters[1:]:
        bases = [{key: adapter.config.get(key)} for adapter in (first, other)]
        refuse_differences("base models", first.path, bases[0], other.path, bases[1])
    rank = sum(adapter.config["r"] for adapter in adapters)
    layers = sorted(set[str]().union(*(adapter.layers for adapter in adapters)))
    weights: dict[str, Tensor] = {}
    for layer in layers:
        adding = [(adapter, share) for adapter, share in zip(adapters, shares, strict=True) if layer in adapter.layers]
        try:
            a = torch.cat([adapter.weights[layer + _A].float() for adapter, _ in adding])
            b = torch.cat(
                [adapter.weights[layer + _B].float() * (share * adapter.scale) for adapter, share in adding], dim=1
            )
        except RuntimeError as error:
            raise CheckpointError(f"{layer} has different shapes: {error}. Average adapters to one model.") from error
        # An adapter without the layer contributes zeros.
        missing = rank - len(a)
        weights[layer + _A], weights[layer + _B] = pad(a, (0, 0, 0, missing)), pad(b, (0, missing))
    # Targets are full layer names, because the combined patterns of several adapters could match layers that no adapter
    # has.
    targets = [layer.removeprefix("base_model.model.") for layer in layers]
    config = {**adapters[0].config, "r": rank, "lora_alpha": rank, "use_rslora": False, "target_modules": targets}
    # Other filters would exclude some of these layers.
    config |= dict.fromkeys(("layers_to_transform", "layers_pattern", "exclude_modules"))
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_weights(weights, folder / WEIGHTS, digests)
