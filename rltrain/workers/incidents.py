"""A mini-batch whose loss or gradient is not finite, on disk with all that `python -m rltrain.replay` needs of it.

The trained weights are part of it: they are those of the last optimizer step, which no checkpoint has, and a batch
often tells nothing without them. They take 4 bytes each (of adapters alone under LoRA), and are left out where the disk
has no room. Left out too: random numbers, which matter where the model has dropout.
"""

from __future__ import annotations

import logging
import pickle
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.aggregation import Denominators
from rltrain.base.columns.batch import Batch, DictionaryColumn
from rltrain.base.columns.ragged import Ragged
from rltrain.base.errors import DataError
from rltrain.data.images import PromptImages
from rltrain.models.forward import PackedModel
from rltrain.models.weights.shard import reshard
from rltrain.models.weights.state import save_training_state
from rltrain.workers.tasks import MiniBatch

log = logging.getLogger(__name__)
_FREE_BYTES = 2**28  # left on the disk for logs
WEIGHTS, CONFIG = "weights", "config.yaml"


@dataclass(frozen=True)
class Incident:
    """One rank's part."""

    role: str
    rank: int
    world: int
    batch: Batch
    """Its micro-batches, one after another."""
    mini: MiniBatch
    terms: dict[str, Any]
    """Further fields of the task, by name."""


def write_incident(
    run: Path, role: str, micros: Sequence[Batch], mini: MiniBatch, terms: Mapping[str, float], model: PackedModel
) -> str:
    """Write it (a collective) below ``run``/incidents. Returns a sentence that says where it is and what to type."""
    # A name of one rank's clock, as no number of a resumed run tells its incidents from those before.
    named = [f"nonfinite_{role}_{time.strftime('%Y%m%d_%H%M%S')}"]
    dist.broadcast_object_list(named, 0, device=torch.device("cpu"))
    folder = run / "incidents" / named[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        having = [micro for micro in micros if len(micro)]
        record = {
            "role": role, "rank": dist.get_rank(), "world": dist.get_world_size(), "terms": dict(terms),
            "sizes": [len(micro) for micro in having], "denominators": asdict(mini.denominators),
            "has_old_log_probs": mini.has_old_log_probs, "batch": _plain(Batch.concat(having)) if having else {},
        }  # fmt: skip
        torch.save(record, folder / f"rank_{dist.get_rank()}.pt")
        if dist.get_rank() == 0 and (run / CONFIG).exists():
            shutil.copy(run / CONFIG, folder / CONFIG)
        sentence = f"It is kept: python -m rltrain.replay {folder} computes it again on one device."
    except (OSError, RuntimeError) as error:  # torch raises the second on a full disk
        sentence = f"The mini-batch could not be kept in {folder} ({str(error).splitlines()[0]})."
    _keep_weights(model, folder)
    return sentence


def _keep_weights(model: PackedModel, folder: Path) -> None:
    reshard(model)
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.requires_grad)
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    # Nodes may differ in what they see of the disk, and all of them write or none does.
    has_room = torch.tensor(int(free > size + _FREE_BYTES))
    dist.all_reduce(has_room, dist.ReduceOp.MIN)
    try:
        if has_room:
            save_training_state(model, None, str(folder / WEIGHTS))
            return
        reason = f"they need {size / 2**30:.1f} GiB"
    except Exception as error:  # noqa: BLE001 - the error that is being reported matters more
        reason = str(error)
    log.warning("the weights of the incident could not be kept: %s", reason)


def read(folder: Path) -> list[Incident]:
    """The parts of all ranks. Raises DataError for a folder that is none, or lacks some. No code of it is run."""
    files = sorted(folder.glob("rank_*.pt"), key=lambda file: (len(file.name), file.name))
    try:
        incidents = [_incident(torch.load(file, weights_only=True)) for file in files]
    # Damaged bytes make torch raise almost anything.
    except Exception as error:
        # What torch says of the first kind is how to run what a file holds.
        unsafe = isinstance(error, pickle.UnpicklingError)
        cause = "a rank_N.pt is damaged, or holds more than tensors and numbers" if unsafe else error
        raise DataError(f"{folder} cannot be read: {cause}") from error
    if not incidents or [incident.rank for incident in incidents] != list(range(incidents[0].world)):
        have = f"{len(incidents)} of {incidents[0].world}" if incidents else "no"
        raise DataError(
            f"{folder} holds {have} rank_N.pt. Give a folder incidents/nonfinite_… of a run; copy all files of it."
        )
    return incidents


def _incident(record: dict[str, Any]) -> Incident:
    mini = MiniBatch(tuple(record["sizes"]), Denominators(**record["denominators"]), record["has_old_log_probs"])
    batch = Batch({name: _restored(value) for name, value in record["batch"].items()})
    return Incident(record["role"], record["rank"], record["world"], batch, mini, record["terms"])


def _plain(value: Any) -> Any:
    """Tensors, lists and dictionaries, which are read back without running code."""
    if isinstance(value, Batch):
        return {name: _plain(column) for name, column in value.items()}
    if isinstance(value, Ragged):
        return {"values": value.values.cpu(), "lengths": value.lengths}
    if isinstance(value, DictionaryColumn):
        return {"index": value.index.cpu(), "of": _plain(value.values)}
    if isinstance(value, PromptImages):
        return {name: None if part is None else torch.from_numpy(part) for name, part in vars(value).items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value.cpu() if isinstance(value, Tensor) else value


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"values", "lengths"}:
        return Ragged(value["values"], value["lengths"])
    if value.keys() == {"index", "of"}:
        return DictionaryColumn(_restored(value["of"]), value["index"])
    arrays: dict[str, Any] = {name: None if part is None else np.asarray(part) for name, part in value.items()}
    return PromptImages(**arrays)
