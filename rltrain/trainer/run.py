"""From a validated config to an exit code: data, cluster, workers, loop, report."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rltrain import logs
from rltrain.config.load import LoadedConfig, to_dict
from rltrain.config.schema import Config
from rltrain.controller.cluster import ray_logs, reserve, share, start_ray, stop_ray
from rltrain.controller.group import WorkerGroup
from rltrain.controller.hang import Deadlines
from rltrain.controller.sample_writer import WriterProcess
from rltrain.data.chat import ChatEncoder, PromptStore, chat_encoder, encode_prompts
from rltrain.data.order import BatchOrder
from rltrain.data.rows import Rows, read_rows
from rltrain.data.sampler import make_sampler
from rltrain.device import Device, get_device, threads_per_worker
from rltrain.env_report import device_facts, facts
from rltrain.errors import ConfigError, DataError
from rltrain.report import show_report
from rltrain.rewards.processes.pool import RewardPool
from rltrain.rewards.processes.score import Score
from rltrain.stop import Stop
from rltrain.trainer.archive import Archive, keeps_samples
from rltrain.trainer.callbacks import Callbacks
from rltrain.trainer.changes import tell_changes, write_config
from rltrain.trainer.checkpoint import RunFolder
from rltrain.trainer.experience import Experience
from rltrain.trainer.plan import Plan, describe, make_plan
from rltrain.trainer.ppo import PPOTrainer
from rltrain.trainer.preflight import preflight
from rltrain.trainer.progress import Start, find_start
from rltrain.trainer.rewards import Rewards
from rltrain.trainer.roles import Critic, Policy, RewardModel
from rltrain.trainer.saving import Saver
from rltrain.trainer.trackers import RunInfo
from rltrain.trainer.tracking import Tracker
from rltrain.workers.roles import Models

log = logging.getLogger(__name__)
_WORKER = "rltrain.workers.hybrid:HybridWorker"


def run_training(loaded: LoadedConfig, stop: Stop) -> int:
    """Train as configured. Returns the exit code; raises RltrainError for what a user can mend, and Interrupted if ``stop`` ended it."""
    with logs.session():
        return _run(loaded, stop)


def _run(loaded: LoadedConfig, stop: Stop) -> int:
    cfg = loaded.config
    device = get_device(cfg.trainer.device)
    found = preflight(loaded)
    if found.problems:
        raise ConfigError("\n".join(found.problems))
    for note in found.notes:
        log.warning("note: %s", note)
    callbacks = Callbacks(cfg.trainer.callbacks)
    encoder = chat_encoder(cfg)
    rows, prompts = load_data(cfg, encoder)
    plan = make_plan(cfg, len(prompts["train"]), prompts["train"].num_dropped)
    log.info("%s", describe(plan, cfg))
    folder = RunFolder(cfg.trainer.default_local_dir)
    logs.open_train_log(folder.path)
    try:
        start = find_start(cfg, folder, rows["train"].identity())
        tell_changes(loaded, start)
        finished = start.step >= plan.total_steps and not cfg.trainer.val_only
        if finished:
            log.info("nothing left to do: the run has its %d steps (trainer.total_training_steps)", plan.total_steps)
        else:
            with logs.waiting("starting Ray"), stop.keeping_handlers("starting Ray"):
                start_ray(cfg)
            log.info("Ray's logs: %s", ray_logs())
            finished = _train(loaded, plan, device, rows, prompts, encoder, folder, start, stop, callbacks)
    finally:
        stop_ray()
        folder.release()
    if not finished:
        raise stop.interrupted()
    show_report(folder.path)
    return 0


def _train(
    loaded: LoadedConfig,
    plan: Plan,
    device: Device,
    rows: dict[str, Rows],
    prompts: dict[str, PromptStore],
    encoder: ChatEncoder,
    folder: RunFolder,
    start: Start,
    stop: Stop,
    callbacks: Callbacks,
) -> bool:
    """Returns whether the run got to its end."""
    cfg = loaded.config
    splits = {name: share(each) for name, each in rows.items()}
    shared_prompts = share(prompts)
    devices = logs.count(plan.num_devices, f"{device.kind.upper()} device")
    with logs.waiting(f"waiting for {devices} on {logs.count(cfg.trainer.nnodes, 'node')}"):
        placement = reserve(cfg, device)
    # A scorer that does not work is better known before models are loaded.
    with logs.waiting("trying the scorers on a row of every data source"):
        pool = start_pool(cfg, plan.num_reward_workers, splits, folder.path)
    threads = threads_per_worker(cfg.trainer.n_gpus_per_node)
    deadlines = Deadlines(cfg.trainer.hang_floor_s, cfg.trainer.hang_factor, folder.path / "incidents")
    group = WorkerGroup("hybrid", placement, device, threads, folder.path / "logs", stop.check, deadlines)
    workers = logs.count(group.world, "worker")
    with logs.waiting(f"starting {workers}"):
        # A Config object would arrive as a reference too; only the data is big enough to be shared.
        rows_too = splits if cfg.reward_model.enable else None
        group.start(_WORKER, {"cfg": cfg, "prompts": shared_prompts, "rows": rows_too})
    engine, model = cfg.actor_rollout_ref.rollout.name, cfg.actor_rollout_ref.model.path
    with logs.waiting(f"loading {model} on {workers}, with the {engine} engine"):
        sizes = group.call(Models.init_models, plan.passes)
    total, trained = sizes[0]["num_parameters"], sizes[0]["trained_parameters"]
    log.info("%s, %s parameters, %s of them trained", workers, f"{total:,}", f"{trained:,}")
    policy = Policy(group, plan.passes)
    critic = Critic(group, plan.passes) if plan.passes.values else None
    others = {"critic": critic} if critic else {}
    saver = Saver(cfg, folder, policy, others, rows["train"].identity(), total, trained, callbacks)
    saver.check_room(start.step, plan.total_steps)
    with logs.waiting(f"loading {start.folder} on {workers}") if start.folder else nullcontext():
        saver.load(start)
    write_run_files(folder, loaded, plan, group.hosts)
    names = (cfg.trainer.project_name, cfg.trainer.experiment_name)
    tracker = Tracker(cfg.trainer.logger, RunInfo(*names, to_dict(cfg), folder.path, start.step), plan.total_steps)
    order = BatchOrder(len(prompts["train"]), plan.prompts_per_round, cfg.data.seed, cfg.data.shuffle)
    sampler = make_sampler(cfg.data.sampler.name, order, rows["train"], cfg.data.sampler.revisit)
    reward_model = RewardModel(group) if cfg.reward_model.enable else None
    rewards = Rewards(cfg, rows, pool, reward_model)
    archive = None
    if keeps_samples(cfg):
        archive = Archive(cfg, folder.path, start.step, WriterProcess(splits, shared_prompts, encoder.backend), tracker)
    experience = Experience(cfg, plan, policy, rewards, sampler)
    trainer = PPOTrainer(cfg, plan, policy, critic, rewards, experience, sizes[0], callbacks, archive)
    trainer.restore(start.progress)
    try:
        with tracker:
            finished = trainer.fit(start.step, tracker, saver, stop)
    finally:
        if archive:
            archive.close(wait=not stop.at_once)
        if pool and not stop.at_once:  # else they end with Ray: an answer that is being scored would be waited for
            pool.shutdown()
    group.stop()
    return finished


def start_pool(cfg: Config, num_workers: int, splits: dict[str, Any], folder: Path) -> RewardPool | None:
    """The rule scorers, tried on one row of every data source; None where a reward model alone decides.

    What they print goes to ``reward.log`` in ``folder``.
    """
    if cfg.reward_model.enable and cfg.reward_model.rule_weight == 0:
        return None
    pool = RewardPool(cfg, num_workers, splits, log_file=folder / "reward.log")
    for split in splits:
        scores = pool.check(split)
        if split == "train":
            check_columns(cfg, scores)
    return pool


def check_columns(cfg: Config, scores: Sequence[Score]) -> None:
    """Raise ConfigError if the config names numbers that the scorers do not return (as far as one row of each source shows)."""
    algorithm = cfg.algorithm
    wanted = [("algorithm.gdpo_reward_keys", name) for name in algorithm.gdpo_reward_keys]
    wanted += [("reward.weights", name) for name in cfg.reward.weights]
    if algorithm.filter_groups.enable and algorithm.filter_groups.metric not in ("acc", "seq_reward"):
        wanted.append(("algorithm.filter_groups.metric", algorithm.filter_groups.metric))
    for key, name in wanted:
        missing = [score for score in scores if score.status == "ok" and name not in (*score.extras, "score")]
        if missing:
            have = ", ".join(["score", *sorted(missing[0].extras)])
            raise ConfigError(
                f"{key}={name}: a scorer of data.train_files returns no number of that name. It returns {have}."
            )


def load_data(cfg: Config, encoder: ChatEncoder | None = None) -> tuple[dict[str, Rows], dict[str, PromptStore]]:
    """Read, check and tokenise the train and validation prompts; rows whose prompt is filtered out are gone from both."""
    data = cfg.data
    encoder = encoder or chat_encoder(cfg)
    rows: dict[str, Rows] = {}
    prompts: dict[str, PromptStore] = {}
    for split, files, limit in (
        ("train", data.train_files, data.train_max_samples),
        ("val", data.val_files, data.val_max_samples),
    ):
        if not files:
            continue
        log.info("reading data.%s_files=%s", split, files)
        found = read_rows(files, prompt_key=data.prompt_key, reward_fn_key=data.reward_fn_key, max_rows=limit)
        store = encode_prompts(found, encoder, data.max_prompt_length, data.filter_overlong_prompts, data.truncation)
        if not len(store):
            raise DataError(
                f"data.{split}_files={files}: no prompt is left. Raise data.max_prompt_length={data.max_prompt_length}."
            )
        rows[split], prompts[split] = found.select(store.row_index), store
        sources = ", ".join(rows[split].data_sources())
        prompts_left = logs.count(len(store), "prompt")
        log.info("%s: %s of %s (%d too long and left out)", split, prompts_left, sources, store.num_dropped)
    return rows, prompts


def write_run_files(folder: RunFolder, loaded: LoadedConfig, plan: Plan, hosts: list[str]) -> None:
    """config.yaml (secrets masked), plan.json, env.json: what this run was. hosts: those of the workers."""
    write_config(folder, loaded)
    folder.write("plan.json", json.dumps(asdict(plan), indent=1, default=str))
    folder.write("env.json", json.dumps(facts() | device_facts() | {"hosts": hosts}, indent=1))
