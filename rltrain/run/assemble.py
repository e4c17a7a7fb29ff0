"""Assembly of the algorithm over the workers of a run.

This module does not start workers, because tests pass an in-process worker group. It only loads the models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rltrain.common.errors import ConfigError, RltrainError
from rltrain.common.logs import count
from rltrain.common.plugin import is_plugin, user_traceback
from rltrain.config.schema import Config
from rltrain.config.schema.trainer import EPOCH
from rltrain.data.batch_sampler import BatchOrder
from rltrain.data.custom import EpochSampler
from rltrain.data.mixing import mixed_order
from rltrain.data.rows import Rows
from rltrain.data.sampler import Sampler, make_sampler
from rltrain.rewards.processes.device_judge import max_replies
from rltrain.run.splits import Data
from rltrain.trainer.experience import Experience
from rltrain.trainer.judge import Judge
from rltrain.trainer.plan import Plan
from rltrain.trainer.ppo import PPOTrainer
from rltrain.trainer.rewards import Rewards
from rltrain.trainer.roles import Critic, InferenceModels, Policy, Reference, RewardModel, StepModels
from rltrain.trainer.validation import Validation, rollout_seed
from rltrain.workers.interface.roles import Models

log = logging.getLogger(__name__)


def make_trainer(
    cfg: Config,
    plan: Plan,
    data: Data,
    group: Any,
    pool: Any,
    on_phase: Callable[[str], None] = lambda name: None,
) -> PPOTrainer:
    """Load the models on ``group`` and build the algorithm on top of it.

    group: has the interface of `WorkerGroup`, with a `HybridWorker` per rank. pool: has the interface of `RewardPool`
    (None: only a reward model scores). on_phase(name): called when a phase begins.
    """
    models, rewards = _load(cfg, plan, data, group, pool)
    log.info("%s parameters are trained", f"{int(models.sizes['trained_parameters']):,}")
    experience = Experience(cfg, plan, models.policy, rewards, sampler_of(cfg, plan, data.rows["train"]))
    prompts = data.prompts
    return PPOTrainer(cfg, plan, models, rewards, experience, prompts["train"], on_phase, prompts.get("val"))


def make_evaluation(
    cfg: Config, plan: Plan, data: Data, group: Any, pool: Any, folder: Path | None, on_phase: Callable[[str], None]
) -> Validation:
    """Build a validation without the algorithm. ``group`` loads the policy only for its engines.

    folder: the checkpoint to load weights from (None: use the model folder). The other arguments are passed to
    `make_trainer`.
    """
    models, rewards = _load(cfg, plan, data, group, pool)
    for note in models.policy.load(str(folder / "actor"), True) if folder else ():
        log.warning("note: %s", note)
    return Validation(
        cfg.actor_rollout_ref.rollout, cfg.data, plan, models.policy, rewards, cfg.trainer.default_local_dir, on_phase
    )


def _load(cfg: Config, plan: Plan, data: Data, group: Any, pool: Any) -> tuple[StepModels, Rewards]:
    """Load the models on the workers. Return them with the rewards."""
    sizes = group.call(Models.init_models, plan.passes)[0]
    log.info("%s, %s parameters", count(group.world, "worker"), f"{int(sizes['num_parameters']):,}")
    model = RewardModel(group, plan.ranks["reward_model"]) if cfg.reward_model.classifies else None
    seed = rollout_seed(cfg.actor_rollout_ref.rollout, cfg.data)
    readings = max_replies(cfg.reward_model.rollout.temperature)
    judge = Judge(group, seed, readings) if cfg.reward_model.judges else None
    critic = Critic(group, plan.passes) if plan.passes.values else None
    reference = Reference(group) if plan.passes.reference_moves else None
    models = StepModels(Policy(group, plan.passes), critic, InferenceModels(group), sizes, reference)
    return models, Rewards(cfg.scoring, cfg.data.max_response_length, data.rows, pool, model, judge)


def sampler_of(cfg: Config, plan: Plan, rows: Rows, *, trial: bool = False) -> Sampler:
    """Return the sampler of the training prompts. Raises ConfigError for a sampler that cannot be used.

    trial: also draw one batch from a plugin as a test; the sampler must then be discarded.
    """
    # One draw returns the prompts of one generation round. With dynamic sampling, their number differs from the prompts
    # of a step.
    settings = plan.prompts_per_round, cfg.data.seed, cfg.data.shuffle
    mixing = cfg.data.mixing
    order = mixed_order(rows, mixing, *settings) if mixing else BatchOrder(len(rows), *settings)
    sampler, name = make_sampler(cfg.data, order, rows), f"data.sampler.name={cfg.data.sampler.name}"
    steps = sampler.batches_per_epoch if isinstance(sampler, EpochSampler) else order.steps_per_epoch
    if steps != order.steps_per_epoch:
        lengths = f"{name}: an epoch of it has {steps} batches, and one of the data {order.steps_per_epoch}."
        if cfg.trainer.total_training_steps is None:
            raise ConfigError(f"{lengths} Set the number of steps with trainer.total_training_steps.")
        for key in (key for key in ("save_freq", "test_freq") if getattr(cfg.trainer, key) == EPOCH):
            raise ConfigError(f"{lengths} Set trainer.{key}={steps}.")
    if trial and is_plugin(cfg.data.sampler.name):
        try:
            sampler.rows(0)
        except RltrainError:
            raise
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it is reported
            raise ConfigError(f"{name} fails to draw a batch:\n{user_traceback(error)}") from None
    return sampler
