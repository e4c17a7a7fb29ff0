"""The weighted mean of the weights of models, a few rows at a time (Wortsman et al. 2022, "Model soups").

Files are mapped into memory and rows of all models are summed in float32, so memory for a handful of rows is enough for
models of any size. Which entry of whose files is which weight says `Placing`: tied weights may stand under either name,
and older folders have older names. Left out: averages of weights that are quantised, whose numbers are codes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltrain.base.errors import CheckpointError
from rltrain.models.files.entries import Entries, NoEntries, read_entries
from rltrain.models.files.folder import copy_small_files, write_shards
from rltrain.models.files.hashed import Digests
from rltrain.models.files.verl import Shards
from rltrain.models.load import empty_model, load_config
from rltrain.models.routing import CORRECTION_BIASES
from rltrain.models.weights.alike import differing_small_files, refuse_other_config, refuse_other_tokenizer
from rltrain.models.weights.export import source_folder
from rltrain.models.weights.finite import all_finite
from rltrain.models.weights.lacking import refuse
from rltrain.models.weights.placing import Placing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KEY = "MODEL"  # what names a model in messages
# Numbers of a weight that are summed at once: 16 MiB in float32.
_PIECE = 2**22
_HEADLESS = ("ForSequenceClassification", "ForTokenClassification")


@dataclass(frozen=True)
class Part:
    """A model that goes into an average."""

    path: str
    """A folder or hub name."""
    small_files: Path
    """The folder of its tokenizer and the like."""
    config: Any
    """Of transformers."""
    entries: Entries
    names: dict[str, str]
    """By the name that a weight has in all models: its entry in these files."""


def read_part(path: str) -> Part:
    """A model whose weights are there and fit its configuration; no weight is read.

    Raises ConfigError and CheckpointError.
    """
    config = load_config(path, _KEY)
    if getattr(config, "quantization_config", None):
        raise CheckpointError(
            f"{path}: its weights are quantised, and no numbers to average. Average the model itself."
        )
    try:
        entries = read_entries(path, fetch=True)
    except NoEntries as error:
        raise CheckpointError(f"{path} cannot be averaged: {error}.") from error
    placing = Placing(entries.empty, _empty_model(config))
    refuse(_KEY, entries, placing)
    return Part(path, source_folder(path, config), config, entries, _names(placing))


def read_shards(folder: Path) -> Part:
    """`read_part` of verl's shards in ``folder``, with the configuration and small files beside them."""
    small_files = folder / "huggingface"
    if not (small_files / "config.json").is_file():
        raise CheckpointError(
            f"{folder} has no {small_files.name}/config.json, which verl writes beside its shards. Put the config.json "
            "and the tokenizer of the model there."
        )
    config, shards = load_config(str(small_files), _KEY), Shards(folder)
    model = _empty_model(config)
    placing = Placing(shards.empty, model)
    one_to_one = {parts[0][0]: name for name, parts in placing.parts.items() if parts[0][1] is None}
    shards.settle({entry: placing.shapes[name] for entry, name in one_to_one.items()})
    placing = Placing(shards.empty, model)
    refuse(_KEY, shards, placing)
    return Part(str(folder), small_files, config, shards, _names(placing))


def _empty_model(config: Any) -> Any:
    headless = any(kind in name for name in config.architectures or () for kind in _HEADLESS)
    return empty_model(config, "eager", torch.float32, decoder_only=headless)


def _names(placing: Placing) -> dict[str, str]:
    tied: dict[str, str] = getattr(placing.plain, "all_tied_weights_keys", None) or {}
    again = {second for _, second in placing.twice()}
    names = {entry: entry for entry in placing.left}
    for name, parts in placing.parts.items():
        # Entries of a rule that makes one weight of several stand for themselves.
        own = {(tied.get(name, name) if rule is None else entry): entry for entry, rule in parts if entry not in again}
        names |= own
    return names


