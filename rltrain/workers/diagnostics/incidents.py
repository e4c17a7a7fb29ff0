"""Dump of a mini-batch with a non-finite loss or gradient, as tensors and numbers (docs/recovery.md: how to load it).

It includes the trained weights of the last optimizer step, because no checkpoint has them, and a batch is often useless
without them. They take 4 bytes each (with LoRA only the adapters) and are skipped if disk space is short. Left out:
random states, which only matter for models with dropout.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.data.images import PromptImages
from rltrain.models.forward import PackedModel
from rltrain.models.weights.shard import reshard
from rltrain.models.weights.state import save_training_state
from rltrain.runtime.exchange import gather_json
from rltrain.workers.interface.tasks import MiniBatch

log = logging.getLogger(__name__)
_FREE_BYTES = 2**28  # reserved on the disk for logs
_WEIGHTS, _CONFIG = "weights", "config.yaml"


def write_incident(
    run: Path, role: str, micros: Sequence[Batch], mini: MiniBatch, terms: Mapping[str, float], model: PackedModel
) -> str:
    """Write the dump below ``run``/incidents (a collective). Returns a sentence for the error message that names the
    folder and the page on loading it."""
    # The folder is named by the clock of one rank, because step numbers repeat after a resume.
    named = gather_json(f"nonfinite_{role}_{time.strftime('%Y%m%d_%H%M%S')}")
    folder = run / "incidents" / named[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        non_empty = [micro for micro in micros if len(micro)]
        record = {
            "rank": dist.get_rank(), "world": dist.get_world_size(), "terms": dict(terms),
            "denominators": asdict(mini.denominators),
            "samples": _samples(Batch.concat(non_empty)) if non_empty else [],
        }  # fmt: skip
        torch.save(record, folder / f"rank_{dist.get_rank()}.pt")
        if dist.get_rank() == 0 and (run / _CONFIG).exists():
            shutil.copy(run / _CONFIG, folder / _CONFIG)
        sentence = f"It is kept in {folder} (docs/recovery.md shows how to load it)."
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError on a full disk
        sentence = f"The mini-batch could not be kept in {folder} ({str(error).splitlines()[0]})."
    _keep_weights(model, folder)
    return sentence


def _keep_weights(model: PackedModel, folder: Path) -> None:
    reshard(model)
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.requires_grad)
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    # Nodes may report different free space; either all of them write or none does.
    has_room = torch.tensor(int(free > size + _FREE_BYTES))
    dist.all_reduce(has_room, dist.ReduceOp.MIN)
    try:
        if has_room:
            save_training_state(model, None, str(folder / _WEIGHTS))
            return
        reason = f"they need {size / 2**30:.1f} GiB"
    except Exception as error:  # noqa: BLE001 - the error that is being reported matters more
        reason = str(error)
    log.warning("the weights of the incident could not be kept: %s", reason)


def _samples(batch: Batch) -> list[dict[str, Any]]:
    """Return one dictionary per sample: tensors and numbers, which are read back without running code."""
    rows_of = {name: _rows(column) for name, column in batch.items()}
    return [dict(zip(rows_of, values, strict=True)) for values in zip(*rows_of.values(), strict=True)]


def _rows(column: Any) -> list[Any]:
    if isinstance(column, DictionaryColumn):
        values = _rows(column.values)
        return [values[row] for row in column.index.tolist()]
    if isinstance(column, Ragged):
        return list(column.values.cpu().split(column.lengths.tolist()))
    if isinstance(column, Tensor):
        return list(column.cpu())
    return [_plain(value) for value in column]


def _plain(value: Any) -> Any:
    if not isinstance(value, PromptImages):
        return value
    return {name: None if part is None else torch.from_numpy(part) for name, part in vars(value).items()}
