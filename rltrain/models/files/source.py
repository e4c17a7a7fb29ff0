"""Checks that a model exists and is complete, before anything starts.

Finding a missing or truncated file only after minutes of loading wastes a cluster. Therefore names, sizes and headers
are checked first. Weights are not read. The hub is queried once, because transformers would query it per file and
retry.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from rltrain.common.env import work_offline
from rltrain.common.errors import first_line
from rltrain.config.check import nearest_file

log = logging.getLogger(__name__)
_HUB_TIMEOUT_S = 5.0
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OLD_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_NUM_SHOWN = 3


def model_problem(key: str, path: str) -> str | None:
    """Return the problem with the folder or hub name ``path`` from ``key``, or None."""
    folder = Path(path)
    if folder.is_dir():
        return _folder_problem(key, folder)
    if folder.is_file():
        return f"{key}={path} is a file. Give the folder that contains it."
    # A hub name has at most one slash.
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        hint = f" Write {folder.expanduser()}: '~' is not expanded here." if folder.expanduser().is_dir() else ""
        return f"{key}={path}: the folder does not exist.{hint or nearest_file(folder.expanduser())}"
    return _hub_problem(key, path)


def _folder_problem(key: str, folder: Path) -> str | None:
    if not (folder / "config.json").is_file():
        return f"{key}={folder} has no config.json, so it is not a Hugging Face model. Give the folder of one."
    if not (folder / _INDEX).is_file():
        files: Sequence[str] = [_WEIGHTS]
        if not (folder / _WEIGHTS).is_file():
            old = any((folder / name).is_file() for name in _OLD_WEIGHTS)
            return None if old else f"{key}={folder} has no weights: neither {_WEIGHTS} nor {_INDEX} is there."
    else:
        try:
            files = sorted(set(json.loads((folder / _INDEX).read_text("utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{folder / _INDEX} cannot be read ({error!r}). Copy it again."
    if lacking := [name for name in files if not (folder / name).is_file()]:
        names = ", ".join(lacking[:_NUM_SHOWN]) + (", …" if len(lacking) > _NUM_SHOWN else "")
        return (
            f"{key}={folder} lacks {len(lacking)} of the {len(files)} files with weights that {_INDEX} names: "
            f"{names}. Copy them again."
        )
    return next((damage for name in files if (damage := _damage(folder / name))), None)


def _damage(file: Path) -> str | None:
    """Return the damage of a safetensors file, or None.

    The file consists of eight bytes of length, a JSON header with the offsets of the data, and the data.
    """
    have = file.stat().st_size
    try:
        with file.open("rb") as stream:
            # Damaged length bytes can be any number, so the read is limited to the file size.
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, have)))
        ends = (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        size = 8 + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{file} has no readable safetensors header ({have:,} bytes): truncated or damaged. Copy it again."
    damage = f"{file} has {have:,} bytes and its header says {size:,}: truncated or damaged. Copy it again."
    return damage if have != size else None


def _hub_problem(key: str, name: str) -> str | None:
    """Query the hub once, with a short timeout: transformers would query and retry for each of many files."""
    no_folder, hint = f"{key}={name}: the folder does not exist", nearest_file(Path(name))
    local = None
    try:
        cached = huggingface_hub.try_to_load_from_cache(name, "config.json")
        local = Path(cached).parent if isinstance(cached, str) else None
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            if local:
                return _folder_problem(key, local)
            return f"{no_folder}, the model is not in the hub's cache, and HF_HUB_OFFLINE forbids a download.{hint}"
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT_S)
    except HFValidationError:
        return f"{no_folder}, and it is not a valid hub name (OWNER/NAME).{hint}"
    except HfHubHTTPError as error:
        return None if local else f"{no_folder}, and the hub says: {first_line(error)}{hint}"
    except Exception as error:  # noqa: BLE001 - network errors depend on the hub's HTTP client
        unreachable = f"{huggingface_hub.constants.ENDPOINT} cannot be reached ({first_line(error)})"
        if not local:
            return f"{no_folder}, and {unreachable}.{hint} Give a folder, or download the model from another machine."
        log.warning("note: %s, so %s is taken from the cache (as HF_HUB_OFFLINE=1 does at once)", unreachable, name)
        work_offline()
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        return _folder_problem(key, local)
    return None