class Average:
    """The mean of ``parts`` with ``shares``, which sum to 1.

    dtype: of all that has floating point but correction biases of routers; None: as the first model has it. Raises
    CheckpointError where the parts are not models of one kind.
    """

    def __init__(self, parts: Sequence[Part], shares: Sequence[float], dtype: torch.dtype | None = None) -> None:
        self._parts, self._shares = parts, shares
        first = parts[0]
        self.notes: list[str] = []
        """What is worth knowing of models that can be averaged all the same."""
        for other in parts[1:]:
            refuse_other_config((first.path, first.config.to_dict()), (other.path, other.config.to_dict()))
            if note := refuse_other_tokenizer(first.small_files, other.small_files):
                self.notes.append(note)
            if names := differing_small_files(first.small_files, other.small_files):
                self.notes.append(f"{', '.join(names)} of {other.path} differ: those of {first.path} are taken")
            _refuse_other_weights(first, other)
        if any(part.config.max_position_embeddings != first.config.max_position_embeddings for part in parts
               if hasattr(first.config, "max_position_embeddings")):  # fmt: skip
            self.notes.append(f"max_position_embeddings differ: that of {first.path} is taken")
        self._weights = {entry: name for name, entry in first.names.items()}
        dtypes = {entry: None if entry.endswith(CORRECTION_BIASES) else dtype for entry in self._weights}
        self.empty = {entry: _cast(first.entries.empty[entry], dtypes[entry]) for entry in self._weights}
        """The entries of the average, on the meta device."""

    def pieces(self, entry: str) -> Iterator[Tensor]:
        """The rows of an entry, some at a time. Raises CheckpointError for numbers that are not finite."""
        empty = self.empty[entry]
        num_rows = empty.shape[0] if empty.dim() else 1
        step = max(_PIECE * num_rows // max(empty.numel(), 1), 1)
        for first in range(0, num_rows, step):
            yield self._mean(entry, first, min(first + step, num_rows))

    def _mean(self, entry: str, first: int, last: int) -> Tensor:
        total: Tensor | None = None
        for part, share in zip(self._parts, self._shares, strict=True):
            name = part.names[self._weights[entry]]
            rows = part.entries.rows(name, first, last)
            if not rows.is_floating_point():
                if total is not None and not torch.equal(total, rows):
                    raise CheckpointError(
                        f"{part.path}: {name} are whole numbers and differ from {self._parts[0].path}."
                    )
                total = rows
                continue
            _refuse_not_finite(part.path, name, rows)
            if total is None:
                total = torch.zeros(rows.shape, dtype=torch.promote_types(rows.dtype, torch.float32))
            total.add_(rows, alpha=share)
        assert total is not None
        mean = total.to(self.empty[entry].dtype)
        if mean.is_floating_point():
            _refuse_not_finite(f"the average in {mean.dtype}".replace("torch.", ""), entry, mean)
        return mean

    def write(self, folder: Path, digests: Digests) -> None:
        """Weights, index, configuration, and the small files of the first model. Raises DiskError, CheckpointError."""
        write_shards(self.empty, folder, digests, self.pieces)
        small_files = self._parts[0].small_files
        copy_small_files(small_files, folder)
        config = json.loads((small_files / "config.json").read_text("utf-8"))
        if dtype := Entries("", empty=self.empty).dtype:
            _name_dtype(config, str(dtype).removeprefix("torch."))
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _refuse_other_weights(first: Part, other: Part) -> None:
    for having, lacking in ((first, other), (other, first)):
        if names := sorted(having.names.keys() - lacking.names.keys()):
            raise CheckpointError(
                f"{lacking.path} has no {names[0]}, which {having.path} has ({len(names)} such weights). Save both the "
                "same way."
            )
    for name, entry in first.names.items():
        one, two = first.entries.empty[entry], other.entries.empty[other.names[name]]
        if one.shape != two.shape or one.is_floating_point() != two.is_floating_point():
            kinds = [f"{list(empty.shape)} of {empty.dtype}".replace("torch.", "") for empty in (one, two)]
            raise CheckpointError(f"{entry} is {kinds[0]} in {first.path} and {kinds[1]} in {other.path}.")
        if one.is_floating_point() and min(one.dtype.itemsize, two.dtype.itemsize) == 1:
            raise CheckpointError(f"{entry} has numbers of 8 bits, which are codes. Average the models before that.")


def _refuse_not_finite(path: str, name: str, rows: Tensor) -> None:
    if not all_finite(rows):
        raise CheckpointError(
            f"{path}: {name} has numbers that are not finite (NaN or infinity). Leave this model out."
        )


def _cast(empty: Tensor, dtype: torch.dtype | None) -> Tensor:
    return empty.to(dtype) if dtype is not None and empty.is_floating_point() else empty


def _name_dtype(config: dict[str, Any], dtype: str) -> None:
    """Wherever a configuration names one."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = dtype
    if not {"dtype", "torch_dtype"} & config.keys():
        config["dtype"] = dtype
