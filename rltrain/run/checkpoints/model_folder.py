"""Lookup of the model that a user names: a run, a checkpoint, a model folder, or a name on the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rltrain.common.errors import CheckpointError, ConfigError
from rltrain.common.logs import waiting
from rltrain.models.files.source import model_problem
from rltrain.run.checkpoints.folder import Checkpoints
from rltrain.run.checkpoints.foreign import describe_verl_checkpoint
from rltrain.run.checkpoints.manifest import find_damage, large_files
from rltrain.workers.diagnostics.node import checksum_mismatches

EXPORT = "huggingface"


@dataclass(frozen=True)
class Named:
    """A model as named by the user, and the model it refers to."""

    name: str
    """The name as typed."""
    path: str
    """Path of the model: a folder, or a name on the hub."""
    is_adapter: bool = False


def find_model(name: str, key: str = "MODEL") -> Named:
    """Return the model of a run (its newest complete checkpoint), a checkpoint, a folder or the hub.

    key: the argument or config key that the user has set. Raises CheckpointError for a checkpoint that is damaged or
    contains no model folder, ConfigError if ``name`` is not a model.
    """
    folder = Path(name).expanduser()
    if (folder / "adapter_config.json").is_file():
        return Named(name, str(folder), is_adapter=True)
    step = find_step(folder)
    if step:
        return Named(name, str(complete_export(step)))
    if problem := model_problem(key, str(folder) if folder.is_dir() else name):
        raise ConfigError(problem)
    return Named(name, str(folder) if folder.is_dir() else name)


def find_step(folder: Path) -> Path | None:
    """Return ``folder`` if it is a checkpoint, the newest complete checkpoint if it is a run, or None.

    Raises CheckpointError if no checkpoint of a run is complete, or if ``folder`` is a checkpoint of verl.
    """
    if (folder / "manifest.json").is_file() and (folder / "progress.json").is_file():
        return folder
    if foreign := describe_verl_checkpoint(folder):
        raise CheckpointError(f"{folder}: {foreign}.")
    run = Checkpoints(str(folder))
    return newest_complete(run, EXPORT) if run.steps() else None


def newest_complete(run: Checkpoints, part: str = "") -> Path | None:
    """Return the newest checkpoint, checking the digests of its large files too.

    part: check only the large files in this folder of the checkpoint.
    """
    while step := run.newest():
        files = [entry for entry in large_files(step) if not part or entry[0].parent.name == part]
        with waiting(f"comparing {step} with its digests"):
            problems = checksum_mismatches(files)
        if not problems:
            break
        run.distrust(step, problems[0])
    return step


def complete_export(step: Path) -> Path:
    """Return the model folder in a checkpoint, after checking its files. Raises CheckpointError."""
    if problem := find_damage(step):
        raise CheckpointError(f"{step} is damaged: {problem}. Use another step, or copy this one again.")
    if not (step / EXPORT / "config.json").is_file():
        raise CheckpointError(
            f"{step} holds no model folder: its run did not export one (checkpoint.save_contents without "
            "hf_model). Name another step."
        )
    if problems := checksum_mismatches([entry for entry in large_files(step) if entry[0].parent.name == EXPORT]):
        raise CheckpointError(f"{step} is damaged: {problems[0]}. Use another step, or copy this one again.")
    return step / EXPORT
