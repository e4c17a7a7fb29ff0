"""Plan of a run: all counts that follow from the config. Computed once, exact, immutable."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rltrain.common.env import cpu_quota
from rltrain.common.errors import ConfigError
from rltrain.config.budgets import PassBudget, budgets, ranks_per_sample, tensor_size
from rltrain.config.check import uneven
from rltrain.config.passes import PASSES, ROLES, Role
from rltrain.config.schema import Config
from rltrain.config.schema.model import OptimConfig
from rltrain.config.step_passes import StepPasses, make_step_passes
from rltrain.data.prompts import PromptStore

_MOST_REWARD_WORKERS_PER_NODE = 16
_MOST_REWARD_WORKERS = 64


@dataclass(frozen=True)
class ImageSizes:
    """Image statistics of the training prompts. All are 0 if only validation prompts have images."""

    share: float = 0.0
    """Share of the prompts with images."""
    most_images: int = 0
    most_rows: int = 0
    most_tokens: int = 0
    """Maxima per prompt; rows are patches or tiles, tokens are image placeholders."""
    mean_bytes: float = 0.0
    """Bytes of pixels per prompt, mean over all prompts."""
    videos: bool = False
    """True if a prompt of the run has videos."""

    @classmethod
    def of(cls, stores: Mapping[str, PromptStore]) -> ImageSizes | None:
        """Measure the prompt stores by split. None if no prompt of the run has images. Loads one prompt's images."""
        if not any(store.has_images for store in stores.values()):
            return None
        videos = any(store.has_videos for store in stores.values())
        if not (train := stores.get("train")) or not train.has_images:
            return cls(videos=videos)
        has = train.num_images > 0
        images = train.encoded(int(np.argmax(has))).images
        assert images is not None
        row_bytes = images.nbytes / len(images.pixel_values)
        most_images, most_rows, most_tokens = (
            int(sizes.max()) for sizes in (train.num_images, train.image_rows, train.image_tokens)
        )
        mean_bytes = row_bytes * float(train.image_rows.mean())
        return cls(float(has.mean()), most_images, most_rows, most_tokens, mean_bytes, videos)


@dataclass(frozen=True)
class Plan:
    """Counts of a run, and the passes of a step. Prompts are rows of data; samples are prompt-response pairs."""

    passes: StepPasses
    num_nodes: int
    devices_per_node: int
    num_devices: int
    devices_per_copy: int
    sequence_parallel_size: int
    tensor_parallel_size: int
    ranks: dict[Role, int]
    """Data-parallel ranks per role: groups of devices that share sequences or matrices."""
    prompts_per_step: int
    answers_per_prompt: int
    samples_per_step: int
    most_samples_per_rank: int
    num_mini_batches: int
    prompts_per_mini_batch: int
    samples_per_mini_batch: int
    optimizer_steps_per_step: int
    prompts_per_round: int
    prompts_started: int
    max_generation_rounds: int
    critic_prompts_per_mini_batch: int
    num_reward_workers: int
    num_engine_replicas: int
    samples_per_replica: int
    budgets: dict[str, PassBudget]
    num_prompts: int | None
    steps_per_epoch: int | None
    total_steps: int
    schedule_steps: int
    lr_warmup_steps: int
    critic_lr_warmup_steps: int
    images: ImageSizes | None


