"""The passes of a step that run on devices, and the roles whose models compute them: one row each, which everything
that speaks of them reads.

Problem: timers, budgets, residency, the memory forecast, metrics and messages each need to know the same passes, and
under names of their own a new pass would have to be added to all of them. Choice: the name of a pass is that of its
timer, everywhere. Left out: which of them a run makes, which is `StepPasses`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rltrain.config.schema import Config

_A, _T = "actor_rollout_ref.", "distillation.teacher"
Role = Literal["actor", "ref", "teacher", "critic", "reward_model", "judge"]
# The phase in which the judge's engine has its weights and writes.
JUDGE_PHASE = "judge"


@dataclass(frozen=True)
class ModelRole:
    """A model of a run."""

    section: str
    """Of the config. Where the model learns, its ``optim`` is there."""
    fsdp: str
    """The section that says where it rests."""
    is_needed: Callable[[Config], bool]
    """Whether a training has it."""
    in_evaluation: bool = False
    """So has an evaluation."""
    reads_texts: bool = False
    """It has a tokenizer of its own; others read the tokens of the policy."""
    phases: tuple[str, ...] = ()
    """That need it beside its passes over samples."""


def has_reference(config: Config) -> bool:
    """Whether something is compared with a reference."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def has_critic(config: Config) -> bool:
    """Whether advantages are learnt from that need a value function."""
    return config.algorithm.needs_critic and not config.distillation.is_alone


ROLES: dict[Role, ModelRole] = {
    "actor": ModelRole(_A + "actor", _A + "actor.fsdp_config", lambda config: True),
    # Adapters that are off are a reference too.
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
    """The keys that say how much one forward of a pass may hold."""

    switch: str
    tokens: str
    samples: str
    sharing: str | None
    """The section that says how many ranks share a sequence."""
    like: str | None
    """The pass whose sizes are the default."""


def _keys(section: str, forward: str, sharing: str | None, like: str | None = None) -> BudgetKeys:
    """forward: what the keys begin with; those of log-prob passes have it in the switch too."""
    switch = "log_prob_use_dynamic_bsz" if forward == "log_prob_" else "use_dynamic_bsz"
    tokens = f"{forward or 'forward_'}max_token_len_per_gpu"
    samples = f"{section}.{forward}micro_batch_size_per_gpu"
    return BudgetKeys(f"{section}.{switch}", f"{section}.{tokens}", samples, sharing, like)


@dataclass(frozen=True)
class Pass:
    """A pass over the samples of a step."""

    role: Role
    """Whose model computes it."""
    keys: BudgetKeys
    rate: str | None = None
    """The name of its FLOP/s in ``perf/tflops`` and ``perf/mfu``; None: they are not counted."""
    updates: bool = False
    """It learns: gradients, and steps of the role's optimizer."""


# In the order of a step.
PASSES = {
    "reward": Pass("reward_model", _keys("reward_model", "", None, "update_actor")),
    "old_log_prob": Pass("actor", _keys(_A + "rollout", "log_prob_", _A + "actor", "update_actor"), "actor_infer"),
    "ref": Pass("ref", _keys(_A + "ref", "log_prob_", _A + "ref", "update_actor"), "ref"),
    "teacher": Pass("teacher", _keys(_T, "log_prob_", _T, "update_actor"), "teacher"),
    "values": Pass("critic", _keys("critic", "forward_", "critic", "update_critic"), "critic_infer"),
    "update_critic": Pass("critic", _keys("critic", "ppo_", "critic", "update_actor"), "critic", updates=True),
    "update_actor": Pass("actor", _keys(_A + "actor", "ppo_", _A + "actor"), "actor", updates=True),
}
UPDATES = tuple(name for name, step_pass in PASSES.items() if step_pass.updates)


def device_phases() -> tuple[str, ...]:
    """What the device of a worker does: weights to the engine, answers, a judge's replies, and passes."""
    return ("sync", "gen", JUDGE_PHASE, *PASSES)


def step_phases() -> tuple[str, ...]:
    """What a step does, in order: generation and estimators too, whose seconds are the driver's."""
    measures = [name for name, step_pass in PASSES.items() if not step_pass.updates and name != "reward"]
    return ("gen", "reward", "gen_max", *measures, "adv", *UPDATES)


def passes_of(role: Role) -> tuple[str, ...]:
    """The passes that the model of ``role`` computes."""
    return tuple(name for name, step_pass in PASSES.items() if step_pass.role == role)


def updates_of(role: Role) -> tuple[str, ...]:
    """The passes in which it learns."""
    return tuple(name for name in passes_of(role) if PASSES[name].updates)
