"""Training from Python, and the part of the command after its settings are read.

Workers and scorers are other processes, which cannot access the objects of a script. So code given as an object is
written into the run folder and named in the configuration (`with_code`); from there on, runs from Python and from the
command line are the same. Callbacks stay objects, because they run in the caller's process.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.common import __version__, logs
from rltrain.common.errors import DataError, Interrupted, RltrainError
from rltrain.common.imports import IMPORTING, importing
from rltrain.common.plugin import save_object
from rltrain.common.stop import Stop, listen
from rltrain.config.check import check
from rltrain.config.load import changed, load_config
from rltrain.config.loaded import LoadedConfig
from rltrain.config.notes import join_by_reason, without_effect
from rltrain.config.verl.sft import as_training

if TYPE_CHECKING:
    import pandas as pd

    from rltrain.run.fit import Trainer

log = logging.getLogger(__name__)
# Forms of a run's settings: a loaded configuration, a mapping (nested, or with dotted keys), key=value arguments, or a
# YAML file.
Settings = LoadedConfig | Mapping[str, Any] | Sequence[str] | str | Path
# User code: a function or class, or FILE.py:NAME; and the keys of these arguments.
Code = Callable[..., Any] | str
_CODE = {
    "reward": "custom_reward_function.path",
    "advantage": "algorithm.adv_estimator",
    "policy_loss": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "sampler": "data.sampler.name",
}


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    The methods read metrics.jsonl. They raise DataError if it is missing, StorageError if it cannot be read.
    """

    folder: Path
    """The run folder."""
    exit_code: int
    """0, or if a signal stopped the run 75 (SIGTERM) or 130 (Ctrl-C)."""

    def table(self) -> pd.DataFrame:
        """Return one row per step, one column per metric: the newest value; NaN if a step lacks the metric."""
        import pandas as pd

        from rltrain.run.report.table import read_metrics

        # A step may have two lines, one of the step and one of a validation.
        lines = pd.DataFrame(read_metrics(self.folder))
        return lines.groupby("step").last() if "step" in lines else lines

    def newest(self) -> dict[str, float]:
        """Return the last value of every metric."""
        return {str(name): float(values.dropna().iloc[-1]) for name, values in self.table().items() if values.count()}

    def best(self, metric: str) -> tuple[int, float]:
        """Return the step with the largest value of the metric, and that value. Raises DataError if no step has it."""
        table = self.table()
        if metric not in table or not table[metric].count():
            near = difflib.get_close_matches(metric, map(str, table.columns), n=3)
            raise DataError(f"{self.folder}: no step has the metric {metric}. Near: {', '.join(near) or 'none'}.")
        step = table[metric].idxmax()
        return int(step), float(table[metric][step])


def train(
    config: Settings,
    *,
    reward: Code | None = None,
    advantage: Code | None = None,
    policy_loss: Code | None = None,
    sampler: Code | None = None,
    callbacks: Sequence[Any] = (),
) -> RunResult:
    """Train as the command does: ``rltrain.train({"algorithm.adv_estimator": "grpo", ...}, reward=my_reward)``.

    The settings are checked, keys without effect are logged, and an earlier run in the same folder is resumed. User
    code is a Python object or ``"FILE.py:NAME"``; see docs/api.md. Raises RltrainError for errors that a user can fix,
    with the text that the command prints.
    """
    loaded = with_code(read(config), reward=reward, advantage=advantage, policy_loss=policy_loss, sampler=sampler)
    loaded, objects = _split_callbacks(loaded, callbacks)
    # Outside of the main thread no signal handlers are changed, so a run may also be started from a thread.
    with listen() as stop:
        try:
            folder = run(loaded, check_settings(loaded), stop, objects)
        except BaseException as error:
            # Ray replaces the exception of a signal handler by another error. A stopped run is not an error for a
            # script, which gets the exit code.
            if not (stop.at_once or isinstance(error, Interrupted)):
                raise
            return RunResult(_folder(loaded), stop.exit_code)
    return RunResult(folder, 0)


def sft(config: Settings, *, callbacks: Sequence[Any] = ()) -> RunResult:
    """Train on the assistant's turns of conversations, as ``rltrain sft`` does: ``rltrain.sft(["model.path=…", …])``.

    config: in one of the forms that `train` takes, or ``key=value`` arguments of the command, with verl's SFT keys.
    """
    return train(config if isinstance(config, LoadedConfig) else list(as_training(config)), callbacks=callbacks)


def build(
    config: Settings,
    *,
    reward: Code | None = None,
    advantage: Code | None = None,
    policy_loss: Code | None = None,
    sampler: Code | None = None,
    callbacks: Sequence[Any] = (),
) -> Trainer:
    """Return a trainer whose workers run and whose models are loaded. Use it as a context manager.

    It takes the arguments of `train`.
    """
    with importing():
        from rltrain.run.build import build as put_together

    loaded = with_code(read(config), reward=reward, advantage=advantage, policy_loss=policy_loss, sampler=sampler)
    loaded, objects = _split_callbacks(loaded, callbacks)
    # The log belongs to the trainer: it ends with the trainer, not with this call.
    return put_together(loaded, callbacks=objects, notes=check_settings(loaded))


