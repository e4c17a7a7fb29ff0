"""Dataset and sampler classes of users that were written for verl: ``data.custom_cls``, ``data.sampler``.

A dataset class is read once, row by row, in the driver before anything starts, and converted to `Rows`. Therefore
checks, order, resuming and fingerprints work as for files, and no other process imports the class. Features that need
the class during training are not supported: rows that change between epochs (``on_batch_end``), token ids and pixels
from the class, and samplers that read verl's batch of tensors (``update``). Images from the class are stored as encoded
files, in the driver and then in Ray's object store. Image paths are read where they are needed.
"""

from __future__ import annotations

import inspect
import logging
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from rltrain.common.errors import ConfigError, DataError
from rltrain.common.plugin import load_plugin, user_traceback
from rltrain.config.check import as_list
from rltrain.config.schema import DataConfig
from rltrain.data.batch_sampler import BatchOrder
from rltrain.data.images import open_image
from rltrain.data.rows import PromptRow, Rows, keys_of, rows_of
from rltrain.data.stored_images import image_entries
from rltrain.data.tables import draw_rows

log = logging.getLogger(__name__)

# Keys that verl's classes read from its section data, but that have no effect here.
_VERL_KEYS: dict[str, Any] = {
    "tokenizer": None, "use_shm": False, "val_batch_size": None, "return_raw_input_ids": False, "return_raw_chat": True,
    "return_full_prompt": False, "dataloader_num_workers": 0, "validation_shuffle": False, "image_patch_size": 14,
    "filter_overlong_prompts_workers": 1, "video_key": "videos", "audio_key": "audios",
    "trust_remote_code": False, "return_multi_modal_inputs": True, "mm_processor_kwargs": {}, "tool_config_path": None,
    "function_tool_path": None,
}  # fmt: skip
# Unsupported keys of a row's multi_modal_data.
_UNSUPPORTED_MEDIA = ("video", "audio")
_PLAIN = (bool, int, float, str, bytes)


def custom_rows(data: DataConfig, files: Any, tokenizer: Any, max_rows: int) -> Rows:
    """Read at most ``max_rows`` (0 or less: all) rows of ``files`` by the class of ``data.custom_cls``.

    Raises ConfigError for an unusable class, with the user's traceback if it raises, and DataError for rows that lack
    required fields.
    """
    name = f"data.custom_cls={data.custom_cls} of {', '.join(as_list(files))}"
    dataset, count = _dataset(data, files, tokenizer, max_rows)
    # Limits the rows of a class that does not take max_samples. Other classes have already limited their rows.
    numbers = draw_rows(count, max_rows, data.seed if data.shuffle else None)
    folder = Path((as_list(files) or ["."])[0]).expanduser().absolute().parent
    records = (_record(dataset, row, data, name, folder) for row in numbers.tolist())
    return rows_of(records, name, numbers, keys=keys_of(data))


def class_config(data: DataConfig) -> DictConfig:
    """Return the section data in the form that verl's classes read, with ``own_keys`` merged in."""
    settings = asdict(data)
    own_keys = settings.pop("own_keys")
    for section, key, names in (
        ("custom_cls", data.custom_cls, ("path", "name")),
        ("sampler", data.sampler.name, ("class_path", "class_name")),
    ):
        path, colon, name = (key or "").rpartition(":")
        chosen = dict(zip(names, (path, name) if colon else (None, None), strict=True))
        settings[section] = chosen | (settings[section] if section == "sampler" else {})
    merged = OmegaConf.merge(_VERL_KEYS, settings, own_keys)
    assert isinstance(merged, DictConfig)
    return merged


