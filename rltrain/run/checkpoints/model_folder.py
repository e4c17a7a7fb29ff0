"""The model that a person names: a run, a checkpoint, a model folder, or a name on the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rltrain.base.errors import CheckpointError, ConfigError
from rltrain.base.logs import waiting
from rltrain.models.files.source import model_problem
from rltrain.run.checkpoints.folder import Checkpoints
from rltrain.run.checkpoints.foreign import describe_verl_checkpoint
from rltrain.run.checkpoints.manifest import find_damage, large_files
from rltrain.workers.node import altered

EXPORT = "huggingface"


@dataclass(frozen=True)
class Named:
    """What was named, and the model that is meant."""

    name: str
    """As somebody typed it."""
    path: str
    """Of the model: a folder, or a name on the hub."""
    is_adapter: bool = False


def find_model(name: str, key: str = "MODEL") -> Named:
    """The model of a run (its newest whole checkpoint), of a checkpoint, of a folder or of the hub.

    key: what the user has named it with.

    Raises CheckpointError for a checkpoint that is damaged or holds no model folder, ConfigError for what is no model.
    """
    folder = Path(name).expanduser()
    if (folder / "adapter_config.json").is_file():
        return Named(name, str(folder), is_adapter=True)
    step = find_step(folder)
    if step:
        return Named(name, str(whole_export(step)))
    if problem := model_problem(key, str(folder) if folder.is_dir() else name):
        raise ConfigError(problem)
    return Named(name, str(folder) if folder.is_dir() else name)


def find_step(folder: Path) -> Path | None:
    """The checkpoint that ``folder`` is, or of the run that it is the newest whole one. None where it is neither.

    Raises CheckpointError where no checkpoint of a run is whole, or ``folder`` is a checkpoint of verl's.
    """
    if (folder / "manifest.json").is_file() and (folder / "progress.json").is_file():
        return folder
    if foreign := describe_verl_checkpoint(folder):
        raise CheckpointError(f"{folder}: {foreign}.")
    run = Checkpoints(str(folder))
    return newest_whole(run, EXPORT) if run.steps() else None


def newest_whole(run: Checkpoints, part: str = "") -> Path | None:
    """`Checkpoints.newest`, of which the large files too (of the folder ``part``, if given) are as they were saved."""
    while step := run.newest():
        files = [entry for entry in large_files(step) if not part or entry[0].parent.name == part]
        with waiting(f"comparing {step} with its digests"):
            problems = altered(files)
        if not problems:
            break
        run.distrust(step, problems[0])
    return step


def whole_export(step: Path) -> Path:
    """The model folder in a checkpoint, whose files are as they were saved. Raises CheckpointError."""
    if problem := find_damage(step):
        raise CheckpointError(f"{step} is damaged: {problem}. Take another step, or copy it again.")
    if not (step / EXPORT / "config.json").is_file():
        raise CheckpointError(
            f"{step} holds no model folder: its run exported none (checkpoint.save_contents without hf_model). Name "
            "another step."
        )
    if problems := altered([entry for entry in large_files(step) if entry[0].parent.name == EXPORT]):
        raise CheckpointError(f"{step} is damaged: {problems[0]}. Take another step, or copy it again.")
    return step / EXPORT