def make_plan(
    config: Config, num_prompts: int | None = None, num_too_long: int = 0, *, images: ImageSizes | None = None
) -> Plan:
    """Compute all counts. Raises ConfigError if a count does not divide evenly.

    num_prompts: rows after filtering (None: unknown). num_too_long: rows that the filter removed. images: image sizes
    of the prompts.

    Samples need not be divisible: passes are balanced over ranks by sample, and engines get whole prompts. The run ends
    after the epochs or ``trainer.total_training_steps``, whichever comes first; total_steps is 0 if neither is known.
    schedule_steps: length of the learning rate schedule. It equals ``trainer.total_training_steps`` if that is set, as
    in verl.
    """
    if problems := list(uneven(config)):
        raise ConfigError("\n".join(problems))
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    ranks = dict.fromkeys(ROLES, devices)
    ranks |= {row.role: devices // ranks_per_sample(config, row.role, row.keys) for row in PASSES.values()}
    replicas = devices // rollout.tensor_model_parallel_size
    prompts, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    filtering, critic = config.algorithm.filter_groups, config.critic
    drawn = (config.data.gen_batch_size or prompts) if filtering.enable else prompts
    # Round first, because floats are not exact: 1.1 x 10 is slightly above 11.
    started = math.ceil(round(prompts * rollout.oversample_ratio, 6)) if rollout.stops_early else drawn
    steps_per_epoch = _steps_per_epoch(num_prompts, drawn, prompts, num_too_long)
    epochs, limit = (steps_per_epoch or 0) * config.trainer.total_epochs, config.trainer.total_training_steps
    total = min(limit or epochs, epochs or limit or 0)
    schedule = limit or total
    rows = images.most_rows if images else 0
    return Plan(
        passes=make_step_passes(config, images is not None, bool(images and images.most_images)),
        num_nodes=config.trainer.nnodes,
        devices_per_node=config.trainer.n_gpus_per_node,
        num_devices=devices,
        devices_per_copy=devices_per_copy(actor.fsdp_config.fsdp_size, devices),
        sequence_parallel_size=actor.ranks_per_sequence,
        tensor_parallel_size=tensor_size(config, "actor"),
        ranks=ranks,
        prompts_per_step=prompts,
        answers_per_prompt=rollout.n,
        samples_per_step=prompts * rollout.n,
        # Round up: if the number of samples is not divisible by the ranks, some ranks get one more.
        most_samples_per_rank=-(-prompts * rollout.n // ranks["actor"]),
        num_mini_batches=prompts // mini,
        prompts_per_mini_batch=mini,
        samples_per_mini_batch=mini * rollout.n,
        optimizer_steps_per_step=actor.ppo_epochs * (prompts // mini),
        prompts_per_round=drawn,
        prompts_started=started,
        max_generation_rounds=filtering.most_rounds if filtering.enable else 1,
        critic_prompts_per_mini_batch=critic.ppo_mini_batch_size,
        num_reward_workers=_reward_workers(config),
        num_engine_replicas=replicas,
        # Engines get whole prompts, so prompts are rounded up, not samples.
        samples_per_replica=-(-started // replicas) * rollout.n,
        # A reward model reads text only.
        budgets={name: budget.with_images(rows * (name != "reward")) for name, budget in budgets(config).items()},
        num_prompts=num_prompts,
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        schedule_steps=schedule,
        lr_warmup_steps=_warmup_steps(config, actor.optim, schedule),
        critic_lr_warmup_steps=_warmup_steps(config, critic.optim, schedule),
        images=images,
    )


def _reward_workers(config: Config) -> int:
    """Return the number of scoring processes. Assumes that all nodes have equally many cores. Processes that wait for a
    server need no core."""
    nodes, reward = config.trainer.nnodes, config.reward
    # Cores are counted by affinity and quota, because in a container `os.cpu_count` returns the cores of the whole
    # machine. One core per device is reserved for its worker.
    spare = int(min(len(os.sched_getaffinity(0)), cpu_quota())) - config.trainer.n_gpus_per_node
    in_each_node = 1 if reward.is_elsewhere else max(1, min(_MOST_REWARD_WORKERS_PER_NODE, spare))
    most = min(_MOST_REWARD_WORKERS, reward.judge.max_concurrency) if reward.judge.url else _MOST_REWARD_WORKERS
    return reward.num_workers or min(most, nodes * in_each_node)


def _steps_per_epoch(num_prompts: int | None, drawn: int, prompts: int, num_too_long: int) -> int | None:
    if num_prompts is not None and num_prompts < drawn:
        key = "gen_batch_size" if drawn != prompts else "train_batch_size"
        raise ConfigError(
            f"data.{key}={drawn} is more than the {num_prompts} training prompts. Lower it"
            + (f", or raise data.max_prompt_length ({num_too_long} are too long)." if num_too_long else ".")
        )
    # A step needs at least as many rounds as fill its batch.
    return None if num_prompts is None else max(1, num_prompts // (-(-prompts // drawn) * drawn))


def _warmup_steps(config: Config, optim: OptimConfig, total: int) -> int:
    if optim.lr_warmup_steps == 0 and config.trainer.verl_version in ("0.5", "0.7"):
        return 0
    # If the number of steps is 0 or less, the ratio applies, as in verl 0.9.
    return optim.lr_warmup_steps if optim.lr_warmup_steps > 0 else round(optim.lr_warmup_steps_ratio * total)


def devices_per_copy(fsdp_size: int, devices: int) -> int:
    """Return the number of devices that share one copy of the weights."""
    return fsdp_size if 0 < fsdp_size < devices else devices