def create_object(key: str, kind: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Create an object of the user's class, with those keyword arguments in ``arguments`` that it accepts.

    Raises ConfigError if it requires others, or raises.
    """
    parameters = inspect.signature(kind).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    needed = [
        name for name, parameter in named.items() if parameter.default is parameter.empty and name not in arguments
    ]
    if needed:
        raise ConfigError(f"{key}: the class needs {', '.join(needed)}; it gets {', '.join(arguments)}.")
    try:
        return kind(**{name: value for name, value in arguments.items() if takes_all or name in named})
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything; it is reported
        raise ConfigError(f"{key} cannot be created:\n{user_traceback(error)}") from None


def _dataset(data: DataConfig, files: Any, tokenizer: Any, max_rows: int) -> tuple[Any, int]:
    """Create the dataset by the class, or by a function. Returns it and its number of rows."""
    name = f"data.custom_cls={data.custom_cls}"
    kind = load_plugin("data.custom_cls", data.custom_cls or "")
    if hasattr(kind, "on_batch_end"):
        raise ConfigError(
            f"{name}: on_batch_end changes rows between steps, but rows are read once, before the first step. "
            "Remove it, or choose rows with a sampler (data.sampler.name)."
        )
    arguments = {"data_files": files, "tokenizer": tokenizer, "config": class_config(data), "processor": None}
    dataset = create_object(name, kind, arguments | {"max_samples": max_rows})
    missing = [method for method in ("__len__", "__getitem__") if not hasattr(dataset, method)]
    if missing:
        raise ConfigError(f"{name} has no {' and no '.join(missing)}: a dataset class needs both.")
    try:
        return dataset, len(dataset)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code
        raise ConfigError(f"{name} has no length:\n{user_traceback(error)}") from None


def _record(dataset: Any, row: int, data: DataConfig, name: str, folder: Path) -> dict[str, Any]:
    """Return the fields of one row: ``raw_prompt`` (or the prompt's column), columns of verl's files, and images."""
    try:
        item = dataset[row]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code
        raise ConfigError(f"{name}: row {row}:\n{user_traceback(error)}") from None
    if not isinstance(item, Mapping):
        raise DataError(f"{name}: row {row} is a {type(item).__name__}; it must be a dictionary.")
    messages = item.get("raw_prompt")
    messages = item.get(data.prompt_key) if messages is None else messages
    if messages is None:
        raise DataError(
            f"{name}: row {row} has neither 'raw_prompt' nor {data.prompt_key!r}; it has {', '.join(map(str, item))}. "
            "Messages are needed, because prompts are tokenised here; token ids of the class are not used."
        )
    media = item.get("multi_modal_data") or {}
    # Compare with None, because an array of several elements has no truth value.
    foreign = {medium: item.get(medium) for medium in ("videos", "audios")} | {
        medium: media.get(medium) for medium in _UNSUPPORTED_MEDIA
    }
    if kinds := [kind for kind, value in foreign.items() if value is not None and len(value)]:
        raise DataError(f"{name}: row {row} holds {', '.join(kinds)}: only images are supported.")
    images = next(
        (candidate for candidate in (item.get(data.image_key), media.get("image")) if candidate is not None), None
    )
    messages, inside = _extract_images(messages)
    listed = inside if images is None else list(images) if isinstance(images, list | tuple | np.ndarray) else [images]
    columns = (data.reward_fn_key, "reward_model", "ability", "extra_info", "agent_name")
    fields = {data.prompt_key: messages} | {column: item.get(column) for column in columns}
    plain = {column: _plain(value, f"{name}: row {row}: {column}") for column, value in fields.items()}
    try:
        return plain | {data.image_key: [_portable(image, folder) for image in listed]}
    except DataError as error:
        raise DataError(f"{name}: row {row}: an image: {error}") from error


def _extract_images(messages: Any) -> tuple[Any, list[Any]]:
    """Split messages with inline images, as verl's newer classes write them, into messages with slots and images."""
    images: list[Any] = []

    def slot_of(part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") != "image":
            return part
        images.extend(part[name] for name in ("image", "path", "bytes") if part.get(name) is not None)
        return {"type": "image"}

    def without_images(message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple | np.ndarray):
            return message
        return {**message, "content": [slot_of(part) for part in content]}

    bare_messages = list(map(without_images, messages)) if isinstance(messages, list | tuple | np.ndarray) else messages
    return bare_messages, images


def _portable(image: Any, folder: Path) -> Any:
    """Convert an image so that other processes can read it: the bytes of a file, or its absolute path."""
    if hasattr(image, "save"):  # a Pillow image
        file = BytesIO()
        open_image(image).save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}
    if not isinstance(image, str | bytes | Path | Mapping):
        raise DataError(f"it is a {type(image).__name__}; it must be a Pillow image, the bytes of a file, or a path.")
    (entry,) = image_entries(str(image) if isinstance(image, Path) else image, str(folder / "_"))
    return entry if entry.get("bytes") else {"path": str(entry.get("path"))}


def _plain(value: Any, where: str) -> Any:
    """Convert arrays, tensors and enum members to lists, numbers and texts, because other processes must read a row
    without the user's packages.
    """
    value = value.value if isinstance(value, Enum) else value
    if value is None:
        return None
    if kind := next((plain_type for plain_type in _PLAIN if isinstance(value, plain_type)), None):
        return kind(value)
    if isinstance(value, Mapping):
        return {str(_plain(key, where)): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), where)
    raise DataError(f"{where} is a {type(value).__name__}; a row may hold texts, numbers, lists and dictionaries.")


class RowTable(Sequence[dict[str, Any]]):
    """Training rows in the form that verl's samplers read: ``table[3]`` is a row, ``table["data_source"]`` a column."""

    def __init__(self, rows: Rows):
        self._rows = rows

    @property
    def dataframe(self) -> RowTable:
        """Return the table itself."""
        return self

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(_as_verl, self._rows)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, str):
            return [row[at] for row in self]
        return _as_verl(self._rows[operator.index(at)])


