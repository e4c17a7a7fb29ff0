"""Passes of a step that run on devices, and the roles whose models compute them, one table row each.

Timers, budgets, offloading, the memory forecast, metrics and messages all use this table, so a new pass is added once.
The name of a pass is the name of its timer. `StepPasses` decides which passes a run needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rltrain.config.schema import Config

_A, _T = "actor_rollout_ref.", "distillation.teacher"
Role = Literal["actor", "ref", "teacher", "critic", "reward_model", "judge"]
# Phase in which the judge's engine has its weights and generates.
JUDGE_PHASE = "judge"


@dataclass(frozen=True)
class ModelRole:
    """A model of a run."""

    section: str
    """Section of the config. For a trained model it contains ``optim``."""
    fsdp: str
    """Section with the model's sharding and offloading."""
    is_needed: Callable[[Config], bool]
    """Function that returns whether training uses the model."""
    in_evaluation: bool = False
    """True if an evaluation uses it too."""
    reads_texts: bool = False
    """True if it has a separate tokenizer; other models read the policy's tokens."""
    phases: tuple[str, ...] = ()
    """Phases that need the model, in addition to its passes over samples."""


def has_reference(config: Config) -> bool:
    """Return whether a run uses a reference policy."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def has_critic(config: Config) -> bool:
    """Return whether the advantages need a value function."""
    return config.algorithm.needs_critic and config.learns_from_rewards


ROLES: dict[Role, ModelRole] = {
    "actor": ModelRole(_A + "actor", _A + "actor.fsdp_config", lambda config: True),
    # With LoRA, the policy without its adapters is the reference.
    "ref": ModelRole(_A + "ref", _A + "ref.fsdp_config", lambda config:
                     has_reference(config) and not config.actor_rollout_ref.model.uses_lora),
    "teacher": ModelRole(_T, _T + ".fsdp_config", lambda config: config.distillation.enabled),
    "critic": ModelRole("critic", "critic.model.fsdp_config", has_critic),
    "reward_model": ModelRole("reward_model", "reward_model.model.fsdp_config", lambda config:
                              config.reward_model.classifies, in_evaluation=True, reads_texts=True),
    "judge": ModelRole("reward_model", "reward_model.model.fsdp_config", lambda config: config.reward_model.judges,
                       in_evaluation=True, reads_texts=True, phases=(JUDGE_PHASE,)),
}  # fmt: skip


@dataclass(frozen=True)
class BudgetKeys:
    """Keys that set the budget of one forward of a pass."""

    switch: str
    tokens: str
    samples: str
    sharing: str | None
    """Config section with the number of ranks that share a sequence."""
    like: str | None
    """Pass whose sizes are the default."""


def _keys(section: str, forward: str, sharing: str | None, like: str | None = None) -> BudgetKeys:
    """Return the keys of a pass. forward: prefix of the keys (in log-prob passes also of the switch)."""
    switch = "log_prob_use_dynamic_bsz" if forward == "log_prob_" else "use_dynamic_bsz"
    tokens = f"{forward or 'forward_'}max_token_len_per_gpu"
    samples = f"{section}.{forward}micro_batch_size_per_gpu"
    return BudgetKeys(f"{section}.{switch}", f"{section}.{tokens}", samples, sharing, like)


@dataclass(frozen=True)
class Pass:
    """A pass over the samples of a step."""

    role: Role
    """Role of the model that computes the pass."""
    keys: BudgetKeys
    rate: str | None = None
    """Name of its FLOP/s in ``perf/tflops`` and ``perf/mfu``; None: not measured."""
    updates: bool = False
    """True if it is an update with gradients and optimizer steps."""


# Passes in the order of a step.
PASSES = {
    "reward": Pass("reward_model", _keys("reward_model", "", None, "update_actor")),
    "old_log_prob": Pass("actor", _keys(_A + "rollout", "log_prob_", _A + "actor", "update_actor"), "actor_infer"),
    "ref": Pass("ref", _keys(_A + "ref", "log_prob_", _A + "ref", "update_actor"), "ref"),
    "teacher": Pass("teacher", _keys(_T, "log_prob_", _T, "update_actor"), "teacher"),
    "values": Pass("critic", _keys("critic", "forward_", "critic", "update_critic"), "critic_infer"),
    "update_critic": Pass("critic", _keys("critic", "ppo_", "critic", "update_actor"), "critic", updates=True),
    "update_actor": Pass("actor", _keys(_A + "actor", "ppo_", _A + "actor"), "actor", updates=True),
}
# Names of the calls to workers (`runtime.calls.Call.name`) -> the passes that they compute.
PASS_OF_CALL = {
    "RewardModel.score": "reward", "Actor.log_probs": "old_log_prob", "Actor.ref_log_probs": "ref",
    "InferenceModels.log_probs": "teacher", "Critic.values": "values", "Critic.update": "update_critic",
    "Actor.update": "update_actor",
}  # fmt: skip
UPDATES = tuple(name for name, step_pass in PASSES.items() if step_pass.updates)


def device_phases() -> tuple[str, ...]:
    """Return the phases on a worker's device: weight sync, generation, judging, and passes."""
    return ("sync", "gen", JUDGE_PHASE, *PASSES)


def step_phases() -> tuple[str, ...]:
    """Return all phases of a step in order, including those timed on the driver."""
    measures = [name for name, step_pass in PASSES.items() if not step_pass.updates and name != "reward"]
    return ("gen", "reward", "gen_max", *measures, "adv", *UPDATES)


def passes_of(role: Role) -> tuple[str, ...]:
    """Return the passes that the model of ``role`` computes."""
    return tuple(name for name, step_pass in PASSES.items() if step_pass.role == role)


def updates_of(role: Role) -> tuple[str, ...]:
    """Return the passes that update the model of ``role``."""
    return tuple(name for name in passes_of(role) if PASSES[name].updates)
