"""Computation of the averages that ``rltrain average`` writes. Separate from the command, because its imports take
seconds.

The mean of LoRA adapters is an adapter whose rank is the sum of their ranks. W + s B A is linear in the product B A,
but the mean of products is not the product of means. Concatenating the rows of all A and the columns of all B (each
times its scale and share) gives the mean: sum_i w_i s_i B_i A_i = [w_1 s_1 B_1, w_2 s_2 B_2, …] [A_1; A_2; …]. This
requires plain LoRA of one base model.
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
from torch.nn.functional import pad

from rltrain.common import __version__
from rltrain.common.errors import CheckpointError, ConfigError
from rltrain.models.files.folder import AVERAGE
from rltrain.models.files.hashed import Digests, write_weights
from rltrain.models.files.safe import UNREADABLE
from rltrain.models.weights.average import DTYPES, Average, read_part, refuse_differences
from rltrain.models.weights.finite import all_finite
from rltrain.models.weights.lora import NOT_PLAIN, PLAIN_STARTS
from rltrain.run.checkpoints.model_folder import find_model
from rltrain.workers.diagnostics.node import digest_of


class Averager:
    """Models or adapters to average. All are checked against each other before anything is written."""

    def __init__(self, names: Sequence[str], dtype: str | None) -> None:
        self._found = [find_model(name) for name in names]
        # Folders are absolute paths, so that average.json can be read from any folder. Names on the hub stay unchanged.
        paths = (model.path for model in self._found)
        self.paths = [str(Path(path).resolve()) if Path(path).is_dir() else path for path in paths]
        kinds = {model.is_adapter: model.name for model in self._found}
        if len(kinds) > 1:
            raise CheckpointError(
                f"{kinds[True]} is an adapter and {kinds[False]} is a model. Average adapters with adapters, or give "
                "the exported model of the run (global_step_N), into which its adapter is merged."
            )
        self.are_adapters = self._found[0].is_adapter
        if self.are_adapters and dtype:
            raise ConfigError(f"--dtype {dtype} is for models: adapters are written in float32. Remove it.")
        self._dtype = DTYPES[dtype] if dtype else None
        self._parts = [] if self.are_adapters else [read_part(path) for path in self.paths]
        if not self.are_adapters:
            Average(self._parts, [])  # raises before hours of a greedy soup

    def write(self, folder: Path, shares: Mapping[int, float], soup: dict[str, object]) -> None:
        """Write the mean of some models, and average.json: models, shares, digests of weight files, ``soup``."""
        written: Digests = {}
        if self.are_adapters:
            write_mean([read_adapter(self.paths[n]) for n in shares], list(shares.values()), folder, written)
        else:
            mean = Average([self._parts[number] for number in shares], list(shares.values()), self._dtype)
            mean.write(folder, written)
        models = []
        for number, share in shares.items():
            path = self.paths[number]
            files = [Path(path) / WEIGHTS] if self.are_adapters else self._parts[number].entries.paths
            digests = {file.name: digest_of(file) for file in files}
            models.append({"name": self._found[number].name, "path": path, "share": share, "files": digests})
        files_of_mean = {Path(path).name: digest for path, digest in written.items()}
        content = {"rltrain": __version__, "models": models, "files": files_of_mean, **soup}
        (folder / AVERAGE).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
