"""Training from Python, and what the command does once its settings are read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rltrain import __version__, logs
from rltrain.config.check import check
from rltrain.config.effects import without_effect
from rltrain.config.load import LoadedConfig
from rltrain.errors import Interrupted
from rltrain.stop import Stop, listen

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """How a run ended. folder: the run folder. exit_code: 0, or 75 (SIGTERM) and 130 (Ctrl-C) where a signal has stopped it."""

    folder: Path
    exit_code: int


def run_training(loaded: LoadedConfig) -> RunResult:
    """Train as the command does: ``rltrain.run_training(rltrain.load_config(["key=value", ...]))``.

    Checks the settings, says what has no effect, and goes on where an earlier run of the same folder ended. Raises RltrainError for what
    a user can mend; its text is what the command prints.
    """
    with listen() as stop:
        try:
            exit_code = train(loaded, look_over(loaded), stop)
        except BaseException as error:
            # Ray makes errors of its own of what a signal handler raises.
            if not (stop.at_once or isinstance(error, Interrupted)):
                raise
            exit_code = stop.exit_code
    return RunResult(_folder(loaded), exit_code)


def look_over(loaded: LoadedConfig) -> list[str]:
    """Raise ConfigError with every rule that the settings break; returns what is said of those that change nothing."""
    check(loaded)
    return [*loaded.warnings, *without_effect(loaded)]


def train(loaded: LoadedConfig, notes: Sequence[str], stop: Stop) -> int:
    """Say what is about to run and run it. Returns the exit code; raises RltrainError."""
    with logs.session():
        trainer, model = loaded.config.trainer, loaded.config.actor_rollout_ref.model.path
        devices = logs.count(trainer.nnodes * trainer.n_gpus_per_node, "device")
        log.info(
            "rltrain %s: %s on %s (%s); run folder %s", __version__, model, devices, trainer.device, _folder(loaded)
        )
        for note in notes:
            log.warning("note: %s", note)
        from rltrain.trainer.run import run_training  # torch and Ray take seconds

        return run_training(loaded, stop)


def _folder(loaded: LoadedConfig) -> Path:
    return Path(loaded.config.trainer.default_local_dir).expanduser().resolve()
