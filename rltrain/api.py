"""Training from Python, and what the command does once its settings are read.

Problem: workers and scorers are other processes, which cannot see the objects of a script. Choice: code that is given
as an object is written into the run folder and named in the configuration (`with_code`), so a run from Python and one
from the command are the same from there on. Left out: callbacks, which run in the caller's process and stay objects.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain import __version__
from rltrain.base import logs
from rltrain.base.errors import DataError, Interrupted, RltrainError
from rltrain.base.imports import IMPORTING, importing
from rltrain.base.plugin import save_object
from rltrain.base.stop import Stop, listen
from rltrain.config.check import check
from rltrain.config.load import changed, load_config
from rltrain.config.loaded import LoadedConfig
from rltrain.config.notes import join_by_reason, without_effect

if TYPE_CHECKING:
    import pandas as pd

    from rltrain.run.fit import Trainer

log = logging.getLogger(__name__)
# The forms of a run's settings: a loaded configuration, a mapping (nested, or with dotted keys), key=value words, or a
# YAML file.
Settings = LoadedConfig | Mapping[str, Any] | Sequence[str] | str | Path
# Code of the user's own: a function or class, or FILE.py:NAME; and the keys that the arguments stand for.
Code = Callable[..., Any] | str
_CODE = {
    "reward": "custom_reward_function.path",
    "advantage": "algorithm.adv_estimator",
    "policy_loss": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "sampler": "data.sampler.name",
}


@dataclass(frozen=True)
class RunResult:
    """The end of a run.

    The methods read metrics.jsonl. They raise DataError where there is none, StorageError where it cannot be read.
    """

    folder: Path
    """The run folder."""
    exit_code: int
    """0, or if a signal stopped the run 75 (SIGTERM) or 130 (Ctrl-C)."""

    def table(self) -> pd.DataFrame:
        """One row per step, one column per metric: the newest value; NaN where a step has no such metric."""
        import pandas as pd

        from rltrain.run.report.table import read_metrics

        # A step may have two lines: its own, and that of a validation.
        lines = pd.DataFrame(read_metrics(self.folder))
        return lines.groupby("step").last() if "step" in lines else lines

    def newest(self) -> dict[str, float]:
        """Every metric's last value."""
        return {str(name): float(values.dropna().iloc[-1]) for name, values in self.table().items() if values.count()}

    def best(self, metric: str) -> tuple[int, float]:
        """The step with the largest value of the metric, and that value. Raises DataError if no step has it."""
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

    The settings are checked, keys without effect are named, and an earlier run of the same folder is continued. Code of
    your own is a Python object or ``"FILE.py:NAME"``; see docs/api.md. Raises RltrainError for errors that a user can
    mend, with the text that the command prints.
    """
    loaded = with_code(read(config), reward=reward, advantage=advantage, policy_loss=policy_loss, sampler=sampler)
    loaded, objects = _split_callbacks(loaded, callbacks)
    # Outside of the main thread this changes no handlers, so that a run may be started from a thread too.
    with listen() as stop:
        try:
            folder = run(loaded, look_over(loaded), stop, objects)
        except BaseException as error:
            # Ray makes errors of its own of what a signal handler raises.
            # A run that was stopped is no error for a script: it gets the exit code to end with.
            if not (stop.at_once or isinstance(error, Interrupted)):
                raise
            return RunResult(_folder(loaded), stop.exit_code)
    return RunResult(folder, 0)


def build(
    config: Settings,
    *,
    reward: Code | None = None,
    advantage: Code | None = None,
    policy_loss: Code | None = None,
    sampler: Code | None = None,
    callbacks: Sequence[Any] = (),
) -> Trainer:
    """A trainer with its workers started and its models loaded. Use it as a context.

    The arguments are those of `train`.
    """
    with importing():
        from rltrain.run.build import build as put_together

    loaded = with_code(read(config), reward=reward, advantage=advantage, policy_loss=policy_loss, sampler=sampler)
    loaded, objects = _split_callbacks(loaded, callbacks)
    # The log is the trainer's: it ends with the trainer, not with this call.
    return put_together(loaded, callbacks=objects, notes=look_over(loaded))


def evaluate(config: Settings, *, reward: Code | None = None, callbacks: Sequence[Any] = ()) -> dict[str, float]:
    """The validation metrics of the newest checkpoint of the run folder, else of ``actor_rollout_ref.model.path``.

    Only the policy is loaded, for its engines: no optimizer, no critic, no reference, no training data.
    """
    with build(changed(read(config), {"trainer.val_only": True}), reward=reward, callbacks=callbacks) as trainer:
        return trainer.validate()


def read(config: Settings) -> LoadedConfig:
    """The configuration in any of its forms, loaded. Raises ConfigError."""
    if isinstance(config, LoadedConfig):
        return config
    if isinstance(config, Mapping):
        return load_config([], [config])
    return load_config([], [str(config)]) if isinstance(config, str | Path) else load_config(config)


def with_code(loaded: LoadedConfig, **code: Code | None) -> LoadedConfig:
    """The configuration with the names of the user's code.

    An object is written into the run folder, because all processes can read it there.
    """
    changes: dict[str, Any] = {}
    for argument, value in code.items():
        if value is None:
            continue
        name = value if isinstance(value, str) else save_object(argument, value, _folder(loaded) / "objects")
        if argument == "reward":
            # A reward function has two keys, as in verl. Split from the right, because a path may have a colon and a
            # name cannot.
            path, _, function = name.rpartition(":")
            changes |= {_CODE[argument]: path, "custom_reward_function.name": function}
        else:
            changes[_CODE[argument]] = name
    return changed(loaded, changes)


def _split_callbacks(loaded: LoadedConfig, callbacks: Sequence[Any]) -> tuple[LoadedConfig, list[Any]]:
    """Names go into the configuration. Objects stay: callbacks run in this process alone."""
    names = [callback for callback in callbacks if isinstance(callback, str)]
    if names:
        loaded = changed(loaded, {"trainer.callbacks": [*loaded.config.trainer.callbacks, *names]})
    return loaded, [callback for callback in callbacks if not isinstance(callback, str)]


def look_over(loaded: LoadedConfig) -> list[str]:
    """Raise ConfigError with every rule that the settings break; returns what is said of those that change nothing."""
    check(loaded)
    return join_by_reason(
        [*loaded.warnings, *(loaded.as_written(note, follow=False) for note in without_effect(loaded))]
    )


def run(loaded: LoadedConfig, notes: Sequence[str], stop: Stop, callbacks: Sequence[Any] = ()) -> Path:
    """Say what is about to run and run it; returns the folder of its metrics.

    Raises RltrainError, and Interrupted where ``stop`` has ended it.
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
        # Raised behind the `with`, after all has ended the orderly way: inside, workers would be killed as after an
        # error.
        if not finished:
            raise stop.interrupted()
        try:
            show_report(run_trainer.folder)
        except (RltrainError, OSError) as error:  # the run has got to its end all the same
            log.warning("the report of the run cannot be shown: %s", error)
        if words := run_trainer.watchers.last_words():
            log.warning("%s", words)
        if stop.loses:  # as trainer.save_at_end says
            log.warning("%s", stop.kept())
        return run_trainer.folder


@contextmanager
def _pictured(run_trainer: Trainer, stop: Stop) -> Iterator[None]:
    """Behind a run that has made steps, also where it has failed, write its page; not where a signal leaves no time."""
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
            except Exception as error:  # noqa: BLE001 - whatever befalls a page, the run is what it is
                log.warning("the page of the run cannot be written: %s: %s", type(error).__name__, error)


def _folder(loaded: LoadedConfig) -> Path:
    return Path(loaded.config.trainer.default_local_dir).expanduser().resolve()
