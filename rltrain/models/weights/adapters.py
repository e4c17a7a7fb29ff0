"""The mean of adapters, exactly: an adapter whose rank is the sum of theirs.

W + s B A is linear in the product B A, and the mean of products is not the product of means. Side by side, the rows of
all A and the columns of all B (each times its scale and share) make the mean itself: sum_i w_i s_i B_i A_i = [w_1 s_1
B_1, w_2 s_2 B_2, …] [A_1; A_2; …]. Only plain LoRA over one base model has that form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rltrain.base.errors import CheckpointError
from rltrain.models.files.hashed import Digests, write_weights
from rltrain.models.files.safe import UNREADABLE
from rltrain.models.weights.finite import all_finite
from rltrain.models.weights.lora import NOT_PLAIN, PLAIN_STARTS

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_UNSET: tuple[Any, ...] = (None, False, "none", [], {})


@dataclass(frozen=True)
class Adapter:
    """A folder as peft saves it."""

    path: str
    config: dict[str, Any]
    weights: dict[str, Tensor]

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        rank = self.config["r"]
        return float(self.config["lora_alpha"] / (math.sqrt(rank) if self.config.get("use_rslora") else rank))


def read_adapter(path: str) -> Adapter:
    """Raises CheckpointError for what is no plain LoRA, and for numbers that are not finite."""
    file = Path(path) / CONFIG
    try:
        config, weights = json.loads(file.read_text("utf-8")), load_file(Path(path) / WEIGHTS)
        rank, alpha = config["r"], config["lora_alpha"]
    except (*UNREADABLE, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no adapter of peft's that can be read: {error}. Copy it again.") from error
    odd = [name for name in (*NOT_PLAIN, "rank_pattern", "alpha_pattern") if config.get(name) not in _UNSET]
    odd += ["init_lora_weights"] if config.get("init_lora_weights", True) not in PLAIN_STARTS else []
    if config.get("peft_type") != "LORA" or odd or not rank or not alpha:
        what = f"it has {odd[0]}={config[odd[0]]}" if odd else f"peft_type={config.get('peft_type')}, r={rank}"
        raise CheckpointError(f"{path} is not plain LoRA ({what}), so adapters alone do not say what it adds.")
    layers = {name.rpartition(".lora_")[0] for name in weights}
    if lacking := sorted({f"{layer}.lora_{kind}.weight" for layer in layers for kind in "AB"} - weights.keys()):
        raise CheckpointError(f"{path} has no {lacking[0]}. Copy it again.")
    for name, weight in weights.items():
        if not name.endswith((".lora_A.weight", ".lora_B.weight")) or weight.dim() != 2:
            raise CheckpointError(f"{path} has {name}, which is no weight of plain LoRA on linear layers.")
        if not all_finite(weight):
            raise CheckpointError(f"{path}: {name} has numbers that are not finite (NaN or infinity). Leave it out.")
    return Adapter(path, config, weights)


def write_mean(adapters: Sequence[Adapter], shares: Sequence[float], folder: Path, digests: Digests) -> None:
    """Write the adapter that adds the mean of what ``adapters`` add. Raises CheckpointError for other base models."""
    first = adapters[0]
    base = first.config.get("base_model_name_or_path")
    for other in adapters[1:]:
        if (base_of_other := other.config.get("base_model_name_or_path")) != base:
            raise CheckpointError(
                f"{first.path} and {other.path} are adapters to other models ({base} and {base_of_other}), so their "
                "mean belongs to neither. Merge each into its model and average those."
            )
    layers = sorted({name.rpartition(".lora_")[0] for adapter in adapters for name in adapter.weights})
    weights: dict[str, Tensor] = {}
    for layer in layers:
        weights |= _layer(layer, adapters, shares)
    rank = sum(adapter.config["r"] for adapter in adapters)
    modules = sorted({module for adapter in adapters for module in _modules(adapter)})
    config = {**first.config, "r": rank, "lora_alpha": rank, "use_rslora": False, "target_modules": modules}
    # What else chooses layers would leave some of these names out.
    config |= dict.fromkeys(("layers_to_transform", "layers_pattern", "exclude_modules"))
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_weights(weights, folder / WEIGHTS, digests)


def _modules(adapter: Adapter) -> list[str]:
    """The layers themselves: names of several adapters, joined, could match layers that none of them has."""
    return [name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in adapter.weights]


def _layer(layer: str, adapters: Sequence[Adapter], shares: Sequence[float]) -> Mapping[str, Tensor]:
    """A and B of a layer. An adapter that lacks it adds nothing there: zeros."""
    names = (f"{layer}.lora_A.weight", f"{layer}.lora_B.weight")
    example = next(adapter for adapter in adapters if names[0] in adapter.weights)
    inputs, outputs = example.weights[names[0]].shape[1], example.weights[names[1]].shape[0]
    all_a, all_b = [], []
    for adapter, share in zip(adapters, shares, strict=True):
        rank = adapter.config["r"]
        first = adapter.weights.get(names[0], torch.zeros(rank, inputs)).float()
        second = adapter.weights.get(names[1], torch.zeros(outputs, rank)).float()
        if first.shape != (rank, inputs) or second.shape != (outputs, rank):
            raise CheckpointError(
                f"{adapter.path}: {layer} is {list(second.shape)} x {list(first.shape)}, and {example.path} has "
                f"{outputs} x {inputs} there (rank {rank}). Average adapters to one model."
            )
        all_a.append(first)
        all_b.append(second * (share * adapter.scale))
    return {names[0]: torch.cat(all_a), names[1]: torch.cat(all_b, dim=1)}
