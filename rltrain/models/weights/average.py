"""Weighted mean of the weights of models, a few rows at a time (Wortsman et al. 2022, "Model soups").

Files are memory-mapped and rows of all models are summed in float32, so a few rows of memory are enough for models of
any size. `KeyMapping` maps the entries of each model's files to weights, because tied weights may be stored under
either name, and older folders use older names. Any weights of equal shape have a mean, so architectures and tokenizers
are compared. Quantised weights are rejected, because their numbers are codes. A common base model cannot be checked;
only the score of the average shows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from rltrain.common.errors import CheckpointError, short
from rltrain.common.logs import count
from rltrain.models.files.digest import digest_of_files
from rltrain.models.files.entries import Entries, NoEntries, read_entries
from rltrain.models.files.folder import copy_small_files, write_shards
from rltrain.models.files.hashed import Digests
from rltrain.models.files.verl import Shards
from rltrain.models.load import empty_model, load_config
from rltrain.models.routing import CORRECTION_BIASES
from rltrain.models.weights.export import source_folder
from rltrain.models.weights.finite import all_finite
from rltrain.models.weights.key_mapping import KeyMapping
from rltrain.models.weights.missing_keys import refuse

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KEY = "MODEL"  # key of a model in messages
# Elements of a weight that are summed at once: 16 MiB in float32.
_PIECE = 2**22
_HEADLESS = ("ForSequenceClassification", "ForTokenClassification")
# Settings that only concern saving, serving or training.
_NO_MATTER = {
    "transformers_version", "dtype", "torch_dtype", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
    "max_position_embeddings", "initializer_range", "output_attentions", "output_hidden_states", "return_dict",
    "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "is_encoder_decoder", "architectures",
}  # fmt: skip
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_SERVING = ("generation_config.json", "chat_template.jinja", "preprocessor_config.json")


@dataclass(frozen=True)
class Part:
    """Model in an average."""

    path: str
    """Folder or hub name."""
    small_files: Path
    """Folder of its tokenizer and other small files."""
    config: Any
    """Config of transformers."""
    entries: Entries
    names: dict[str, str]
    """Entries of these files by the name of the weight, which is the same in all models."""


def read_part(path: str) -> Part:
    """Read a model's config and entries, but no weights. Raises ConfigError and CheckpointError for a mismatch."""
    config = load_config(path, _KEY)
    try:
        entries = read_entries(path, fetch=True)
    except NoEntries as error:
        raise CheckpointError(f"{path} cannot be averaged: {error}.") from error
    has_codes = any(empty.is_floating_point() and empty.dtype.itemsize == 1 for empty in entries.empty.values())
    if has_codes or getattr(config, "quantization_config", None):
        raise CheckpointError(
            f"{path} has quantised weights, which cannot be averaged. Use the model before quantisation."
        )
    return _part(path, source_folder(path, config), config, entries)


def read_shards(folder: Path) -> Part:
    """Read verl's shards in ``folder``, with the configuration and small files next to them (see `read_part`)."""
    small_files = folder / "huggingface"
    if not (small_files / "config.json").is_file():
        raise CheckpointError(
            f"{folder} has no {small_files.name}/config.json, which verl writes next to its shards. Copy the model's "
            "config.json and tokenizer there."
        )
    config, shards = load_config(str(small_files), _KEY), Shards(folder)
    key_mapping = KeyMapping(shards.empty, _empty_model(config))
    one_to_one = {parts[0][0]: name for name, parts in key_mapping.parts.items() if parts[0][1] is None}
    shards.settle({entry: key_mapping.shapes[name] for entry, name in one_to_one.items()})
    return _part(str(folder), small_files, config, shards)


def _part(path: str, small_files: Path, config: Any, entries: Entries) -> Part:
    key_mapping = KeyMapping(entries.empty, _empty_model(config))
    refuse(_KEY, entries, key_mapping)
    return Part(path, small_files, config, entries, _names(key_mapping))


def _empty_model(config: Any) -> Any:
    headless = any(kind in name for name in config.architectures or () for kind in _HEADLESS)
    return empty_model(config, "eager", torch.float32, decoder_only=headless)


def _names(key_mapping: KeyMapping) -> dict[str, str]:
    tied: dict[str, str] = getattr(key_mapping.plain, "all_tied_weights_keys", None) or {}
    again = {second for _, second in key_mapping.twice()}
    names = {entry: entry for entry in key_mapping.left}
    for name, parts in key_mapping.parts.items():
        # If a conversion rule merges several entries into one weight, each entry is averaged separately.
        own = {(tied.get(name, name) if rule is None else entry): entry for entry, rule in parts if entry not in again}
        names |= own
    return names


