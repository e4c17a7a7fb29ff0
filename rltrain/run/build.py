"""Construction of a trainer, for the command line and for `rltrain.build`.

Settings are read, checked and planned before anything is started or written; `start_run` does the rest. Tests without
Ray call `make_trainer` with their own worker group.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rltrain.common import logs
from rltrain.common.attempt import report_to_supervisor
from rltrain.common.errors import ConfigError
from rltrain.common.stop import Stop
from rltrain.config.loaded import LoadedConfig
from rltrain.config.schema import Config
from rltrain.run.assemble import sampler_of
from rltrain.run.callbacks.user import UserCallbacks
from rltrain.run.changes import log_changes, log_finished
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.resume import ResumePoint, find_resume_point
from rltrain.run.checkpoints.room import check_room, checkpoint_bytes
from rltrain.run.fit import Trainer
from rltrain.run.preflight.models import PreflightResult, check_images
from rltrain.run.preflight.settings import preflight
from rltrain.run.previous_attempt import append_last_line, pending_validation
from rltrain.run.report.plan import describe
from rltrain.run.report.table import METRICS
from rltrain.run.splits import load_data
from rltrain.run.start import RunSpec, start_run
from rltrain.runtime.cluster import cluster_address, ray_logs, start_ray
from rltrain.runtime.hang import Deadlines
from rltrain.runtime.ray_watchdog import cleanup_after_exit, require_heartbeat, stop_ray, unless_lost, watch_ray
from rltrain.trainer.plan import make_plan

log = logging.getLogger(__name__)


def build(
    loaded: LoadedConfig, stop: Stop | None = None, callbacks: Sequence[Any] = (), notes: Sequence[str] = ()
) -> Trainer:
    """Return a trainer with data read, workers running and models loaded. Raises RltrainError.

    callbacks: objects in addition to ``trainer.callbacks``. stop: the signals received so far, if the caller already
    handles signals. notes: notes on the settings, which are logged. If an earlier run in the same folder has finished
    all steps, nothing is started.
    """
    stop = stop or Stop()
    cfg = loaded.config
    stop.notice_s = cfg.trainer.stop_notice_s
    incidents = Path(cfg.trainer.default_local_dir).expanduser().resolve() / "incidents"
    limits = (cfg.trainer.hang_floor_s, cfg.trainer.hang_factor, incidents, cfg.trainer.hang_timeout_s)
    deadlines = Deadlines(*limits)
    with ExitStack() as closing, ExitStack() as reading:
        # Enter this context first, so that it ends last and train.log gets the messages of all other exits.
        closing.enter_context(logs.session())
        reading.enter_context(watch_ray(deadlines, local=False, reads=True, kept=stop.kept))
        reading.enter_context(require_heartbeat())
        result = preflight(loaded)
        _raise_problems(result, notes)
        hooks = UserCallbacks(cfg.trainer.callbacks, callbacks)
        data = load_data(cfg)
        check_images(cfg, of_rows := PreflightResult(images=data.images))
        _raise_problems(of_rows)
        train = data.prompts.get("train")
        counts = (len(train), train.num_dropped) if train else ()
        plan = make_plan(cfg, *counts, images=data.images)
        log.info("%s", describe(plan, cfg))
        if train:
            sampler_of(cfg, plan, data.rows["train"], trial=True)
        folder = RunFolder(cfg.trainer.default_local_dir)
        closing.callback(folder.release)
        report_to_supervisor(folder=str(folder.path))
        logs.open_train_log(folder.path)
        # The checkpoint is selected before Ray is started, so that one that does not fit this run is refused within
        # seconds.
        identity = data.rows["train"].identity() if train else None
        images = plan.passes.images_in_training

        def find() -> ResumePoint:
            stop.searching()  # called again only if the selected checkpoint is damaged
            start = find_resume_point(cfg, folder, identity, images=images)
            stop.reached(start.step, plan.total_steps, start.step)
            return start

        start = find()
        if start.is_of(folder.path):
            append_last_line(folder.path / METRICS, start.step, start.progress.metrics)
        changes = log_changes(loaded, start)
        owes = pending_validation(cfg.trainer, bool(cfg.data.val_files), folder.path, start.step, plan)
        if start.step >= plan.total_steps and not owes:
            log_finished(folder.path, plan.total_steps, changes)
            return Trainer(cfg, plan, folder, stop, start.step, closing.pop_all())
        sizes = result.num_parameters, result.num_trained
        size = start.size or checkpoint_bytes(cfg.actor_rollout_ref.actor, plan.passes, *sizes)
        check_room(cfg.trainer, folder.path, size, start.step, plan.total_steps, plan.steps_per_epoch)
        reading.close()
        started = begin_ray(cfg, stop, closing)
        # A cluster that this run joined is shared with others and outlives the run.
        closing.enter_context(watch_ray(deadlines, local=started and not cluster_address(cfg.cluster), kept=stop.kept))
        log.info("Ray's logs: %s", ray_logs())
        with require_heartbeat(), stop.telling():
            return start_run(RunSpec(loaded, plan, data, folder, start, find), stop, hooks, closing, deadlines)


def begin_ray(cfg: Config, stop: Stop, closing: ExitStack) -> bool:
    """Start Ray or join the cluster until ``closing`` ends. Return False if the caller had already connected."""
    with logs.waiting("starting Ray"), stop.keeping_handlers("starting Ray"):
        if started := start_ray(cfg.cluster):
            closing.enter_context(cleanup_after_exit(not cluster_address(cfg.cluster)))
            closing.callback(unless_lost(stop_ray))
    return started


def _raise_problems(result: PreflightResult, notes: Sequence[str] = ()) -> None:
    """Raise all problems as one error, before anything slow or any write to disk. Log the notes."""
    if result.problems:
        raise ConfigError("\n".join(result.problems))
    for note in [*notes, *result.notes]:
        log.warning("note: %s", note)
