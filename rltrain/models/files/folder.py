"""Model folders in the format of hubs: small files, and weights in one file or in several with an index."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from rltrain.common.errors import DataError
from rltrain.common.storage import disk_errors, sync
from rltrain.models.files.hashed import Digests, write_weights

# The files of tokenizers, processors, chat templates and generation configs.
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
AVERAGE = "average.json"
# These files describe the weights, so they are written anew instead of copied.
WRITTEN_ANEW = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json", AVERAGE)
_PATTERN = "model{suffix}.safetensors"


def copy_small_files(source: Path, folder: Path) -> None:
    """Copy the small files of ``source``, except descriptions of its weights, and its additional chat templates."""
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
    """Write weights in files named as by save_pretrained, with an index if there are several.

    pieces: see `write_weights`.
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
    """Yield a temporary folder, which is renamed to ``path`` after everything is on disk, or removed on failure.

    Raises DataError if the name is taken, DiskError and StorageError.
    """
    final = Path(path).expanduser().resolve()
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise DataError(f"{final} already exists and is not overwritten. Give a folder that does not exist.")
    folder = final.with_name(f".tmp_{final.name}_{os.getpid()}")
    with disk_errors(final):
        folder.mkdir(parents=True)
    try:
        yield folder
        with disk_errors(final):
            for entry in [*folder.rglob("*"), folder]:
                sync(entry)
            os.rename(folder, final)
            sync(final.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
