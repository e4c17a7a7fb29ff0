"""What one training step computes: decided once from config and declarations, then only read.

Problem: whether a step makes a pass over its samples follows from several keys together (the KL in the loss or in the
reward, the estimator, the rollout correction), and driver and workers must agree on it. Choice: one frozen record
beside the `Plan`, shown by ``--dry-run`` and handed to both sides. Left out: counts and budgets, which are the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rltrain.config.agents import several_turns
from rltrain.config.passes import PASSES, ROLES, Role, has_reference, passes_of, step_phases, updates_of
from rltrain.config.schema import Config
from rltrain.config.schema.declarations import (
    REINFORCE_LOSS,
    TEACHER_LOSS,
    TOKEN_MEAN,
    EstimatorTraits,
    LossTraits,
    estimator_traits,
    loss_traits,
)
from rltrain.config.schema.keys import get
from rltrain.config.schema.model import RouterReplay

OldLogProbs = Literal["all", "all but the first mini-batch", "none"]


@dataclass(frozen=True)
class StepPasses:
    """The passes of a step and what they yield."""

    roles: frozenset[Role]
    """Whose models are loaded. Without the actor nothing learns: an evaluation has the policy's weights for the engines
    alone."""
    estimator: EstimatorTraits
    old_log_probs: OldLogProbs
    """The samples that the old_log_prob pass covers. Unless something needs them earlier, it leaves out the first
    mini-batch: the update's own forward supplies its log-probs, because no optimizer step comes before it. With
    ``bypass`` the engine's log-probs are the old ones and there is no pass; nor is there one where nothing reads old
    log-probs, and the update's forward measures what the pass would have."""
    bypass: bool
    reference: bool
    """The reference's weights are loaded, for its own pass (``ref``) or for the exact KL within the update."""
    ref: bool
    ref_log_probs: bool
    """The ref pass yields log-probs; with ``kl_in_reward`` it also yields the KL per token."""
    kl_in_reward: bool
    exact_kl_in_reward: bool
    sampled_kl_in_loss: bool
    exact_kl_in_loss: bool
    teacher: bool
    """A teacher's log-probs of the drawn tokens come from a pass of its own."""
    exact_teacher: bool
    """The update runs the teacher, and compares whole distributions."""
    rewarded: bool
    """Something is learnt from rewards, and not from a teacher alone."""
    importance_weights: bool
    rejects: bool
    """Both: the rollout correction weighs or rejects tokens of the loss; with ``bypass`` both follow from the policy as
    it is updated, otherwise from the old log-probs."""
    policy_loss: str
    """The loss that runs."""
    aggregation: str
    """How its token losses become one."""
    selects: bool
    """It treats some tokens of the mini-batch differently."""
    weighs_groups: bool
    """It weighs an answer by the others to its prompt in the mini-batch."""
    reads_engine: bool
    """The actor's loss compares the policy with the engine's log-probs, beside what the rollout correction does."""
    learns_entropy: bool
    """The actor's loss may have an entropy bonus."""
    masks_certain: bool
    """Of each mini-batch only the tokens with the highest entropy enter the policy loss."""
    skips_silent: bool
    """Samples without advantage are left out of the update."""
    first_actor_step: int
    """Until then only the critic learns."""
    router_replay: RouterReplay = "disabled"
    """Whose choice of experts is replayed in the update, and where it is the engine's in the old_log_prob pass."""
    balances_experts: bool = False
    """The actor's loss has a part on the balance of experts."""
    reference_moves: bool = False
    """It takes over the policy every now and then."""
    images: bool = False
    """Some prompt of the run has some, or an answer may, so every forward of the policy calls the vision tower."""
    images_in_training: bool = False
    """A training prompt has some, or an answer may, so reference and critic call theirs, and towers learn. Evaluation:
    as ``images``."""
    images_between_turns: bool = False
    """Tools, environments and agents may show some."""

    @property
    def trains(self) -> bool:
        """Whether anything learns."""
        return "actor" in self.roles

    @property
    def values(self) -> bool:
        """Whether a critic values every token, and learns."""
        return self.estimator.values

    @property
    def greedy_baseline(self) -> bool:
        """Whether every prompt is also answered greedily."""
        return self.estimator.greedy_baseline

    @property
    def token_advantages(self) -> bool:
        """Whether every token of an answer has an advantage of its own."""
        return self.estimator.per_token or self.estimator.per_turn

    @property
    def looks_ahead(self) -> bool:
        """Whether the loss needs to know something of a whole mini-batch before its first forward."""
        return self.reads_policy_ahead or self.masks_certain

    @property
    def reads_policy_ahead(self) -> bool:
        """Whether that follows from the policy as it is then."""
        return self.selects or self.weighs_groups

    @property
    def rejects_early(self) -> bool:
        """Whether rejected tokens are known before the update, so that its denominators leave them out."""
        return self.rejects and not self.bypass

    def updates_actor(self, step: int) -> bool:
        """Whether the actor learns in ``step``."""
        return step >= self.first_actor_step

    def waits_for_update(self, step: int) -> bool:
        """Whether the first mini-batch of ``step`` gets its old log-probs from the update's own forward."""
        return self.old_log_probs == "all but the first mini-batch" and self.updates_actor(step)

    def num_without_old_log_probs(self, step: int, num_mini_batches: int) -> int:
        """How many mini-batches of ``step``, from the first, come to the update without old log-probs."""
        if self.old_log_probs == "none" and not self.bypass:
            return num_mini_batches
        return int(self.waits_for_update(step))

    def needs(self, role: Role) -> tuple[str, ...]:
        """The phases of a step that need the model of ``role`` on the device."""
        phases = (*ROLES[role].phases, *passes_of(role)) if role in self.roles else ()
        # Without its adapters it is the reference; an exact KL needs the policy's own distribution.
        if role == "actor":
            is_reference = self.trains and self.reference and "ref" not in self.roles
            phases = ("sync", *phases, *(("ref",) if self.exact_kl_in_reward or is_reference else ()))
        if (role == "ref" and self.exact_kl_in_loss) or (role == "teacher" and self.exact_teacher):
            phases += updates_of("actor")
        return phases

    def describe(self, num_mini_batches: int) -> str:
        """The phases of a step by the names of their timers."""
        uses = {"teacher": self.exact_teacher, "exact KL": self.exact_kl_in_loss}
        uses["importance weights"] = self.importance_weights
        uses["rejection"] = self.rejects
        some = self.old_log_probs != "all"
        remarks = {
            "gen_max": "greedy answers",
            "old_log_prob": f"{num_mini_batches - 1} of {num_mini_batches} mini-batches" if some else "",
            "update_actor": ", ".join(name for name, happens in uses.items() if happens),
        }
        others = {"gen": True, "reward": True, "gen_max": self.greedy_baseline, "adv": True}
        return ", ".join(
            f"{name} ({remarks[name]})" if remarks.get(name) else name
            for name in step_phases()
            if (others[name] if name in others else self.makes(name, num_mini_batches))
        )

    def makes(self, name: str, num_mini_batches: int) -> bool:
        """Whether a step makes the pass ``name``."""
        if name == "old_log_prob":
            return self.old_log_probs == "all" or (self.old_log_probs != "none" and num_mini_batches > 1)
        # The reference may be the actor without its adapters.
        own = {"ref": self.ref, "teacher": self.teacher}
        return own[name] if name in own else PASSES[name].role in self.roles


