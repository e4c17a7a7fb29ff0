"""A model folder as hubs have them: small files, and weights in as many files as their size asks for, with an index."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from rltrain.base.errors import DataError
from rltrain.base.storage import disk_errors
from rltrain.models.files.hashed import Digests, write_weights

# The files of tokenizers, processors, chat templates and generation configs.
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
AVERAGE = "average.json"
# These describe the weights as they are written; the source's would describe its own.
WRITTEN_ANEW = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json", AVERAGE)
_PATTERN = "model{suffix}.safetensors"


def copy_small_files(source: Path, folder: Path) -> None:
    """Copy all files of ``source`` but those that describe its weights, and its folder of further chat templates."""
    for file in sorted([*source.iterdir(), *source.glob("additional_chat_templates/*")]):
        if file.is_file() and file.suffix in COPIED_SUFFIXES and file.name not in WRITTEN_ANEW:
            target = folder / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def write_shards(
    weights: Mapping[str, Tensor],
    folder: Path,
    digests: Digests,
    pieces: Callable[[str], Iterable[Tensor]] | None = None,
) -> None:
    """Weights under the names of a checkpoint -> files as save_pretrained names them, with an index of several.

    pieces: as `write_weights` has it.
    """
    split = split_torch_state_dict_into_shards(dict(weights), filename_pattern=_PATTERN, max_shard_size="50GB")
    for name, parts in split.filename_to_tensors.items():
        write_weights({part: weights[part] for part in parts}, folder / name, digests, pieces)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write into that gets the name ``path`` once all is written and on the disk, and is removed where that
    fails. Raises DataError for a name that is taken, DiskError and StorageError.
    """
    final = Path(path).expanduser().resolve()
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise DataError(f"{final} exists already, and nothing is overwritten. Name a folder that is not there.")
    folder = final.with_name(f".tmp_{final.name}_{os.getpid()}")
    with disk_errors(final):
        folder.mkdir(parents=True)
    try:
        yield folder
        with disk_errors(final):
            for entry in [*folder.rglob("*"), folder]:
                _sync(entry)
            os.rename(folder, final)
            _sync(final.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
