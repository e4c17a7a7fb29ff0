"""``python -m rltrain.replay INCIDENT [key=value ...]``: a mini-batch that was not finite, once more on one device.

It calls the update that the run called, with the weights and samples of all ranks, and then sample by sample, at a
learning rate of 0. Keys change how: ``actor_rollout_ref.actor.fsdp_config.compute_dtype=float32`` shows whether it is
the precision, ``trainer.device=cpu`` needs no accelerator. An incident may be somebody else's: code that its
configuration names is run only where the command names it too; reward functions, callbacks and the like never are.
Exit code 70: it is not finite here either; 0: it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rltrain.base.columns import names as c
from rltrain.base.columns.batch import Batch
from rltrain.base.columns.ragged import Ragged
from rltrain.base.device import get_device, load_backend
from rltrain.base.errors import ConfigError, DataError, NonFiniteError, command
from rltrain.base.plugin import is_plugin
from rltrain.config.budgets import ranks_per_sequence
from rltrain.config.load import load_config
from rltrain.config.loaded import LoadedConfig
from rltrain.config.passes import PASSES
from rltrain.config.schema.declarations import ESTIMATOR_KEY, LOSS_KEY
from rltrain.config.schema.keys import get
from rltrain.config.step_passes import make_step_passes
from rltrain.models.files.source import model_problem
from rltrain.models.weights.spec import actor_spec, critic_spec
from rltrain.workers.actor_ref import ActorRefWorker
from rltrain.workers.critic import CriticWorker
from rltrain.workers.incidents import CONFIG, WEIGHTS, Incident, read
from rltrain.workers.residency import Residency
from rltrain.workers.results import UpdateNumbers
from rltrain.workers.tasks import MiniBatch, UpdateTask

# One process on one device, whatever the run had; a loss that is not finite is counted and not raised.
_ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "distillation.teacher", "critic")
_ALONE = ["trainer.nnodes=1", "trainer.n_gpus_per_node=1", "trainer.on_nonfinite=skip"]
_ALONE += [f"{role}.ulysses_sequence_parallel_size=1" for role in _ROLES]
# The keys by which an update runs code that is not rltrain's, and values by which it does not.
_CODE = {
    ESTIMATOR_KEY: "gae",
    LOSS_KEY: "vanilla",
    "actor_rollout_ref.model.trust_remote_code": "False",
    "critic.model.trust_remote_code": "False",
}


def replay(folder: Path, changes: list[str]) -> tuple[str, bool]:
    """What to print, and whether it is not finite here either. Raises RltrainError."""
    if not (folder / CONFIG).exists():
        raise DataError(f"{folder} has no {CONFIG}. Give a folder incidents/nonfinite_… of a run.")
    _refuse_code(folder / CONFIG, changes)
    parts = read(folder)
    config = load_config([], [str(folder / CONFIG)]).config
    # Ranks that share sequences have the same samples.
    parts = parts[:: ranks_per_sequence(config, PASSES[f"update_{parts[0].role}"].keys)]
    loaded = load_config([*_ALONE, *changes], [str(folder / CONFIG)])
    device = get_device(loaded.config.trainer.device)
    if not device.count:
        raise ConfigError(f"trainer.device={device.kind}: this machine has none. Add trainer.device=cpu.")
    spec = (critic_spec if parts[0].role == "critic" else actor_spec)(loaded.config, device)
    if problem := model_problem(f"{spec.section}.path", spec.path):
        raise ConfigError(problem)
    device.activate()
    load_backend(device.backend)
    own_group = not dist.is_initialized()
    if own_group:
        dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        return _replayed(folder, parts, loaded, Residency(device))
    finally:
        if own_group:
            dist.destroy_process_group()


def _refuse_code(file: Path, changes: list[str]) -> None:
    """Raise ConfigError where the file names code that the command does not."""
    # First without code, because the rules of a configuration that has other problems would run it.
    load_config([f"{key}={value}" for key, value in _CODE.items()], [str(file)])
    config = load_config([], [str(file)]).config
    values = {key: str(get(config, key)) for key in _CODE.keys() - {word.partition("=")[0] for word in changes}}
    if settings := [f"{key}={value}" for key, value in sorted(values.items()) if is_plugin(value) or value == "True"]:
        raise ConfigError(
            f"{file} names code that an update runs. If you trust it, add to the command: {' '.join(settings)}"
        )


def _replayed(folder: Path, parts: list[Incident], loaded: LoadedConfig, residency: Residency) -> tuple[str, bool]:
    first, cfg = parts[0], loaded.config
    images = any(c.IMAGES in part.batch for part in parts)
    passes = make_step_passes(cfg, images, images)
    worker: Any
    if first.role == "critic":
        worker = CriticWorker(cfg, passes, residency)
    else:
        worker = ActorRefWorker(cfg, passes, residency)
    whose = "the model's first weights, as the incident has none: they may be others"
    if (folder / WEIGHTS).exists():
        worker.load(str(folder / WEIGHTS), True)
        whose = "the weights of the incident"
    if scale := worker.updater.loss_scale:
        scale.rest()
    having = [part for part in parts if len(part.batch)]
    batch = Batch.concat([part.batch for part in having])
    whole = replace(first.mini, micro_sizes=tuple(size for part in having for size in part.mini.micro_sizes))
    numbers = _update(worker, first, batch, [whole])
    alone = _update(worker, first, batch, [replace(whole, micro_sizes=(1,))] * len(batch))
    loss = numbers.shares.get("loss", [float("nan")])[0]
    bad = [number for number, skipped in enumerate(alone.skipped.tolist()) if skipped]
    failed = bool(numbers.skipped[0])
    cut = f"{len(whole.micro_sizes)} micro-batches of {len(parts)} ranks"
    lines = [
        f"{first.role}: {len(batch)} samples in {cut}, with {whose}",
        f"loss {loss:.6g}, gradient norm {numbers.grad_norm[0]:.6g}: {'NOT finite' if failed else 'finite here'}",
        *(f"column {line}" for line in _columns(batch)),
    ]
    if bad:
        origin = [f"{part.rank}/{place}" for part in having for place in range(len(part.batch))]
        named = ", ".join(origin[number] for number in bad[:20])
        lines.append(f"not finite by itself: {len(bad)} of {len(batch)} samples (rank/place: {named})")
    elif failed:
        lines.append("every sample is finite by itself: their sum is not")
    return "\n".join(lines) + "\n", failed


def _update(worker: Any, first: Incident, batch: Batch, minis: list[MiniBatch]) -> UpdateNumbers:
    """The update of the run. With a learning rate of 0 a step that is made changes no weight."""
    if first.role == "critic":
        return worker.update(batch, minis, 0.0)
    return worker.update(batch, UpdateTask(tuple(minis), 0.0, **first.terms))


def _columns(batch: Batch) -> Iterator[str]:
    """Columns of numbers that are not finite, or so large that their squares are not."""
    for name, column in batch.items():
        values = column.values if isinstance(column, Ragged) else column
        if isinstance(values, torch.Tensor) and values.is_floating_point() and values.numel():
            wrong = int((~values.isfinite()).sum())
            largest = float(values.nan_to_num(0.0, 0.0, 0.0).abs().max())
            if wrong or largest > 1e15:
                yield f"{name}: {wrong} of {values.numel()} values are not finite, the largest other is {largest:.4g}"


@command
def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if not words or "=" in words[0] or words[0] in ("-h", "--help"):
        sys.stdout.write("usage: python -m rltrain.replay RUN/incidents/nonfinite_… [key=value ...]\n")
        return 0 if words and words[0] in ("-h", "--help") else DataError.exit_code
    text, failed = replay(Path(words[0]), words[1:])
    sys.stdout.write(text)
    return NonFiniteError.exit_code if failed else 0


if __name__ == "__main__":
    sys.exit(main())
