"""The one place that puts a trainer together: the command, `rltrain.build` and the tests all come through here.

`make_trainer` connects roles, rewards, sampler and algorithm over an existing worker group; tests give a group that
lives in their own process. `build` also makes everything around the trainer: data, run folder, Ray, workers, scorers,
trackers. An ExitStack records how to end each of these, and the `Trainer` unwinds the stack, so that the order is right
however the run ends. Left out: a way to start only some of these parts, except that a validation alone loads no
optimizer, critic or reference.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rltrain import logs
from rltrain.config.algorithm_schema import FILTER_METRICS
from rltrain.config.load import LoadedConfig, to_dict
from rltrain.config.schema import Config
from rltrain.controller.cluster import cluster_address, free, ray_logs, reserve, share, start_ray
from rltrain.controller.failures import death_watch
from rltrain.controller.group import PlacementGroupSchedulingStrategy, WorkerGroup
from rltrain.controller.hang import Deadlines
from rltrain.controller.lifeline import check, ended_after_us, stop_ray, unless_lost, watching, working
from rltrain.controller.sample_writer import WriterProcess
from rltrain.data.chat import ChatEncoder, chat_encoder
from rltrain.data.custom import EpochSampler, custom_rows
from rltrain.data.order import BatchOrder
from rltrain.data.prompts import PromptStore, check_limit_images, check_vocabulary, encode_prompts
from rltrain.data.rows import Rows, keys_of, read_rows
from rltrain.data.sampler import Sampler, make_sampler
from rltrain.device import Device, get_device, threads_per_worker
from rltrain.env import tell_supervisor, worker_environment
from rltrain.env_report import device_facts, facts
from rltrain.errors import ConfigError, DataError, RltrainError
from rltrain.plugin import is_plugin, user_traceback
from rltrain.rewards.processes.crew import PoolWatch
from rltrain.rewards.processes.pool import RewardPool
from rltrain.rewards.processes.score import Score
from rltrain.stop import Stop
from rltrain.trainer.archive import Archive, keeps_samples
from rltrain.trainer.callbacks import Callbacks
from rltrain.trainer.changes import tell_changes, tell_finished, write_config
from rltrain.trainer.checkpoint import RunFolder
from rltrain.trainer.drift import Drift
from rltrain.trainer.earlier import METRICS, complete, owes_validation, set_aside
from rltrain.trainer.experience import Experience
from rltrain.trainer.health import look_at_nodes, refuse, try_collectives
from rltrain.trainer.plan import ImageSizes, Plan, describe, make_plan
from rltrain.trainer.ppo import PPOTrainer
from rltrain.trainer.preflight import preflight
from rltrain.trainer.preflight_models import Findings, look_at_images
from rltrain.trainer.progress import Start, find_start, verified
from rltrain.trainer.rewards import Rewards
from rltrain.trainer.roles import Critic, Policy, RewardModel
from rltrain.trainer.room import check_room, checkpoint_bytes
from rltrain.trainer.run import Trainer
from rltrain.trainer.saving import Saver
from rltrain.trainer.trackers import RunInfo
from rltrain.trainer.tracking import Tracker
from rltrain.workers.roles import Models

log = logging.getLogger(__name__)
_WORKER = "rltrain.workers.hybrid:HybridWorker"


@dataclass(frozen=True)
class Data:
    """The rows and the tokenised prompts of each split ("train", "val"), and the encoder that made them."""

    rows: dict[str, Rows]
    prompts: dict[str, PromptStore]
    encoder: ChatEncoder

    @cached_property
    def images(self) -> ImageSizes | None:
        """Sizes of the images, or None where no prompt has any."""
        return ImageSizes.of(self.prompts)


def build(
    loaded: LoadedConfig, stop: Stop | None = None, callbacks: Sequence[Any] = (), notes: Sequence[str] = ()
) -> Trainer:
    """A trainer with its data read, its workers started and its models loaded; see `Trainer`. Raises RltrainError.

    callbacks: objects, besides those that ``trainer.callbacks`` names. stop: the signals received so far, if the caller
    listens to signals already. notes: what is said of the settings. Nothing is started if an earlier run of the folder
    has made all steps.
    """
    stop = stop or Stop()
    cfg = loaded.config
    stop.notice_s = cfg.trainer.stop_notice_s
    incidents = Path(cfg.trainer.default_local_dir).expanduser().resolve() / "incidents"
    limits = (cfg.trainer.hang_floor_s, cfg.trainer.hang_factor, incidents, cfg.trainer.hang_timeout_s)
    deadlines = Deadlines(*limits)
    with ExitStack() as closing, ExitStack() as reading:
        # Entered first, so that it ends last and train.log has what the other ends say.
        closing.enter_context(logs.session())
        reading.enter_context(watching(deadlines, local=False, reads=True, kept=stop.kept))
        reading.enter_context(working())
        found = preflight(loaded)
        _tell(found, notes)
        told = Callbacks(cfg.trainer.callbacks, callbacks)
        data = load_data(cfg)
        look_at_images(cfg, of_rows := Findings(images=data.images))
        _tell(of_rows)
        plan = make_plan(cfg, len(data.prompts["train"]), data.prompts["train"].num_dropped, images=data.images)
        log.info("%s", describe(plan, cfg))
        sampler_of(cfg, plan, data.rows["train"], trial=True)
        folder = RunFolder(cfg.trainer.default_local_dir)
        closing.callback(folder.release)
        tell_supervisor(folder=str(folder.path))
        logs.open_train_log(folder.path)
        # Before Ray: a checkpoint that does not fit this run is refused within seconds, not after the models are
        # loaded.
        identity, images = data.rows["train"].identity(), plan.passes.images_in_training

        def find() -> Start:
            start = find_start(cfg, folder, identity, images=images)
            stop.reached(start.step, plan.total_steps, start.step)
            return start

        start = find()
        if start.is_of(folder.path):
            complete(folder.path / METRICS, start.step, start.progress.metrics)
        changes = tell_changes(loaded, start)
        owes = owes_validation(cfg, folder.path, start.step, plan.total_steps)
        if start.step >= plan.total_steps and not owes:
            tell_finished(folder.path, plan.total_steps, changes)
            return Trainer(cfg, plan, folder, stop, start.step, closing.pop_all())
        size = start.size or checkpoint_bytes(cfg, found.num_parameters, found.num_trained)
        check_room(cfg.trainer, folder.path, size, start.step, plan.total_steps)
        reading.close()
        with logs.waiting("starting Ray"), stop.keeping_handlers("starting Ray"):
            if started := start_ray(cfg):  # not where the caller has started one
                closing.enter_context(ended_after_us(not cluster_address(cfg)))
                closing.callback(unless_lost(stop_ray))
        # A cluster that this run has joined is others' too, and outlives it.
        closing.enter_context(watching(deadlines, local=started and not cluster_address(cfg), kept=stop.kept))
        log.info("Ray's logs: %s", ray_logs())
        with working(), stop.telling():
            trainer = _start(loaded, plan, data, folder, start, find, stop, told, closing, deadlines)
        # From here on the trainer owns what was started. An error before this line unwinds it in the `with` above.
        trainer.closing = closing.pop_all()
    return trainer


def _tell(found: Findings, notes: Sequence[str] = ()) -> None:
    """Raise all problems at once, before anything that takes long or changes the disk; log what is worth a look."""
    if found.problems:
        raise ConfigError("\n".join(found.problems))
    for note in [*notes, *found.notes]:
        log.warning("note: %s", note)


def _start(
    loaded: LoadedConfig,
    plan: Plan,
    data: Data,
    folder: RunFolder,
    start: Start,
    find: Callable[[], Start],
    stop: Stop,
    callbacks: Callbacks,
    closing: ExitStack,
    deadlines: Deadlines,
) -> Trainer:
    """Workers, models, scorers and trackers of a run that has steps to make. find: another start; see `verified`."""
    cfg = loaded.config
    device = get_device(cfg.trainer.device)
    # Rows and prompts go into the object store once, not per process. Pictures that a class has made go with prompts.
    splits = {name: share(each.without_pictures()) for name, each in data.rows.items()}
    prompts = share(data.prompts)
    devices = logs.count(plan.num_devices, f"{device.kind.upper()} device")
    with logs.waiting(f"waiting for {devices} on {logs.count(cfg.trainer.nnodes, 'node')}"):
        groups = reserve(cfg, device)
    # The stack unwinds in reverse: trackers, writer, scorers and workers end before their devices are given back.
    closing.callback(unless_lost(free), groups)
    threads = threads_per_worker(cfg.trainer.n_gpus_per_node)
    polled = [check, stop.check]  # wherever the driver waits, for workers or for scorers
    # A scorer that does not work is better known before models are loaded.
    with logs.waiting("trying the scorers on a row of every data source"):
        pool = start_pool(cfg, plan.num_reward_workers, splits, groups, folder.path, deadlines, partial(_ask, polled))
    rest = (folder.path / "logs", partial(_ask, polled), deadlines, _environment(cfg, device, threads))
    group = WorkerGroup("hybrid", groups, device, threads, *rest)
    # After an error an orderly end would wait for workers that hang.
    closing.push(lambda kind, error, where: group.stop() if error is None else group.kill())
    # With a signal that stops at once, scorers end with Ray too: an answer that is being scored would be waited for.
    closing.callback(unless_lost(lambda: pool.shutdown() if pool and not stop.at_once else None))
    workers = logs.count(group.world, "worker")
    with logs.waiting(f"looking at {logs.count(cfg.trainer.nnodes, 'node')}"):
        refuse(look_at_nodes(group, cfg, folder.path, start.folder))
    start = verified(start, group, folder, find)
    owes = owes_validation(cfg, folder.path, start.step, plan.total_steps)
    with logs.waiting(f"starting {workers}"):
        # A Config object would arrive as a reference too; only the data is big enough to be shared.
        group.start(_WORKER, {"cfg": cfg, "prompts": prompts, "rows": splits if cfg.reward_model.enable else None})
        try_collectives(group)
    engine, model = cfg.actor_rollout_ref.rollout.name, cfg.actor_rollout_ref.model.path
    with logs.waiting(f"loading {model} on {workers}, with the {engine} engine"):
        # Validation without a checkpoint needs the policy's weights alone: no optimizer, critic or reference.
        trains = bool(start.folder) or not cfg.trainer.val_only
        ppo = make_trainer(cfg, plan, data, group, pool, callbacks, trains=trains)
    total, trained = (int(ppo.model_sizes[each]) for each in ("num_parameters", "trained_parameters"))
    log.info("%s, %s parameters, %s of them trained", workers, f"{total:,}", f"{trained:,}")
    saver = Saver(cfg, folder, ppo.actor, ppo.critic, data.rows["train"].identity(), total, trained, callbacks)
    polled.insert(1, saver.poll)
    group.before_end = saver.keep
    # Of the weights as they were loaded, and of the checkpoint that the workers have found whole.
    saver.check_room(start.step, plan.total_steps, start.size)
    with logs.waiting(f"loading {start.folder} on {workers}") if start.folder else nullcontext():
        saver.load(start)
    ppo.restore(start.progress, start.folder)
    # Only once the run can start: a start that is refused leaves the files of the run before as they are.
    set_aside(cfg.trainer, folder.path, start.step, anew=not start.is_of(folder.path), validates=owes)
    write_run_files(folder, loaded, plan, group.hosts)
    names = (cfg.trainer.project_name, cfg.trainer.experiment_name)
    tracker = Tracker(cfg.trainer.logger, RunInfo(*names, to_dict(cfg), folder.path, start.step), plan.total_steps)
    if keeps_samples(cfg):
        writer = WriterProcess(splits, prompts, data.encoder.backend)
        archive = ppo.archive = saver.archive = Archive(cfg, folder.path, writer, tracker)
        closing.callback(unless_lost(lambda: archive.close(wait=not stop.at_once)))
    # As a context and not as a callback, because a tracker must learn whether the run failed.
    closing.enter_context(tracker)
    return Trainer(cfg, plan, folder, stop, start.step, ExitStack(), ppo, tracker, saver, Drift.of(group), owes)


def _ask(polled: Sequence[Callable[[], None]]) -> None:
    for each in polled:
        each()


def _environment(cfg: Config, device: Device, threads: int) -> dict[str, str]:
    rollout = cfg.actor_rollout_ref.rollout
    graphs = rollout.name != "hf" and not rollout.enforce_eager
    return worker_environment(device.kind, threads, rollout.name, graphs=graphs)


def make_trainer(
    cfg: Config,
    plan: Plan,
    data: Data,
    group: Any,
    pool: Any,
    callbacks: Callbacks | None = None,
    *,
    trains: bool = True,
) -> PPOTrainer:
    """Load the models on ``group`` and put the algorithm over it.

    group: has the interface of `WorkerGroup`, with a `HybridWorker` per rank. pool: has the interface of `RewardPool`
    (None: only a reward model scores). trains: if False, the policy's weights go to the engines and nothing is trained.
    """
    sizes = group.call(Models.init_models, plan.passes, trains)[0]
    policy = Policy(group, plan.passes)
    rewards = Rewards(cfg, data.rows, pool, RewardModel(group) if cfg.reward_model.enable else None)
    experience = Experience(cfg, plan, policy, rewards, sampler_of(cfg, plan, data.rows["train"]))
    critic = Critic(group, plan.passes) if plan.passes.values and trains else None
    return PPOTrainer(cfg, plan, policy, critic, rewards, experience, sizes, callbacks, prompts=data.prompts["train"])


def sampler_of(cfg: Config, plan: Plan, rows: Rows, *, trial: bool = False) -> Sampler:
    """What draws the prompts of a run. Raises ConfigError for a sampler that cannot be used.

    ``trial``: it also draws a batch, and is to be thrown away.
    """
    # The order draws a round of generation, which under dynamic sampling is another number of prompts than a step
    # learns from.
    order = BatchOrder(len(rows), plan.prompts_per_round, cfg.data.seed, cfg.data.shuffle)
    sampler, name = make_sampler(cfg.data, order, rows), f"data.sampler.name={cfg.data.sampler.name}"
    steps = sampler.batches_per_epoch if isinstance(sampler, EpochSampler) else order.steps_per_epoch
    if steps != order.steps_per_epoch and cfg.trainer.total_training_steps is None:
        raise ConfigError(
            f"{name}: an epoch of it has {steps} batches, and one of the data {order.steps_per_epoch}. "
            "Say with trainer.total_training_steps how many steps there shall be."
        )
    if trial and is_plugin(cfg.data.sampler.name):
        try:
            sampler.rows(0)
        except RltrainError:
            raise
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it is reported
            raise ConfigError(f"{name} draws no batch:\n{user_traceback(error)}") from None
    return sampler


def start_pool(
    cfg: Config,
    num_workers: int,
    splits: dict[str, Any],
    groups: Sequence[Any],
    folder: Path,
    deadlines: Deadlines,
    stopped: Callable[[], None],
) -> RewardPool | None:
    """The rule scorers on the nodes of ``groups``, tried on one row of every data source; None where a reward model
    alone decides.

    What they print goes to ``reward.log`` in ``folder``. deadlines: of the trial; they get the scorers' stacks.
    stopped(): raises what ends a wait.
    """
    if not cfg.reward_model.runs_scorers:
        return None

    watch = PoolWatch(
        death_watch(),
        stopped,
        lambda: deadlines.write_stacks("reward"),
        min(PoolWatch.late_s, deadlines.fixed_s or PoolWatch.late_s),
        deadlines.limit_s("trial"),
    )
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0) for group in groups]
    pool = RewardPool(cfg, num_workers, splits, folder / "reward.log", watch, places)
    deadlines.others["scorers"] = pool.stacks
    for split in splits:
        scores = pool.check(split)
        if split == "train":
            check_columns(cfg, scores)
    return pool


def check_columns(cfg: Config, scores: Sequence[Score]) -> None:
    """Raise ConfigError if the config names numbers that no scorer returns, judging by one row per data source."""
    algorithm = cfg.algorithm
    wanted = [("algorithm.gdpo_reward_keys", name) for name in algorithm.gdpo_reward_keys]
    wanted += [("reward.weights", name) for name in cfg.reward.weights]
    if algorithm.filter_groups.enable and algorithm.filter_groups.metric not in FILTER_METRICS:
        wanted.append(("algorithm.filter_groups.metric", algorithm.filter_groups.metric))
    for key, name in wanted:
        # A score that failed tells nothing about its names, as the ground truth need not look like an answer.
        missing = [score for score in scores if score.status == "ok" and name not in (*score.extras, "score")]
        if missing:
            have = ", ".join(["score", *sorted(missing[0].extras)])
            raise ConfigError(
                f"{key}={name}: a scorer of data.train_files returns no number of that name. It returns {have}."
            )


def load_data(cfg: Config) -> Data:
    """Read, check and tokenise the prompts of both splits.

    ``rows`` holds only the rows of the prompts that pass the filter.
    """
    data, encoder = cfg.data, chat_encoder(cfg)
    rows: dict[str, Rows] = {}
    prompts: dict[str, PromptStore] = {}
    for split, files, limit in (
        ("train", data.train_files, data.train_max_samples),
        ("val", data.val_files, data.val_max_samples),
    ):
        if not files:
            continue
        log.info("reading data.%s_files=%s", split, files)
        if data.custom_cls:
            found = custom_rows(data, files, encoder.tokenizer, limit)
        else:
            found = read_rows(files, **keys_of(data), max_rows=limit, seed=data.seed if data.shuffle else None)
        rows[split], prompts[split] = encode_split(cfg, split, found, encoder)
        sources = ", ".join(rows[split].data_sources())
        prompts_left, num_dropped = logs.count(len(prompts[split]), "prompt"), prompts[split].num_dropped
        log.info("%s: %s of %s (%d too long and left out)", split, prompts_left, sources, num_dropped)
    return Data(rows, prompts, encoder)


def encode_split(cfg: Config, split: str, found: Rows, encoder: ChatEncoder) -> tuple[Rows, PromptStore]:
    """The rows of the prompts that pass the filter, and these prompts, tokenised. Raises DataError."""
    data = cfg.data
    store = encode_prompts(found, encoder, data.max_prompt_length, data.filter_overlong_prompts, data.truncation)
    if not len(store):
        raise DataError(
            f"{found.paths}: no prompt is left for data.{split}_files. Raise "
            f"data.max_prompt_length={data.max_prompt_length}."
        )
    # Rows and prompts must be numbered alike: a batch carries one row number, which finds the tokens and the ground
    # truth.
    rows = found.select(store.row_index)
    check_vocabulary(rows, store, encoder)
    check_limit_images(rows, store, cfg.actor_rollout_ref.rollout.limit_images)
    return rows, store


def write_run_files(folder: RunFolder, loaded: LoadedConfig, plan: Plan, hosts: list[str]) -> None:
    """config.yaml (secrets masked), plan.json, env.json: what this run was. hosts: those of the workers."""
    write_config(folder, loaded)
    folder.write("plan.json", json.dumps(asdict(plan), indent=1, default=str))
    folder.write("env.json", json.dumps(facts() | device_facts() | {"hosts": hosts}, indent=1))