def _aggregation(config: Config, loss: LossTraits) -> str:
    """Return how token losses become one. Versions of verl differ for gspo: before 0.9 the key is not read."""
    mode, version = config.actor_rollout_ref.actor.loss_agg_mode, config.trainer.verl_version
    if not version or loss is not loss_traits("gspo"):
        return mode or loss.aggregation
    return (mode or TOKEN_MEAN) if version == "0.9" else loss.aggregation


def make_step_passes(config: Config, images: bool = False, images_in_training: bool | None = None) -> StepPasses:
    """Decide the passes of ``config``. images: whether prompts have any, which their files say alone.

    images_in_training: whether training prompts have any (None: as ``images``).
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction, distillation = algorithm.rollout_correction, config.distillation
    rewarded = not distillation.is_alone
    estimator = estimator_traits(algorithm.adv_estimator) if rewarded else EstimatorTraits(reads=())
    reinforce = rewarded and correction.bypass_mode and correction.loss_type == "reinforce"
    policy_loss = REINFORCE_LOSS if reinforce else actor.policy_loss.loss_mode if rewarded else TEACHER_LOSS
    loss = loss_traits(policy_loss)
    if images_in_training is None or config.trainer.val_only:
        # A checkpoint may have a tower that was trained.
        images_in_training = images
    shown = config.actor_rollout_ref.rollout.multi_turn.images
    between_turns = several_turns(config.actor_rollout_ref.rollout) and (images_in_training if shown is None else shown)
    learns_entropy = actor.entropy_coeff != 0 or actor.adaptive_entropy.enabled
    masks_certain = rewarded and actor.top_entropy_quantile < 1
    exact_kl_in_loss = actor.use_kl_loss and actor.kl_loss_type == "full"
    exact_kl_in_reward = algorithm.use_kl_in_reward and algorithm.kl_penalty == "full"
    sampled_kl_in_loss = actor.use_kl_loss and not exact_kl_in_loss
    old_log_probs: OldLogProbs = "all"
    if correction.bypass_mode:
        old_log_probs = "none"
    # bypass_mode comes first: it needs no pass, whatever else asks for one early.
    elif actor.recompute_old_log_prob == "auto" and not needs_all_old_log_probs(config):
        old_log_probs = "all but the first mini-batch" if reads_old_log_probs(config) else "none"
    return StepPasses(
        roles=roles_of(config),
        estimator=estimator,
        old_log_probs=old_log_probs,
        bypass=correction.bypass_mode,
        reference=has_reference(config),
        # The exact KL of the loss needs no pass of its own: the update runs the reference.
        ref=algorithm.use_kl_in_reward or sampled_kl_in_loss,
        ref_log_probs=sampled_kl_in_loss or (algorithm.use_kl_in_reward and not exact_kl_in_reward),
        kl_in_reward=algorithm.use_kl_in_reward,
        exact_kl_in_reward=exact_kl_in_reward,
        sampled_kl_in_loss=sampled_kl_in_loss,
        exact_kl_in_loss=exact_kl_in_loss,
        teacher=distillation.enabled and not distillation.compares_all,
        exact_teacher=distillation.compares_all,
        rewarded=rewarded,
        # With bypass_mode and ppo_clip the loss's own ratio is taken against the engine; weights on top would count the
        # difference twice.
        importance_weights=bool(correction.rollout_is) and (reinforce or not correction.bypass_mode),
        rejects=bool(correction.rollout_rs),
        policy_loss=policy_loss,
        aggregation=_aggregation(config, loss),
        selects=loss.selects,
        weighs_groups=loss.weighs_groups,
        reads_engine=actor.off_policy_mask_threshold is not None,
        learns_entropy=learns_entropy,
        masks_certain=masks_certain,
        # KL, entropy bonus, teacher and balance of experts have a gradient in every sample; whitening makes a 0
        # something else; and the tokens of all samples say which entropy is high, and which experts are busy.
        skips_silent=loss.silent_at_zero
        and not (actor.use_kl_loss or learns_entropy or estimator.whitens or distillation.enabled or masks_certain)
        and not (actor.router_aux_loss_coef or actor.router_bias_update_rate),
        # Without a critic nothing would learn in the steps of a warm-up.
        first_actor_step=math.ceil(config.trainer.critic_warmup) if estimator.values else 0,
        router_replay=actor.router_replay.mode,
        balances_experts=bool(actor.router_aux_loss_coef),
        reference_moves="ref" in roles_of(config) and bool(config.actor_rollout_ref.ref.update_every_steps),
        images=images or between_turns,
        images_in_training=images_in_training or between_turns,
        images_between_turns=between_turns,
    )


def roles_of(config: Config) -> frozenset[Role]:
    """See `StepPasses.roles`."""
    loaded = {role: row for role, row in ROLES.items() if row.in_evaluation or not config.trainer.val_only}
    return frozenset(role for role, row in loaded.items() if row.is_needed(config))


def rests_on_host(config: Config, role: Role) -> bool:
    """Whether the model of ``role`` leaves the device in the phases that do not need it."""
    # The engines of an evaluation get the policy's weights once, and nothing else needs them.
    return role not in roles_of(config) or bool(get(config, f"{ROLES[role].fsdp}.param_offload"))


def offloads(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Keys that send something to the host, and the phases in which it is on the device all the same.

    What costs least time comes first.
    """
    passes = make_step_passes(config)
    for role, row in ROLES.items():
        if role in passes.roles and updates_of(role):
            yield f"{row.fsdp}.optimizer_offload", updates_of(role)
        if role in passes.roles and role != "actor":
            yield f"{row.fsdp}.param_offload", passes.needs(role)
    if passes.trains:
        yield f"{ROLES['actor'].fsdp}.param_offload", passes.needs("actor")


