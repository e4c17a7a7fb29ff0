"""Training from Python, and what the command does once its settings are read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain import __version__, logs
from rltrain.config.check import check
from rltrain.config.effects import without_effect
from rltrain.config.load import LoadedConfig, load_config
from rltrain.errors import Interrupted
from rltrain.stop import Stop, listen

if TYPE_CHECKING:
    from rltrain.trainer.run import Trainer

log = logging.getLogger(__name__)
# What a run may be described by: a loaded configuration, a mapping (nested, or with dotted keys), key=value words, or a YAML file.
Settings = LoadedConfig | Mapping[str, Any] | Sequence[str] | str | Path


@dataclass(frozen=True)
class RunResult:
    """How a run ended. folder: the run folder. exit_code: 0, or 75 (SIGTERM) and 130 (Ctrl-C) where a signal has stopped it."""

    folder: Path
    exit_code: int


def train(config: Settings) -> RunResult:
    """Train as the command does: ``rltrain.train({"algorithm.adv_estimator": "grpo", ...})``.

    Checks the settings, says what has no effect, and goes on where an earlier run of the same folder ended. Raises RltrainError for what
    a user can mend; its text is what the command prints.
    """
    loaded = read(config)
    with listen() as stop:
        try:
            run(loaded, look_over(loaded), stop)
        except BaseException as error:
            # Ray makes errors of its own of what a signal handler raises.
            if not (stop.at_once or isinstance(error, Interrupted)):
                raise
            return RunResult(_folder(loaded), stop.exit_code)
    return RunResult(_folder(loaded), 0)


def build(config: Settings) -> Trainer:
    """A trainer with its workers started and its models loaded, for single steps; use it as a context. Raises RltrainError."""
    from rltrain.trainer.build import build as put_together  # torch and Ray take seconds

    loaded = read(config)
    with logs.session():
        for note in look_over(loaded):
            log.warning("note: %s", note)
        return put_together(loaded)


def read(config: Settings) -> LoadedConfig:
    """The configuration in any of its forms, loaded. Raises ConfigError."""
    if isinstance(config, LoadedConfig):
        return config
    if isinstance(config, Mapping):
        return load_config([], [config])
    return load_config([], [str(config)]) if isinstance(config, str | Path) else load_config(config)


def look_over(loaded: LoadedConfig) -> list[str]:
    """Raise ConfigError with every rule that the settings break; returns what is said of those that change nothing."""
    check(loaded)
    return [*loaded.warnings, *without_effect(loaded)]


def run(loaded: LoadedConfig, notes: Sequence[str], stop: Stop) -> None:
    """Say what is about to run and run it. Raises RltrainError, and Interrupted where ``stop`` has ended it."""
    with logs.session():
        trainer, model = loaded.config.trainer, loaded.config.actor_rollout_ref.model.path
        devices = logs.count(trainer.nnodes * trainer.n_gpus_per_node, "device")
        log.info(
            "rltrain %s: %s on %s (%s); run folder %s", __version__, model, devices, trainer.device, _folder(loaded)
        )
        for note in notes:
            log.warning("note: %s", note)
        from rltrain.report import show_report
        from rltrain.trainer.build import build as put_together  # torch and Ray take seconds

        with put_together(loaded, stop) as made:
            finished = made.fit()
        if not finished:
            raise stop.interrupted()
        show_report(made.folder)


def _folder(loaded: LoadedConfig) -> Path:
    return Path(loaded.config.trainer.default_local_dir).expanduser().resolve()