class Average:
    """Mean of ``parts`` with weights ``shares``, which sum to 1.

    dtype: dtype of floating-point entries except routers' correction biases (None: as in the first model). Raises
    CheckpointError if the parts are not models of one kind.
    """

    def __init__(self, parts: Sequence[Part], shares: Sequence[float], dtype: torch.dtype | None = None) -> None:
        self._parts, self._shares = parts, shares
        first = parts[0]
        self.notes: list[str] = []
        """Notes on differences that do not prevent averaging."""
        for other in parts[1:]:
            refuse_differences(
                "architectures",
                first.path,
                _leaves(first.config.to_dict()),
                other.path,
                _leaves(other.config.to_dict()),
            )
            refuse_differences("weights", first.path, _kinds(first), other.path, _kinds(other))
            self.notes += _compare_small_files(first.small_files, other.small_files)
        if len({getattr(part.config, "max_position_embeddings", None) for part in parts}) > 1:
            self.notes.append(f"max_position_embeddings differ: the value of {first.path} is used")
        self._weights = {entry: name for name, entry in first.names.items()}
        self.empty: dict[str, Tensor] = {}
        """Entries of the average, on the meta device."""
        for entry in self._weights:
            empty = first.entries.empty[entry]
            is_cast = dtype is not None and empty.is_floating_point() and not entry.endswith(CORRECTION_BIASES)
            self.empty[entry] = empty.to(dtype) if is_cast else empty

    def pieces(self, entry: str) -> Iterator[Tensor]:
        """Yield the rows of an entry in pieces. Raises CheckpointError for non-finite numbers."""
        empty = self.empty[entry]
        num_rows = empty.shape[0] if empty.dim() else 1
        step = max(_PIECE * num_rows // max(empty.numel(), 1), 1)
        for first in range(0, num_rows, step):
            yield self._mean(entry, first, min(first + step, num_rows))

    def _mean(self, entry: str, first: int, last: int) -> Tensor:
        weight, all_rows = self._weights[entry], list[Tensor]()
        for part in self._parts:
            all_rows.append(part.entries.rows(part.names[weight], first, last))
            _refuse_not_finite(part.path, part.names[weight], all_rows[-1])
            if not all_rows[0].is_floating_point() and not torch.equal(all_rows[0], all_rows[-1]):
                raise CheckpointError(f"{entry} has integers that differ in {self._parts[0].path} and {part.path}.")
        if not all_rows[0].is_floating_point():
            return all_rows[0]
        total = torch.zeros(all_rows[0].shape, dtype=torch.promote_types(all_rows[0].dtype, torch.float32))
        for rows, share in zip(all_rows, self._shares, strict=True):
            total.add_(rows, alpha=share)
        mean = total.to(self.empty[entry].dtype)
        _refuse_not_finite(f"the average in {mean.dtype}".replace("torch.", ""), entry, mean)
        return mean

    def write(self, folder: Path, digests: Digests) -> None:
        """Write weights, index, configuration, and the first model's small files. Raises DiskError, CheckpointError."""
        write_shards(self.empty, folder, digests, self.pieces)
        small_files = self._parts[0].small_files
        copy_small_files(small_files, folder)
        config = json.loads((small_files / "config.json").read_text("utf-8"))
        if dtype := Entries("", empty=self.empty).dtype:
            _name_dtype(config, str(dtype).removeprefix("torch."))
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def refuse_differences(
    what: str, first_path: str, first: Mapping[str, Any], other_path: str, other: Mapping[str, Any]
) -> None:
    """Raise CheckpointError if two models have different values under a name. what: noun for the message."""
    unequal = [name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name)]
    if unequal:
        values = "; ".join(f"{name} is {short(first.get(name))} and {short(other.get(name))}" for name in unequal[:3])
        raise CheckpointError(
            f"{first_path} and {other_path} have different {what}: {values} ({count(len(unequal), 'difference')}). "
            "Average models that have the same base model and format."
        )


def _leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in config.items():
        if not (name.startswith("_") or name in _NO_MATTER or "dropout" in name):
            leaves |= _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return leaves


def _kinds(part: Part) -> dict[str, str]:
    empty = {name: part.entries.empty[entry] for name, entry in part.names.items()}
    return {
        name: f"{'floating point' if weight.is_floating_point() else weight.dtype} {list(weight.shape)}"
        for name, weight in empty.items()
    }


def _compare_small_files(first: Path, other: Path) -> list[str]:
    """Return notes on files that differ between two folders. Raises CheckpointError for different tokenizers."""
    notes = [f"{first} and {other} have no tokenizer file in common, so no tokens are compared"]
    for name in _TOKENIZERS:
        if (first / name).is_file() and (other / name).is_file():
            notes = []
            refuse_differences("tokenizers", str(first), _tokens(first / name), str(other), _tokens(other / name))
    if names := [name for name in _SERVING if _lines(first / name) != _lines(other / name)]:
        notes.append(f"{', '.join(names)} of {other} differ: the files of {first} are used")
    return notes


def _tokens(file: Path) -> dict[str, Any]:
    if file.name != "tokenizer.json":
        return {file.name: digest_of_files([file])}
    try:
        # The file is read by the library, because its format depends on the library's version.
        tokenizer = Tokenizer.from_file(str(file))
        return {**tokenizer.get_vocab(), "merges of BPE": json.loads(tokenizer.to_str())["model"].get("merges")}
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Copy it again.") from error


def _lines(file: Path) -> list[str]:
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return [line for line in lines if "transformers_version" not in line]


def _refuse_not_finite(path: str, name: str, rows: Tensor) -> None:
    if not all_finite(rows):
        raise CheckpointError(f"{path}: {name} has numbers that are not finite (NaN or infinity). Remove it.")


def _name_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype at the top level of a configuration, and in every section that has one."""
    config.setdefault("dtype", dtype)
    for section in (config, *config.values()):
        if isinstance(section, dict):
            section.update(dict.fromkeys({"dtype", "torch_dtype"} & section.keys(), dtype))
