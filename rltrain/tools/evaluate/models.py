"""The models that ``model=`` names: Hugging Face folders and hub names, checkpoints of a run, and run folders."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from yaml import YAMLError, safe_load

from rltrain.common.errors import CheckpointError, ConfigError, first_line
from rltrain.common.secrets import MASK
from rltrain.common.storage import patiently, read_json
from rltrain.config.load import default_values
from rltrain.models.files.digest import digest_of_model
from rltrain.models.files.source import model_problem
from rltrain.run.checkpoints.folder import Checkpoints
from rltrain.run.checkpoints.manifest import MANIFEST, checkpoint_digest, find_damage, read_record
from rltrain.run.checkpoints.model_folder import newest_complete

_MODEL = "actor_rollout_ref.model."
# Keys that determine a run's validation, apart from its engine and devices.
_OF_VALIDATION = (
    "data.", "reward.", "reward_model.", "custom_reward_function.", f"{_MODEL}custom_chat_template",
    f"{_MODEL}external_lib", "actor_rollout_ref.rollout.val_kwargs.", "actor_rollout_ref.rollout.multi_turn.",
    "actor_rollout_ref.rollout.agent.",
)  # fmt: skip
_OF_TRAINING = {
    "data.train_files", "data.train_max_samples", "data.train_batch_size", "data.gen_batch_size", "data.val_files",
    "data.val_max_samples", "data.sampler.name", "data.shuffle",
}  # fmt: skip
_STEP = re.compile(r"global_step_\d+")
_EXPORT, _TOKENIZER = "huggingface", "tokenizer.json"


@dataclass(frozen=True)
class Model:
    """One model to evaluate."""

    name: str
    """Unique name for tables and folders."""
    named: str
    """The user's argument, or the path that it expands to."""
    folder: Path | None
    """Local folder; None for a name on the hub."""
    step: int | None = None
    """Step of a checkpoint."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The keys by which a run loads the model."""
    run_settings: dict[str, Any] | None = None
    """Validation settings of the run that trained it (None if unknown), which settings of the command override."""

    @property
    def output_folder(self) -> Path:
        """The folder for evaluations next to the model."""
        if not self.folder:
            return Path.cwd() / "evaluation"
        # The folder is not inside a checkpoint, because it would be deleted with the checkpoint.
        is_export = self.folder.name == _EXPORT and (self.folder.parent / MANIFEST).is_file()
        return (self.folder.parent if is_export else self.folder).parent / "evaluation"

    def identity(self) -> str:
        """Return a digest of the model's files except model cards; for a hub name, the name."""
        if not self.folder:
            return self.named
        if self.step is not None:
            return checkpoint_digest(self.folder)
        return digest_of_model(self.folder)


def models_of(words: Sequence[str]) -> list[Model]:
    """Return the models of paths, patterns and hub names. Raises ConfigError or CheckpointError for other words."""
    models = [_model(name) for word in words for name in expand_pattern(word)]
    names, typed = [model.name for model in models], [model.named for model in models]
    if again := next((name for name in typed if typed.count(name) > 1), None):
        raise ConfigError(f"model={','.join(words)} names {again} twice.")
    # Checkpoints of the same step of two runs are distinguished by the shortest suffixes of their paths.
    return [
        replace(model, name=_distinct_name(model, models)) if model.folder and names.count(model.name) > 1 else model
        for model in models
    ]


def _distinct_name(model: Model, models: Sequence[Model]) -> str:
    folder = model.folder
    assert folder
    others = [other.folder for other in models if other.folder and other is not model]
    for length in range(1, len(folder.parts)):
        end = folder.parts[-length:]
        if all(other.parts[-length:] != end for other in others):
            return "_".join(end)
    return "_".join(folder.parts[1:])


def expand_pattern(word: str, key: str = "model") -> list[str]:
    """Return the folders that match a pattern, in numerical order; any other word unchanged."""
    path = Path(word).expanduser()
    if path.exists() or not glob.has_magic(word):
        return [str(path) if path.exists() else word]
    folders = [name for name in glob.glob(str(path)) if Path(name).is_dir()]
    if not folders:
        raise ConfigError(f"{key}={word}: no folder matches this pattern.")
    return sorted(
        folders, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    )