def _as_verl(row: PromptRow) -> dict[str, Any]:
    reward = {"style": row.reward_style, "ground_truth": row.ground_truth}
    fields: dict[str, Any] = {
        "data_source": row.data_source,
        "prompt": row.prompt,
        "raw_prompt": row.prompt,
        "ability": row.ability,
    }
    fields |= {"reward_model": reward, "extra_info": row.extra_info, "index": row.extra_info.get("index", 0)}
    return fields | ({"agent_name": row.agent_name} if row.agent_name else {})


def is_verl_sampler(sampler_class: Callable[..., Any]) -> bool:
    """Return whether a sampler class was written for verl."""
    return not {"data_source", "data_config"}.isdisjoint(inspect.signature(sampler_class).parameters)


class EpochSampler:
    """Batches from a sampler that was written for verl, which yields single rows and is iterated again for every epoch.

    As in verl, its rows are cut into batches, and the incomplete last batch of an epoch is dropped. A row that is
    repeated in a batch is used once, because random numbers depend on the row, so that the responses would be equal.
    """

    def __init__(self, key: str, kind: Callable[..., Any], data: DataConfig, order: BatchOrder, rows: Rows) -> None:
        self._sampler = create_object(key, kind, {"data_source": RowTable(rows), "data_config": class_config(data)})
        if callable(getattr(self._sampler, "update", None)):
            raise ConfigError(
                f"{key}: update(batch) reads verl's batch of tensors, which does not exist here. Write the class as "
                "docs/plugins.md shows: observe(rows, solved) reports to a sampler how its rows were solved."
            )
        if not hasattr(self._sampler, "__iter__"):
            raise ConfigError(f"{key} has no __iter__: a sampler yields the row numbers of an epoch.")
        self._key = key
        self._order = order
        self._numbers: Iterator[Any] = iter(())
        self._epoch, self._draws, self._check = -1, 0, 0

    @property
    def batches_per_epoch(self) -> int:
        """Batches per epoch from the sampler's length."""
        size = self._order.batch_size
        return len(self._sampler) // size if hasattr(self._sampler, "__len__") else self._order.steps_per_epoch

    def rows(self, draw: int) -> list[int]:
        """Return the next batch, or the first of a new epoch if too few rows are left."""
        batch = self._batch()
        if len(batch) < self._order.batch_size:
            self._epoch += 1
            self._numbers = iter(self._sampler)
            batch = self._batch()
        if len(batch) < self._order.batch_size:
            raise ConfigError(
                f"{self._key}: an epoch yields {len(batch)} different rows, fewer than "
                f"data.train_batch_size={self._order.batch_size}."
            )
        self._draws += 1
        self._check = zlib.crc32(np.array(batch, np.int64).tobytes(), self._check)
        return batch

    def _batch(self) -> list[int]:
        batch: dict[int, None] = {}
        for number in self._numbers:
            try:
                row = operator.index(number)
            except TypeError:
                row = -1
            if not 0 <= row < self._order.num_rows:
                raise ConfigError(
                    f"{self._key} yields {number!r}, which is not a row from 0 to {self._order.num_rows - 1}."
                )
            batch[row] = None
            if len(batch) == self._order.batch_size:
                break
        return list(batch)

    def epoch(self, draw: int) -> int:
        """Return the epoch of the latest batch."""
        return max(self._epoch, 0)

    def observe(self, rows: Sequence[int], solved: Sequence[float]) -> None:
        """Do nothing: verl's samplers do not depend on responses."""

    def state(self) -> dict[str, Any]:
        """Return the number of batches, and a checksum of their rows."""
        return {"draws": np.array(self._draws), "check": np.array(self._check)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Draw the earlier batches again, to continue after them."""
        while self._draws < int(state["draws"]):
            self.rows(self._draws)
        if self._check != int(state["check"]):
            log.warning(
                "%s names other rows than before the run was stopped: the next prompts differ from a run without the "
                "stop. It should draw its random numbers from data_config.seed.",
                self._key,
            )