def needs_all_old_log_probs(config: Config) -> bool:
    """Whether something needs the old log-probs of every sample before the update begins.

    That is the KL in the reward, an estimator that reads the old policy, the denominators under rejection, the mean
    importance weight, a selection over the mini-batch, a bonus that follows the entropy, a balance of experts that are
    replayed, a second epoch over the batch
    (in which a sample may be on another rank), or an alarm that is to stop the run before it learns.
    """
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    rewarded, loss = not config.distillation.is_alone, loss_traits(actor.policy_loss.loss_mode)
    return (
        config.algorithm.use_kl_in_reward
        or (rewarded and estimator_traits(config.algorithm.adv_estimator).sum_pi_squared)
        or bool(correction.rollout_rs)
        or (bool(correction.rollout_is) and correction.rollout_is_batch_normalize)
        or (rewarded and (loss.selects or loss.weighs_groups or actor.top_entropy_quantile < 1))
        or actor.adaptive_entropy.enabled
        or (bool(actor.router_aux_loss_coef) and actor.router_replay.mode == "R2")
        or actor.ppo_epochs > 1
        or config.actor_rollout_ref.rollout.on_log_prob_gap == "stop"
    )


def reads_old_log_probs(config: Config) -> bool:
    """Whether the update reads what the old_log_prob pass makes: the log-probs, which the distance from a teacher alone
    does not read unless it is a cost, or the choice of experts."""
    actor, loss = config.actor_rollout_ref.actor, config.distillation.distillation_loss
    return (
        not config.distillation.is_alone
        or loss.use_policy_gradient
        or actor.router_replay.mode == "R2"
        or (actor.use_kl_loss and actor.use_bias_correction_kl)
    )
