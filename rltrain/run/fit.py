"""The training loop: steps of the algorithm, with validation, saving and trackers between them.

`build` constructs it. A signal or an error may occur at any point, and as little as possible must be lost. So the order
in a step is update, save, validate, log. `Stop.finishing` is set exactly while something is unsaved, and metrics are
logged even if saving fails. After an error the process ends; rerunning the command resumes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rltrain.common.errors import AgentError, ConfigError, DiskError, JudgeError, RewardError, StorageError, WorkerLost
from rltrain.common.stop import StepLeft, Stop, listen
from rltrain.config.schema import Config
from rltrain.run.callbacks.callback import Callback, CallbackList
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.saver import Saver
from rltrain.run.report.sample_logger import SampleLogger
from rltrain.runtime.ray_watchdog import require_heartbeat
from rltrain.trainer.metrics.step import Metrics
from rltrain.trainer.plan import Plan
from rltrain.trainer.ppo import PPOTrainer
from rltrain.trainer.validation import Rows, Validation

log = logging.getLogger(__name__)


class Trainer(Callback):
    """A run that `rltrain.build` has started: run single steps, or all of them with `fit`.

    Use it as a context manager or call `close`: this finishes the trackers and stops scorers, workers, and Ray if
    `build` has started it. config: the settings. plan: the numbers derived from the settings. ppo: the algorithm with
    its roles. num_steps: finished steps, including earlier runs. callbacks: observers of the run.
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
        callbacks: CallbackList | None = None,
        pending_validation: bool = False,
        validation: Validation | None = None,
        sample_logger: SampleLogger | None = None,
    ) -> None:
        self.config = config
        self.plan = plan
        self.folder: Path = folder.path
        self.num_steps = num_steps
        self._closing = closing
        self._stop = stop
        self._ppo, self._saver, self._validation, self._sample_logger = ppo, saver, validation, sample_logger
        # A signal interrupted the validation of `num_steps`; `fit` repeats it.
        self._pending_validation = pending_validation
        self._under_way = num_steps
        self.callbacks = callbacks or CallbackList()
        self.callbacks.add(self)

    @property
    def ppo(self) -> PPOTrainer:
        """The algorithm. Raises ConfigError in an evaluation, and if all steps were finished before."""
        return self._started[0]

    @property
    def _started(self) -> tuple[PPOTrainer, Saver]:
        if self.config.trainer.val_only:
            raise ConfigError("trainer.val_only=True loads only the models of a validation. Remove it to train.")
        if not self._ppo or not self._saver:
            raise ConfigError(
                f"the run in {self.folder} has completed its {self.num_steps} steps. Raise "
                "trainer.total_training_steps and total_epochs to continue, or choose another "
                "trainer.default_local_dir."
            )
        return self._ppo, self._saver

    def step(self) -> Metrics:
        """Run the next step of the plan. Return its metrics, which are also sent to the trackers."""
        ppo, _ = self._started
        metrics = self._make(ppo, self.num_steps + 1)
        self.num_steps += 1
        self.callbacks.on_metrics(self.num_steps, metrics)
        return metrics

    def validate(self) -> Metrics:
        """Validate the current policy. Return the metrics, which are also sent to the trackers."""
        metrics = self._validate()
        self.callbacks.on_metrics(self.num_steps, metrics)
        return metrics

    @property
    def validation(self) -> Validation:
        """The validation. Raises ConfigError as `ppo` does."""
        return self._validation or self._started[0].validation

    def answer(self, rows: Rows, file: Path) -> None:
        """Generate responses to the validation prompts ``rows`` as `validate` does, and write them with scores to
        ``file``.

        Raises ConfigError if no samples are saved (trainer.samples_freq), DiskError if the file cannot be written.
        """
        if not self._sample_logger:
            raise ConfigError("no responses are saved: trainer.samples_freq is off. Set trainer.samples_freq=1.")
        self._sample_logger.write(self.validation.answer(rows, self.num_steps), file)

    def save(self) -> Path:
        """Write a checkpoint of the current step. Return its folder."""
        ppo, saver = self._started
        saver.save(self.num_steps, ppo.progress)
        saver.finish()
        return self.folder / f"global_step_{self.num_steps}"

    def fit(self) -> bool:
        """Run all remaining steps, with validation and saving. Return False if a signal stopped the run."""
        if self.num_steps >= self.plan.total_steps and not self._pending_validation:
            return True
        with listen(self._stop), require_heartbeat(), self._stop.telling():
            try:
                # An evaluation has nothing to save, so a signal ends it at once.
                return bool(self.validate()) if self.config.trainer.val_only else self._fit(*self._started)
            except Exception:
                if not self._stop.at_once:
                    self.callbacks.on_failure()
                raise

    def on_save(self, step: int, folder: Path, seconds: float) -> Metrics:
        """Report the saved step to `Stop`."""
        self._stop.reached(self.num_steps, self.plan.total_steps, step)
        if step == self._under_way:
            # Everything is saved, so a signal may now end the run at once, even during a validation.
            self._stop.finishing = ""
        return {}

    def _fit(self, ppo: PPOTrainer, saver: Saver) -> bool:
        trainer, total, stop, first_step = self.config.trainer, self.plan.total_steps, self._stop, self.num_steps
        # Steps that the caller ran with `step` are not in a checkpoint yet.
        stop.reached(first_step, total, saver.last_step)
        done, untested = first_step, self._pending_validation
        # Nothing is unsaved here, so a signal ends the validation at once.
        first = untested or (trainer.val_before_train and not first_step)
        if ppo.rewards.has_validation and first:
            val_metrics = self._validate()
            self.callbacks.on_metrics(first_step, val_metrics)
            saver.best.observe(first_step, val_metrics)
            untested = self._pending_validation = untested and not val_metrics
        for step in range(first_step + 1, total + 1):
            # Check between steps, so that a running step is finished and no other is started.
            if stop.requested or saver.best.stalled():
                break
            started, self._under_way = time.perf_counter(), step
            stop.finishing = "finishing this step, saving"
            try:
                with self._saved_on_error(ppo, saver, done):
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
            finally:  # metrics are logged even if saving fails
                self.callbacks.on_metrics(step, metrics)
        # The signal may have arrived after the check for a due save.
        saver.finish()
        if stop.requested and trainer.save_at_end and saver.last_step < done:
            saver.save(done, ppo.progress)
            saver.finish()
        if stalled := "" if stop.requested else saver.best.stalled():
            log.info("%s", stalled)
        # If its last validation was interrupted, a run is not finished, even after its last step.
        return bool(stalled) or (done == total and not untested)

    def _keep_and_test(self, ppo: PPOTrainer, saver: Saver, metrics: Metrics) -> bool:
        """Save and validate if due, and add the results to ``metrics``.

        Returns whether a validation was due and was interrupted by a signal.
        """
        trainer, stop, step, total = self.config.trainer, self._stop, self.num_steps, self.plan.total_steps
        last, untested = step == total, False
        # Save before the validation, because the validation wakes the engine, which then keeps its weights for the next
        # step.
        due = saver.due(step, last or stop.requested) or stop.save_requested
        if due or saver.overdue(step):
            self.callbacks.on_phase("save_checkpoint")
            stop.save_requested = False
            metrics |= saver.save(step, ppo.progress, by_time=not due)
        saver.on_wait()
        stop.reached(step, total, saver.last_step)
        if ppo.rewards.has_validation and trainer.validates_after(step, total, self.plan.steps_per_epoch):
            with self._saved_on_error(ppo, saver, step):
                val_metrics = {} if stop.requested else self._validate()
            metrics |= val_metrics
            # An interrupted validation returns no metrics.
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
        metrics |= saver.take_metrics()
        return untested

    @contextmanager
    def _saved_on_error(self, ppo: PPOTrainer, saver: Saver, step: int) -> Iterator[None]:
        """Save ``step``, the newest step, if generation or scoring fails in the body."""
        # Uses the progress before the step, because a step draws prompts and adapts the KL coefficient before a reward
        # can fail.
        before = ppo.progress
        try:
            yield
        # All of these occur before an update of the step, so the weights are still from the previous step and worth
        # saving. After an error of the workers they may be half updated.
        except (RewardError, JudgeError, AgentError, StepLeft) as error:
            if isinstance(error, StepLeft):
                ppo.actor.abort()
            try:
                saver.save_emergency(step, before)
            except (DiskError, StorageError, WorkerLost) as unsaved:
                if isinstance(error, StepLeft):
                    raise
                # The original error ends the run, because a supervisor acts on it, and it must be fixed first.
                log.warning("step %d could not be saved: %s", step, unsaved)
            raise

    def _make(self, ppo: PPOTrainer, step: int) -> Metrics:
        self.callbacks.before_step(step)
        try:
            # A copy, because later metrics belong to the line of the step, not to its checkpoint.
            return dict(self.callbacks.on_step(ppo.step(step)))
        finally:
            self.callbacks.after_step(step)

    def _validate(self) -> Metrics:
        """Return the metrics of a validation; empty if a signal interrupted it."""
        answered = self.validation.run(self.num_steps, self._stop)
        return self.callbacks.on_validation(answered) if answered else {}

    def close(self) -> None:
        """Stop everything that `build` started. A second call does nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        # `pop_all` leaves an empty stack, so a second call finds nothing to close.
        self._closing.pop_all().__exit__(kind, error, where)