def evaluate(config: Settings, *, reward: Code | None = None, callbacks: Sequence[Any] = ()) -> dict[str, float]:
    """Return the validation metrics of the newest checkpoint in the run folder, else of
    ``actor_rollout_ref.model.path``.

    Only the policy is loaded, for its engines: no optimizer, no critic, no reference, no training data.
    """
    with build(changed(read(config), {"trainer.val_only": True}), reward=reward, callbacks=callbacks) as trainer:
        return trainer.validate()


def read(config: Settings) -> LoadedConfig:
    """Return the loaded configuration, given in any of its forms. Raises ConfigError."""
    if isinstance(config, LoadedConfig):
        return config
    if isinstance(config, Mapping):
        return load_config([], [config])
    return load_config([], [str(config)]) if isinstance(config, str | Path) else load_config(config)


def with_code(loaded: LoadedConfig, **code: Code | None) -> LoadedConfig:
    """Return the configuration with the names of the user's code. Objects are written into the run folder, where all
    processes can read them.
    """
    changes: dict[str, Any] = {}
    for argument, value in code.items():
        if value is None:
            continue
        name = value if isinstance(value, str) else save_object(argument, value, _folder(loaded) / "objects")
        if argument == "reward":
            # A reward function has two keys, as in verl. The name is split from the right, because a path may contain a
            # colon, but a name cannot.
            path, _, function = name.rpartition(":")
            changes |= {_CODE[argument]: path, "custom_reward_function.name": function}
        else:
            changes[_CODE[argument]] = name
    return changed(loaded, changes)


def _split_callbacks(loaded: LoadedConfig, callbacks: Sequence[Any]) -> tuple[LoadedConfig, list[Any]]:
    """Add callbacks given by name to the configuration. Return it with the other callbacks.

    Objects are kept, because callbacks run only in this process.
    """
    names = [callback for callback in callbacks if isinstance(callback, str)]
    if names:
        loaded = changed(loaded, {"trainer.callbacks": [*loaded.config.trainer.callbacks, *names]})
    return loaded, [callback for callback in callbacks if not isinstance(callback, str)]


def check_settings(loaded: LoadedConfig) -> list[str]:
    """Raise ConfigError with all broken rules of the settings. Return notes on keys.

    A model path that is a run folder becomes the model folder of its newest checkpoint; raises CheckpointError if none
    is complete.
    """
    check(loaded)
    notes = list(_use_exports(loaded))
    without = (loaded.as_written(note, follow=False) for note in without_effect(loaded))
    return join_by_reason([*loaded.warnings, *notes, *without])


def _use_exports(loaded: LoadedConfig) -> Iterator[str]:
    config, policy = loaded.config, loaded.config.actor_rollout_ref
    roles = config.critic, config.distillation.teacher, config.reward_model
    exports: dict[Path, str] = {}
    for model in (policy.model, policy.ref.model, *(role.model for role in roles)):
        folder = Path(model.path or "")
        if not model.path or (folder / "config.json").exists() or not any(folder.glob("global_step_*")):
            continue
        if folder not in exports:
            from rltrain.run.checkpoints.model_folder import find_model

            exports[folder] = find_model(str(folder)).path
            yield f"{folder} is a run; its newest model is used: {exports[folder]}"
        model.path = exports[folder]


def run(loaded: LoadedConfig, notes: Sequence[str], stop: Stop, callbacks: Sequence[Any] = ()) -> Path:
    """Log the model, devices and notes, and run the training. Return the folder of its metrics.

    Raises RltrainError, and Interrupted if ``stop`` has ended it.
    """
    with logs.session():
        trainer, model = loaded.config.trainer, loaded.config.actor_rollout_ref.model.path
        devices = logs.count(trainer.nnodes * trainer.n_gpus_per_node, "device")
        log.info(
            "rltrain %s: %s on %s (%s); run folder %s", __version__, model, devices, trainer.device, _folder(loaded)
        )
        for note in notes:
            log.warning("note: %s", note)
        with logs.waiting(IMPORTING), importing():
            from rltrain.run.build import build as put_together
            from rltrain.run.report.table import show_report

        run_trainer = put_together(loaded, stop, callbacks)
        with _pictured(run_trainer, stop), run_trainer:
            finished = run_trainer.fit()
        # Raise after the `with`: an exception inside it would kill the workers as after an error.
        if not finished:
            raise stop.interrupted()
        try:
            show_report(run_trainer.folder)
        except (RltrainError, OSError) as error:  # the training itself has succeeded
            log.warning("the report of the run cannot be shown: %s", error)
        if warning := run_trainer.callbacks.closing_warning():
            log.warning("%s", warning)
        if stop.loses:  # with trainer.save_at_end=False
            log.warning("%s", stop.kept())
        return run_trainer.folder


@contextmanager
def _pictured(run_trainer: Trainer, stop: Stop) -> Iterator[None]:
    """Write the report page of a run that has finished a step, even if it failed, unless a signal leaves no time."""
    before = run_trainer.num_steps
    try:
        yield
    finally:
        if run_trainer.config.trainer.report and run_trainer.num_steps > before and not stop.at_once:
            try:
                with logs.waiting("writing report.html"):
                    from rltrain.run.report.page import write_page

                    page = write_page(run_trainer.folder)
                log.info("the run as a page: %s", page)
            except Exception as error:  # noqa: BLE001 - an error of the page must not fail the run
                log.warning("the page of the run cannot be written: %s: %s", type(error).__name__, error)


def _folder(loaded: LoadedConfig) -> Path:
    return Path(loaded.config.trainer.default_local_dir).expanduser().resolve()