def _model(name: str) -> Model:
    folder = Path(name).resolve()
    if folder.is_dir() and not (folder / "config.json").is_file():
        if _STEP.fullmatch(folder.name) or (folder / MANIFEST).is_file():
            return _checkpoint(folder)
        run = Checkpoints(name)
        if run.steps() and (newest := newest_complete(run)):
            return _checkpoint(newest)
    if problem := model_problem("model", name):
        hint = " A run folder has checkpoints in folders global_step_N." if folder.is_dir() else ""
        raise ConfigError(problem + hint)
    if folder.is_dir():
        step = folder.parent.name if folder.name == _EXPORT else ""
        return Model(f"{step}_{folder.name}".lstrip("_"), name, folder, None, {f"{_MODEL}path": name})
    return Model(name.replace("/", "_"), name, None, None, {f"{_MODEL}path": name})


def _checkpoint(folder: Path) -> Model:
    """Return a checkpoint, whose weights are shards or adapters; the original model is needed to load them."""
    if problem := find_damage(folder):
        raise CheckpointError(f"model={folder} cannot be evaluated: {problem}.")
    record = read_record(folder)
    frozen = record.get("frozen")
    settings = (
        {key: value for key, value in frozen.items() if key.startswith(_MODEL)} if isinstance(frozen, dict) else {}
    )
    start = str((read_json(folder.parent / "env.json") or {}).get("started_in", ""))
    settings = {key: _from_start(start, key, value) for key, value in settings.items()}
    base = str(settings.get(f"{_MODEL}path"))
    if problem := model_problem(f"{_MODEL}path", base):
        raise CheckpointError(
            f"model={folder} was trained from {base}, whose configuration and tokenizer it needs: {problem} "
            f"Restore it, or evaluate the exported weights: model={folder / _EXPORT}."
        )
    _refuse_other_tokens(folder, base)
    settings |= {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(folder)}
    settings["trainer.resume_weights_only"] = False
    return Model(
        folder.name, str(folder), folder, record["global_step"], settings, _validation_of(folder.parent, start)
    )


def _from_start(start: str, key: str, value: Any) -> Any:
    """Make a relative path, or FILE.py:NAME, absolute if it exists in ``start``, where the run was started."""
    paths = [value, value.rpartition(":")[0]] if start and isinstance(value, str) else []
    if any(os.path.exists(os.path.join(start, path)) for path in paths if Path(path).suffix or key.endswith("path")):
        return os.path.join(start, value)
    return [_from_start(start, key, part) for part in value] if isinstance(value, list) else value


def _validation_of(run: Path, start: str) -> dict[str, Any] | None:
    """Return the settings of a run's validation that differ from the defaults."""
    try:
        text = (run / "config.yaml").read_text("utf-8")
        given, defaults = flat(safe_load(text)), flat(default_values())
    except (FileNotFoundError, YAMLError):
        return None
    return {
        key: _from_start(start, key, value)
        for key, value in given.items()
        if key.startswith(_OF_VALIDATION) and key not in _OF_TRAINING and value != defaults.get(key) and value != MASK
    }


def _refuse_other_tokens(folder: Path, base: str) -> None:
    """Raise CheckpointError if the base model's tokenizer differs from the exported one, which the weights need."""
    files = [folder / _EXPORT / _TOKENIZER, Path(base) / _TOKENIZER]
    if not all(file.is_file() for file in files):
        return
    ours, theirs = (_tokens(file) for file in files)
    if differ := sorted(index for index, token in ours.items() if theirs.get(index, token) != token):
        first = differ[0]
        raise CheckpointError(
            f"model={folder}: its token {first} is {ours[first]!r}, and that of {base}, from which it was trained, is "
            f"{theirs[first]!r} now; {len(differ):,} differ. Restore the tokenizer, or evaluate the exported weights: "
            f"model={folder / _EXPORT}."
        )


def _tokens(file: Path) -> dict[int, str]:
    try:
        vocabulary = Tokenizer.from_str(patiently(file, lambda: file.read_text("utf-8"))).get_vocab()
    except Exception as error:  # noqa: BLE001 - the package raises plain exceptions
        raise CheckpointError(f"{file} cannot be read ({first_line(error)}). Copy it again.") from None
    return {index: token for token, index in vocabulary.items()}


def flat(tree: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted name, with their values as in JSON."""
    if isinstance(tree, dict) and tree:
        return {key: value for part, below in tree.items() for key, value in flat(below, f"{name}.{part}").items()}
    return {name.lstrip("."): json.loads(json.dumps(tree, default=str))}
