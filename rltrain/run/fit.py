"""A run: the steps of the algorithm, with validation, saving and trackers between them. `build` puts it together.

Problem: a signal or an error may come at any point, and as little as possible shall be lost. Choice: per step the order
is update, save, validate, log; `Stop.finishing` is set exactly while something unsaved exists, and metrics are logged
even if saving fails. Left out: going on after an error within the same process; the same command resumes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rltrain.base.errors import AgentError, ConfigError, DiskError, JudgeError, RewardError, StorageError, WorkerLost
from rltrain.base.stop import StepLeft, Stop, listen
from rltrain.config.schema import Config
from rltrain.controller.lifeline import working
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.saver import Saver
from rltrain.run.report.archive import Archive
from rltrain.run.watchers.watcher import Watcher, Watchers
from rltrain.trainer.metrics import Metrics
from rltrain.trainer.plan import Plan
from rltrain.trainer.ppo import PPOTrainer
from rltrain.trainer.validation import Rows, Validation

log = logging.getLogger(__name__)


class Trainer(Watcher):
    """A run that `rltrain.build` has started: make single steps, or `fit` all of them.

    Use it as a context or call `close`: this finishes the trackers and ends scorers, workers, and Ray if `build` has
    started Ray. config: the settings. plan: the numbers that follow from the settings. ppo: the algorithm with its
    roles. num_steps: steps made so far, including those before a resume. watchers: whoever watches the run.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        folder: RunFolder,
        stop: Stop,
        num_steps: int,
        closing: ExitStack,
        ppo: PPOTrainer | None = None,
        saver: Saver | None = None,
        watchers: Watchers | None = None,
        owes_validation: bool = False,
        validation: Validation | None = None,
        archive: Archive | None = None,
    ) -> None:
        self.config = config
        self.plan = plan
        self.folder: Path = folder.path
        self.num_steps = num_steps
        self._closing = closing
        self._stop = stop
        self._ppo, self._saver, self._validation, self._archive = ppo, saver, validation, archive
        # A signal has cut the validation of `num_steps` short, and `fit` makes up for it.
        self._owes_validation = owes_validation
        self._under_way = num_steps
        self.watchers = watchers or Watchers()
        self.watchers.add(self)

    @property
    def ppo(self) -> PPOTrainer:
        """The algorithm. Raises ConfigError where the run had made all its steps before, and in an evaluation."""
        return self._started[0]

    @property
    def _started(self) -> tuple[PPOTrainer, Saver]:
        if self.config.trainer.val_only:
            raise ConfigError("trainer.val_only=True has loaded what a validation needs alone. Leave it out to train.")
        if not self._ppo or not self._saver:
            raise ConfigError(
                f"the run in {self.folder} has its {self.num_steps} steps. Raise trainer.total_training_steps "
                "and total_epochs to go on, or choose another trainer.default_local_dir."
            )
        return self._ppo, self._saver

    def step(self) -> Metrics:
        """Make the next step of the plan; returns its metrics, which the trackers get as well."""
        ppo, _ = self._started
        metrics = self._make(ppo, self.num_steps + 1)
        self.num_steps += 1
        self.watchers.on_metrics(self.num_steps, metrics)
        return metrics

    def validate(self) -> Metrics:
        """Answer the validation prompts with the current policy. Returns the metrics; the trackers get them too."""
        metrics = self._validate()
        self.watchers.on_metrics(self.num_steps, metrics)
        return metrics

    @property
    def validation(self) -> Validation:
        """What answers the validation prompts. Raises ConfigError as `ppo` does."""
        return self._validation or self._started[0].validation

    def answer(self, rows: Rows, file: Path) -> None:
        """Answer the validation prompts ``rows`` as `validate` does, and write answers and scores into ``file``.

        Raises ConfigError where no answers are kept (trainer.samples_freq), DiskError where they cannot be written.
        """
        if not self._archive:
            raise ConfigError("no answers are kept: trainer.samples_freq is off. Set trainer.samples_freq=1.")
        self._archive.write(self.validation.answer(rows, self.num_steps), file)

    def save(self) -> Path:
        """Write a checkpoint of the current step; returns its folder."""
        ppo, saver = self._started
        saver.save(self.num_steps, ppo.progress)
        saver.finish()
        return self.folder / f"global_step_{self.num_steps}"

    def fit(self) -> bool:
        """Make all remaining steps, with validation and saving.

        Returns False if a signal has stopped the run before the end.
        """
        if self.num_steps >= self.plan.total_steps and not self._owes_validation:
            return True
        with listen(self._stop), working(), self._stop.telling():
            try:
                # Nothing is learnt in an evaluation, so a signal ends it at once.
                return bool(self.validate()) if self.config.trainer.val_only else self._fit(*self._started)
            except Exception:
                if not self._stop.at_once:
                    self.watchers.on_failure()
                raise

    def on_save(self, step: int, folder: Path, seconds: float) -> Metrics:
        """Tell ``stop`` what is saved."""
        self._stop.reached(self.num_steps, self.plan.total_steps, step)
        if step == self._under_way:
            # Everything is saved, so from here on a signal may end the run at once, in the middle of a validation.
            self._stop.finishing = ""
        return {}

    def _fit(self, ppo: PPOTrainer, saver: Saver) -> bool:
        trainer, total, stop, first_step = self.config.trainer, self.plan.total_steps, self._stop, self.num_steps
        # Steps that the caller made with `step` are in no checkpoint yet.
        stop.reached(first_step, total, saver.last_step)
        done, untested = first_step, self._owes_validation
        # Nothing is learnt here, so a signal ends it at once.
        first = untested or (trainer.val_before_train and not first_step)
        if ppo.rewards.has_validation and first:
            val_metrics = self._validate()
            self.watchers.on_metrics(first_step, val_metrics)
            saver.best.observe(first_step, val_metrics)
            untested = self._owes_validation = untested and not val_metrics
        for step in range(first_step + 1, total + 1):
            # Asked between steps: a step that has begun is worth finishing, one that has not costs nothing to leave
            # out.
            if stop.requested or saver.best.stalled():
                break
            started, self._under_way = time.perf_counter(), step
            stop.finishing = "finishing this step, saving"
            try:
                with self._rescued(ppo, saver, done):
                    metrics = self._make(ppo, step)
            except StepLeft as left:
                log.warning("%s", left)
                stop.reached(done, total, saver.last_step)
                break
            done = self.num_steps = step
            stop.reached(done, total, saver.last_step)
            try:
                untested = self._keep_and_test(ppo, saver, metrics)
                metrics["timing_s/wall"] = time.perf_counter() - started
            finally:  # what was measured is not lost with a save that fails
                self.watchers.on_metrics(step, metrics)
        # The signal may have come after the question above whether a save is due.
        saver.finish()
        if stop.requested and trainer.save_at_end and saver.last_step < done:
            saver.save(done, ppo.progress)
            saver.finish()
        if stalled := "" if stop.requested else saver.best.stalled():
            log.info("%s", stalled)
        # A run that lacks its last validation has not got to its end, though all steps are made.
        return bool(stalled) or (done == total and not untested)

    def _keep_and_test(self, ppo: PPOTrainer, saver: Saver, metrics: Metrics) -> bool:
        """Save and validate where that is due; ``metrics`` gets what was found.

        Returns whether a validation was due and a signal has cut it short.
        """
        trainer, stop, step, total = self.config.trainer, self._stop, self.num_steps, self.plan.total_steps
        last, untested = step == total, False
        # Saved first: validation wakes the engine, which then keeps its weights for the next step.
        due = saver.due(step, last or stop.requested) or stop.save_requested
        if due or saver.overdue(step):
            self.watchers.on_phase("save_checkpoint")
            stop.save_requested = False
            metrics |= saver.save(step, ppo.progress, by_time=not due)
        saver.on_wait()
        stop.reached(step, total, saver.last_step)
        if ppo.rewards.has_validation and trainer.validates_after(step, total, self.plan.steps_per_epoch):
            with self._rescued(ppo, saver, step):
                val_metrics = {} if stop.requested else self._validate()
            metrics |= val_metrics
            # A validation that a signal has cut short returns nothing.
            untested = not val_metrics
            try:
                saver.best.observe(step, val_metrics)
            except ConfigError:
                saver.finish()
                raise
            if saver.best.stalled() and trainer.save_at_end and saver.newest < step:
                metrics |= saver.save(step, ppo.progress)
        if last or stop.requested or saver.best.stalled():
            saver.finish()
        metrics |= saver.news()
        return untested

    @contextmanager
    def _rescued(self, ppo: PPOTrainer, saver: Saver, step: int) -> Iterator[None]:
        """Save step ``step``, the newest, where answers and rewards fail in what follows it."""
        # The progress before the step, because a step draws prompts and adapts the KL weight before a reward can fail.
        before = ppo.progress
        try:
            yield
        # All come before any update of a step, so the weights are still those of the step before and worth saving.
        # After an error of the workers they may be half updated.
        except (RewardError, JudgeError, AgentError, StepLeft) as error:
            if isinstance(error, StepLeft):
                ppo.actor.give_up()
            try:
                saver.rescue(step, before)
            except (DiskError, StorageError, WorkerLost) as unsaved:
                if isinstance(error, StepLeft):
                    raise
                # What it came from is what ends the run: a supervisor decides by it, and a person mends it first.
                log.warning("step %d could not be saved: %s", step, unsaved)
            raise

    def _make(self, ppo: PPOTrainer, step: int) -> Metrics:
        self.watchers.before_step(step)
        try:
            # A copy, because what comes later belongs to the step's line and not to its checkpoint.
            return dict(self.watchers.on_step(ppo.step(step)))
        finally:
            self.watchers.after_step(step)

    def _validate(self) -> Metrics:
        """The metrics of a validation; empty where a signal has cut it short."""
        answered = self.validation.run(self.num_steps, self._stop)
        return self.watchers.on_validation(answered) if answered else {}

    def close(self) -> None:
        """End what `build` has started. A second call does nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        # `pop_all` leaves an empty stack behind, so a second call finds nothing to end.
        self._closing.pop_all().__exit__(kind, error, where)
