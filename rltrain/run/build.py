"""Construction of a trainer, for the command line and for `rltrain.build`.

Settings are read, checked and planned before anything is started or written; `start_run` starts the workers, scorers,
trackers and the sample writer. An ExitStack records how to stop each of these, and the `Trainer` unwinds it. Tests
without Ray call `make_trainer` with their own worker group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rltrain.common import logs
from rltrain.common.attempt import report_to_supervisor
from rltrain.common.device import Device, get_device, threads_per_worker
from rltrain.common.env import worker_environment
from rltrain.common.errors import ConfigError
from rltrain.common.stop import Stop
from rltrain.config.agents import several_turns
from rltrain.config.load import to_dict
from rltrain.config.loaded import LoadedConfig
from rltrain.config.schema import Config
from rltrain.config.schema.engines import ENGINES
from rltrain.models.weights.spec import specs_of
from rltrain.run.assemble import make_evaluation, make_trainer, sampler_of
from rltrain.run.callbacks.callback import CallbackList
from rltrain.run.callbacks.drift import Drift
from rltrain.run.callbacks.notice import Notice
from rltrain.run.callbacks.profile import Profile
from rltrain.run.callbacks.user import UserCallbacks
from rltrain.run.changes import log_changes, log_finished, write_run_files
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.resume import ResumePoint, find_resume_point, verified
from rltrain.run.checkpoints.room import check_room, checkpoint_bytes
from rltrain.run.checkpoints.saver import Saver
from rltrain.run.fit import Trainer
from rltrain.run.preflight.health import check_nodes, refuse, try_collectives
from rltrain.run.preflight.models import PreflightResult, check_images
from rltrain.run.preflight.settings import preflight
from rltrain.run.previous_attempt import append_last_line, archive_outputs, evaluation_folder, pending_validation
from rltrain.run.report.plan import describe
from rltrain.run.report.sample_logger import SampleLogger, keeps_samples
from rltrain.run.report.sample_writer import WriterProcess
from rltrain.run.report.table import METRICS
from rltrain.run.report.tracking import Tracker
from rltrain.run.scorers import start_pool
from rltrain.run.splits import Data, load_data
from rltrain.runtime.cluster import cluster_address, free, ray_logs, reserve, share, start_ray
from rltrain.runtime.group import WorkerGroup
from rltrain.runtime.hang import Deadlines
from rltrain.runtime.processes import ask_nodes
from rltrain.runtime.ray_watchdog import (
    cleanup_after_exit,
    raise_if_lost,
    require_heartbeat,
    stop_ray,
    unless_lost,
    watch_ray,
)
from rltrain.trainer.plan import Plan, make_plan
from rltrain.trainer.ppo import PPOTrainer

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


_WORKER = "rltrain.workers.hybrid:HybridWorker"


@dataclass(frozen=True)
class RunSpec:
    """The specification of a run before anything is started."""

    loaded: LoadedConfig
    plan: Plan
    data: Data
    folder: RunFolder
    start: ResumePoint
    find: Callable[[], ResumePoint]
    """Function that finds another checkpoint to start from; see `verified`."""


def start_run(spec: RunSpec, stop: Stop, user: UserCallbacks, closing: ExitStack, deadlines: Deadlines) -> Trainer:
    """Start workers, models, scorers and trackers. Return the trainer of the run.

    closing: holds the exits of everything that was started; the trainer takes it over.
    """
    loaded, plan, data, folder, start = spec.loaded, spec.plan, spec.data, spec.folder, spec.start
    cfg, device = loaded.config, get_device(loaded.config.trainer.device)
    # Stored once, not once per process. Images from a dataset class are stored with the prompts.
    judged = cfg.reward.judge.images  # only a judge reads the images of the rows
    splits = {name: share(rows if judged else rows.without_images()) for name, rows in data.rows.items()}
    prompts = share(data.prompts)
    devices = logs.count(plan.num_devices, f"{device.kind.upper()} device")
    with logs.waiting(f"waiting for {devices} on {logs.count(cfg.trainer.nnodes, 'node')}"):
        groups = reserve(cfg.cluster, device)
    # The stack unwinds in reverse: writer, trackers, scorers and workers end before their devices are released.
    closing.callback(unless_lost(free), groups)
    threads, callbacks = threads_per_worker(cfg.trainer.n_gpus_per_node), CallbackList()

    def on_wait() -> None:
        """Check the cluster, callbacks and signals. Called wherever the driver waits for workers or scorers."""
        raise_if_lost()
        callbacks.on_wait()
        stop.raise_if_asked()

    # Scorers are started before models are loaded, so that a broken scorer fails early.
    pool = start_pool(cfg.scoring, cfg.algorithm, plan, splits, data, groups, folder.path, deadlines, on_wait)
    rest = (folder.path / "logs", on_wait, deadlines, _environment(cfg, device, threads), callbacks.on_failure)
    group = WorkerGroup("hybrid", groups, device, threads, *rest)
    # After an error, an orderly stop would wait for hanging workers.
    closing.push(lambda kind, error, where: group.stop() if error is None else group.kill())
    # If a signal stops the run at once, scorers end with Ray; a shutdown would wait for the current response.
    closing.callback(unless_lost(lambda: pool.shutdown() if pool and not stop.at_once else None))
    workers = logs.count(group.world, "worker")
    with logs.waiting(f"looking at {logs.count(cfg.trainer.nnodes, 'node')}"):
        refuse(check_nodes(group, cfg.trainer, specs_of(cfg, device), folder.path, start.folder))
    start = verified(start, group, folder, spec.find)
    owes = pending_validation(cfg.trainer, bool(cfg.data.val_files), folder.path, start.step, plan)
    reads_rows = cfg.reward_model.classifies or several_turns(cfg.actor_rollout_ref.rollout)
    with logs.waiting(f"starting {workers}"):
        # Only the data is large enough to be shared through references.
        group.start(_WORKER, {"cfg": cfg, "prompts": prompts, "rows": splits if reads_rows else None})
        try_collectives(group)
    weights = (not plan.passes.trains and start.folder) or cfg.actor_rollout_ref.model.path
    ppo = validation = sample_logger = None
    engine = "no" if plan.passes.supervised else f"the {cfg.actor_rollout_ref.rollout.name}"
    with logs.waiting(f"loading {weights} on {workers}, with {engine} engine"):
        if plan.passes.trains:
            ppo = make_trainer(cfg, plan, data, group, pool, callbacks.on_phase)
        else:
            validation = make_evaluation(cfg, plan, data, group, pool, start.folder, callbacks.on_phase)
    saver = _resume(spec, start, ppo, callbacks) if ppo else None
    # Only a run that can start moves the files of the previous run aside.
    if ppo:
        archive_outputs(cfg.trainer, folder.path, start.step, anew=not start.is_of(folder.path), validates=owes)
    else:
        closing.callback((folder := evaluation_folder(cfg.trainer, folder, start.step)).release)
    write_run_files(folder, loaded, plan, group.hosts)
    tracker = Tracker.of(cfg.trainer, to_dict(cfg), folder.path, start.step, plan.total_steps)
    # `enter_context` instead of `callback`, because a tracker must know whether the run failed.
    closing.enter_context(tracker)
    if keeps_samples(cfg.trainer):
        writer = WriterProcess(splits, prompts, data.encoder.backend)
        callbacks.add(sample_logger := SampleLogger(cfg.trainer, folder.path, writer, tracker))
        closing.callback(unless_lost(lambda: sample_logger.close(wait=not stop.at_once)))
    # User callbacks get the sample logger's metrics. The notice is last, because a step ends when all others have run.
    callbacks.add(user, Drift(partial(ask_nodes, group)), tracker, Profile(cfg.trainer, folder.path, group))
    if saver:
        callbacks.add(Notice(stop, lambda: saver.under_way_s))
    parts = ppo, saver, callbacks, owes, validation, sample_logger
    return Trainer(cfg, plan, folder, stop, start.step, closing.pop_all(), *parts)


def _resume(spec: RunSpec, start: ResumePoint, ppo: PPOTrainer, callbacks: CallbackList) -> Saver:
    """Restore the training state from ``start``. Return the saver, which is registered as a callback."""
    cfg, sizes = spec.loaded.config, ppo.model_sizes
    numbers = int(sizes["num_parameters"]), int(sizes["trained_parameters"])
    num_bytes = checkpoint_bytes(cfg.actor_rollout_ref.actor, spec.plan.passes, *numbers)
    rows = spec.data.rows["train"]
    saver = Saver(
        cfg, spec.folder, ppo.actor, ppo.critic, rows.identity(), num_bytes, callbacks, spec.plan.steps_per_epoch,
        ppo.reference, sorted(set(rows.sources())),
    )  # fmt: skip
    callbacks.add(saver)
    # Disk space is checked with the sizes of the loaded weights and of the verified checkpoint.
    saver.check_room(start.step, spec.plan.total_steps, start.size)
    with logs.waiting(f"loading {start.folder}") if start.folder else nullcontext():
        saver.load(start)
    ppo.restore(start.progress, start.folder)
    return saver


def _environment(cfg: Config, device: Device, threads: int) -> dict[str, str]:
    rollout = cfg.actor_rollout_ref.rollout
    graphs = not ENGINES[rollout.name].embedded and not rollout.enforce_eager
    return worker_environment(device.kind, threads, rollout.name, graphs=graphs)
