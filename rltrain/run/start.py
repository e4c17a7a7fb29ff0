"""Start of the workers of a run and of its scorers, trackers and sample writer.

An ExitStack records how to stop each of these, and the `Trainer` unwinds it, so that the order is right in every case.
An evaluation starts in the same way, without steps and their checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial

from rltrain.common import logs
from rltrain.common.device import Device, get_device, threads_per_worker
from rltrain.common.env import worker_environment
from rltrain.common.stop import Stop
from rltrain.config.agents import several_turns
from rltrain.config.load import to_dict
from rltrain.config.loaded import LoadedConfig
from rltrain.config.schema import Config
from rltrain.config.schema.engines import ENGINES
from rltrain.data.rows import Rows
from rltrain.models.weights.spec import specs_of
from rltrain.run.assemble import make_evaluation, make_trainer
from rltrain.run.callbacks.callback import CallbackList
from rltrain.run.callbacks.drift import Drift
from rltrain.run.callbacks.notice import Notice
from rltrain.run.callbacks.profile import Profile
from rltrain.run.callbacks.user import UserCallbacks
from rltrain.run.changes import write_run_files
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.resume import ResumePoint, verified
from rltrain.run.checkpoints.room import checkpoint_bytes
from rltrain.run.checkpoints.saver import Saver
from rltrain.run.fit import Trainer
from rltrain.run.preflight.health import check_nodes, refuse, try_collectives
from rltrain.run.previous_attempt import archive_outputs, evaluation_folder, pending_validation
from rltrain.run.report.sample_logger import SampleLogger, keeps_samples
from rltrain.run.report.sample_writer import WriterProcess
from rltrain.run.report.tracking import Tracker
from rltrain.run.scorers import start_pool
from rltrain.run.splits import Data
from rltrain.runtime.cluster import free, reserve, share
from rltrain.runtime.group import WorkerGroup
from rltrain.runtime.hang import Deadlines
from rltrain.runtime.processes import ask_nodes
from rltrain.runtime.ray_watchdog import raise_if_lost, unless_lost
from rltrain.trainer.plan import Plan
from rltrain.trainer.ppo import PPOTrainer

log = logging.getLogger(__name__)
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
    # Rows and prompts are stored once, not once per process. Images from a dataset class are stored with the prompts.
    splits = {name: share(_as_scored(cfg, rows)) for name, rows in data.rows.items()}
    prompts = share(data.prompts)
    devices = logs.count(plan.num_devices, f"{device.kind.upper()} device")
    with logs.waiting(f"waiting for {devices} on {logs.count(cfg.trainer.nnodes, 'node')}"):
        groups = reserve(cfg.cluster, device)
    # The stack unwinds in reverse: trackers, writer, scorers and workers end before their devices are released.
    closing.callback(unless_lost(free), groups)
    threads = threads_per_worker(cfg.trainer.n_gpus_per_node)
    callbacks = CallbackList()

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
    if keeps_samples(cfg.trainer):
        writer = WriterProcess(splits, prompts, data.encoder.backend)
        callbacks.add(sample_logger := SampleLogger(cfg.trainer, folder.path, writer, tracker))
        closing.callback(unless_lost(lambda: sample_logger.close(wait=not stop.at_once)))
    # `enter_context` instead of `callback`, because a tracker must know whether the run failed.
    closing.enter_context(tracker)
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


def _as_scored(cfg: Config, rows: Rows) -> Rows:
    """Return the rows for the scorers and the sample writer. They include images only if a judge reads them."""
    return rows if cfg.reward.judge.images else rows.without_images()
