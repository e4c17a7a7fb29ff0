"""Parsed arguments of ``rltrain evaluate``: models, data, number of responses, folder of the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rltrain.common.errors import ConfigError
from rltrain.config.load import flat, load_config, to_dict
from rltrain.config.loaded import LoadedConfig
from rltrain.data.files import files_of
from rltrain.models.files.digest import digest_of_files, digests_of_values
from rltrain.tools.evaluate.arguments import split_arguments
from rltrain.tools.evaluate.models import Model, models_of

# Settings that determine responses and scores. All others may change when an evaluation is resumed.
_COMPARED = ("data.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout.", "reward", "custom_reward_function.")
_NOT_COMPARED = {
    "data.train_files", "data.train_max_samples", "data.train_batch_size", "data.gen_batch_size", "data.val_files",
    *(f"actor_rollout_ref.rollout.{name}" for name in (
        "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "gpu_memory_utilization", "max_num_seqs",
        "max_num_batched_tokens",
        "enforce_eager", "free_cache_engine",
    )),
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    models: list[Model]
    data: list[str]
    words: list[str]
    """Keys of the trainer."""
    files: list[str]
    """Configuration files."""
    out: Path | None

    @property
    def run_settings(self) -> dict[str, Any]:
        """Settings of the models' run, for all models. Raises ConfigError if two runs differ."""
        own = {word.partition("=")[0] for word in self.words}
        runs = [model for model in self.models if model.run_settings is not None]
        for model in runs[1:]:
            first, other = runs[0].run_settings or {}, model.run_settings or {}
            for name in sorted((first.keys() | other.keys()) - own):
                if first.get(name) != other.get(name):
                    raise ConfigError(
                        f"{name} is {_said(first, name)} in the run of {runs[0].named} but {_said(other, name)} in "
                        f"the run of {model.named}. Set it in the command, so that all models use the same value."
                    )
        return (runs[0].run_settings or {}) if runs else {}

    def run_settings_in_use(self, loaded: LoadedConfig) -> list[str]:
        """Return the settings of the run that neither the command nor its files replace, as key=value."""
        values = flat(to_dict(loaded.config))
        return [f"{key}={value}" for key, value in self.run_settings.items() if values.get(key) == value]

    @property
    def root(self) -> Path:
        """The folder of all results."""
        return self.out or self.models[0].output_folder

    def folder(self, model: Model) -> Path:
        """Return the folder of the results of one model."""
        return self.out if self.out and len(self.models) == 1 else self.root / model.name

    def settings(self, model: Model) -> LoadedConfig:
        """Return the settings of a run that only validates. Raises ConfigError."""
        own = {
            **model.settings,
            "data.val_files": self.data,
            "trainer.val_only": True,
            "trainer.default_local_dir": str(self.folder(model) / "run"),
            "trainer.samples_freq": 1,
            "trainer.logger": ["console"],
        }
        own.setdefault("trainer.resume_mode", "disable")
        loaded = load_config(self.words, [self.run_settings, *self.files, own])
        loaded = replace(loaded, written={**loaded.written, "data.val_files": "data"})
        answers = loaded.config.actor_rollout_ref.rollout.val_kwargs
        if answers.greedy and answers.n > 1:
            raise ConfigError(
                f"n={answers.n}: responses are greedy (temperature={answers.temperature:g}), so all {answers.n} to a "
                "prompt would be equal. Add temperature=1.0 (or another), or remove n."
            )
        return loaded


def _said(settings: dict[str, Any], key: str) -> str:
    return str(settings[key]) if key in settings else "the default"


def read_request(words: Sequence[str], files: Sequence[str], problems: Sequence[str]) -> Request:
    """Parse the words of a command. Raises ConfigError with all their errors, and as `models_of` does."""
    own, rest = split_arguments(words, problems)
    out = Path(own.out).expanduser().resolve() if own.out else None
    return Request(models_of(own.model), own.data, rest, list(files), out)


def identity(model: Model, loaded: LoadedConfig) -> dict[str, Any]:
    """Return the settings and file digests that a resumed evaluation must match."""
    cfg = loaded.config
    settings = {
        key: value
        for key, value in flat(to_dict(cfg)).items()
        if key.startswith(_COMPARED) and key not in _NOT_COMPARED
    }
    files = [file for name in cfg.data.val_files or () for file in files_of(name)]
    facts: dict[str, Any] = {"model": model.identity(), "data": digest_of_files(files)}
    return facts | digests_of_values(settings) | settings
