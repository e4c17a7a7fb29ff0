"""The passes of one training step, decided once from config and declarations.

The passes of a step follow from several keys (the KL in the loss or in the reward, the estimator, the rollout
correction), and driver and workers must agree on them. So one immutable record, next to the `Plan`, is passed to both
and shown by ``--dry-run``. Counts and budgets are in the plan.
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
_A = "actor_rollout_ref.actor."


@dataclass(frozen=True)
class StepPasses:
    """The passes of a step and their results."""

    roles: frozenset[Role]
    """Roles whose models are loaded.

    An evaluation has no actor: only its engines get the policy's weights.
    """
    estimator: EstimatorTraits
    old_log_probs: OldLogProbs
    """Samples that the old_log_prob pass covers.

    "none": with ``bypass`` the engine's log-probs are the old ones, or nothing reads old log-probs. "all": they are
    needed before the update. Otherwise the pass skips the first mini-batch: no optimizer step precedes it, so the
    update's forward provides its log-probs.
    """
    bypass: bool
    reference: bool
    """True if the reference's weights are loaded, for a separate pass (``ref``) or for the exact KL in the update."""
    kl_in_reward: bool
    exact_kl_in_reward: bool
    sampled_kl_in_loss: bool
    exact_kl_in_loss: bool
    teacher: bool
    """True if a separate pass computes a teacher's log-probs of the sampled tokens."""
    exact_teacher: bool
    """True if the update runs the teacher and compares whole distributions."""
    rewarded: bool
    """True if rewards are a training signal, not only a teacher."""
    importance_weights: bool
    rejects: bool
    """True if the rollout correction masks tokens in the loss (``importance_weights``: weights them). With ``bypass``
    both are computed from the current policy, otherwise from the old log-probs.
    """
    policy_loss: str
    """The policy loss in use."""
    aggregation: str
    """Aggregation of token losses."""
    selects: bool
    """True if the loss treats some tokens of the mini-batch differently."""
    weighs_groups: bool
    """True if the loss weights a response by the others of its group in the mini-batch."""
    reads_engine: bool
    """True if the actor's loss compares the policy with the engine's log-probs, apart from the rollout correction."""
    learns_entropy: bool
    """True if the actor's loss may have an entropy bonus."""
    masks_certain: bool
    """True if only the tokens with the highest entropy in each mini-batch enter the policy loss."""
    skips_silent: bool
    """True if the update skips samples with zero advantage."""
    first_actor_step: int
    """First step that updates the actor. Before it only the critic learns."""
    router_replay: RouterReplay = "disabled"
    """Source of the experts that are replayed in the update. The engine's choices are replayed in the old_log_prob pass
    too.
    """
    balances_experts: bool = False
    """True if the actor's loss has a load-balancing term for experts."""
    reference_moves: bool = False
    """True if the reference is updated from the policy at intervals."""
    images: bool = False
    """True if prompts or responses of the run may have images, so that every forward of the policy calls the vision
    tower."""
    images_in_training: bool = False
    """True if training prompts or responses may have images: then reference and critic call their towers, and towers
    are trained. In an evaluation: as ``images``.
    """
    images_between_turns: bool = False
    """True if tools, environments and agents may return images."""
    supervised: bool = False
    """True if the responses are in the data: there is no engine, and no comparison with its log-probs."""

    @property
    def trains(self) -> bool:
        """True if a model is trained."""
        return "actor" in self.roles

    @property
    def ref(self) -> bool:
        """True if the reference has a separate pass. The exact KL of the loss needs none, because the update runs the
        reference."""
        return self.kl_in_reward or self.sampled_kl_in_loss

    @property
    def ref_log_probs(self) -> bool:
        """True if the ref pass computes log-probs; with ``kl_in_reward`` it also computes the KL per token."""
        return self.sampled_kl_in_loss or (self.kl_in_reward and not self.exact_kl_in_reward)

    @property
    def values(self) -> bool:
        """True if a critic computes values, and is trained."""
        return self.estimator.values

    @property
    def greedy_baseline(self) -> bool:
        """True if every prompt also gets a greedy response."""
        return self.estimator.greedy_baseline

    @property
    def token_advantages(self) -> bool:
        """True if every token of a response has a separate advantage."""
        return self.estimator.per_token or self.estimator.per_turn

    @property
    def looks_ahead(self) -> bool:
        """True if the loss needs information on a whole mini-batch before its first forward."""
        return self.reads_policy_ahead or self.masks_certain

    @property
    def reads_policy_ahead(self) -> bool:
        """True if the information that `looks_ahead` needs depends on the current policy."""
        return self.selects or self.weighs_groups

    @property
    def rejects_early(self) -> bool:
        """True if rejected tokens are known before the update, so that its denominators exclude them."""
        return self.rejects and not self.bypass

    def updates_actor(self, step: int) -> bool:
        """Return whether ``step`` updates the actor."""
        return step >= self.first_actor_step

    def waits_for_update(self, step: int) -> bool:
        """Return whether the first mini-batch of ``step`` gets its old log-probs from the update's forward."""
        return self.old_log_probs == "all but the first mini-batch" and self.updates_actor(step)

    def num_without_old_log_probs(self, step: int, num_mini_batches: int) -> int:
        """Return the number of leading mini-batches of ``step`` without old log-probs at the update."""
        if self.old_log_probs == "none" and not self.bypass:
            return num_mini_batches
        return int(self.waits_for_update(step))

    def needs(self, role: Role) -> tuple[str, ...]:
        """Return the phases of a step that need the model of ``role`` on the device."""
        phases = (*ROLES[role].phases, *passes_of(role)) if role in self.roles else ()
        # Without its adapters, the actor is the reference. An exact KL needs the policy's distribution.
        if role == "actor":
            is_reference = self.trains and self.reference and "ref" not in self.roles
            phases = (
                *(() if self.supervised else ("sync",)),
                *phases,
                *(("ref",) if self.exact_kl_in_reward or is_reference else ()),
            )
        if (role == "ref" and self.exact_kl_in_loss) or (role == "teacher" and self.exact_teacher):
            phases += updates_of("actor")
        return phases

    def describe(self, num_mini_batches: int) -> str:
        """Return the phases of a step as text, by the names of their timers."""
        uses = {"teacher": self.exact_teacher, "exact KL": self.exact_kl_in_loss}
        uses["importance weights"] = self.importance_weights
        uses["rejection"] = self.rejects
        some = self.old_log_probs != "all"
        remarks = {
            "gen": "responses from the data" if self.supervised else "",
            "gen_max": "greedy responses",
            "old_log_prob": f"{num_mini_batches - 1} of {num_mini_batches} mini-batches" if some else "",
            "update_actor": ", ".join(name for name, happens in uses.items() if happens),
        }
        others = {"gen": True, "reward": not self.supervised, "gen_max": self.greedy_baseline, "adv": True}
        return ", ".join(
            f"{name} ({remarks[name]})" if remarks.get(name) else name
            for name in step_phases()
            if (others[name] if name in others else self.makes(name, num_mini_batches))
        )

    def makes(self, name: str, num_mini_batches: int) -> bool:
        """Return whether a step runs the pass ``name``."""
        if name == "old_log_prob":
            return self.old_log_probs == "all" or (self.old_log_probs != "none" and num_mini_batches > 1)
        # The reference may be the actor without its adapters.
        own = {"ref": self.ref, "teacher": self.teacher}
        return own[name] if name in own else PASSES[name].role in self.roles


def _aggregation(config: Config, loss: LossTraits) -> str:
    """Return the aggregation of token losses. Versions of verl differ for gspo: before 0.9 the key is not read."""
    mode, version = config.actor_rollout_ref.actor.loss_agg_mode, config.trainer.verl_version
    if not version or loss is not loss_traits("gspo"):
        return mode or loss.aggregation
    return (mode or TOKEN_MEAN) if version == "0.9" else loss.aggregation


def make_step_passes(config: Config, images: bool = False, images_in_training: bool | None = None) -> StepPasses:
    """Decide the passes of ``config``.

    images: whether prompts have images, which is known only from their files. images_in_training: whether training
    prompts have images (None: as ``images``).
    """
    actor, algorithm, correction = config.actor_rollout_ref.actor, config.algorithm, config.algorithm.rollout_correction
    distillation, rewarded = config.distillation, config.learns_from_rewards
    estimator, policy_loss = _estimator(config), _policy_loss(config)
    loss = loss_traits(policy_loss)
    if images_in_training is None or config.trainer.val_only:
        # A checkpoint may contain a trained tower.
        images_in_training = images
    shown = config.actor_rollout_ref.rollout.multi_turn.images
    between_turns = several_turns(config.actor_rollout_ref.rollout) and (images_in_training if shown is None else shown)
    return StepPasses(
        roles=roles_of(config),
        estimator=estimator,
        old_log_probs=_old_log_probs(config),
        bypass=correction.bypass_mode,
        reference=has_reference(config),
        kl_in_reward=algorithm.use_kl_in_reward,
        exact_kl_in_reward=algorithm.use_kl_in_reward and algorithm.kl_penalty == "full",
        sampled_kl_in_loss=actor.use_kl_loss and actor.kl_loss_type != "full",
        exact_kl_in_loss=actor.use_kl_loss and actor.kl_loss_type == "full",
        teacher=distillation.enabled and not distillation.compares_all,
        exact_teacher=distillation.compares_all,
        rewarded=rewarded,
        # With bypass_mode and ppo_clip, the ratio of the loss is relative to the engine; additional weights would count
        # the difference twice.
        importance_weights=bool(correction.rollout_is) and (_reinforces(config) or not correction.bypass_mode),
        rejects=bool(correction.rollout_rs),
        policy_loss=policy_loss,
        aggregation=_aggregation(config, loss),
        selects=loss.selects,
        weighs_groups=loss.weighs_groups,
        reads_engine=actor.off_policy_mask_threshold is not None,
        learns_entropy=_learns_entropy(config),
        masks_certain=rewarded and actor.top_entropy_quantile < 1,
        skips_silent=_skips_zero_advantage(config),
        # Without a critic, warm-up steps would train nothing.
        first_actor_step=math.ceil(config.trainer.critic_warmup) if estimator.values else 0,
        router_replay=actor.router_replay.mode,
        balances_experts=bool(actor.router_aux_loss_coef),
        reference_moves="ref" in roles_of(config) and bool(config.actor_rollout_ref.ref.update_every_steps),
        images=images or between_turns,
        images_in_training=images_in_training or between_turns,
        images_between_turns=between_turns,
        supervised=config.sft.enabled,
    )


def _reinforces(config: Config) -> bool:
    """Return whether the policy loss is REINFORCE, in place of the key `policy_loss.loss_mode`."""
    correction = config.algorithm.rollout_correction
    return config.learns_from_rewards and correction.bypass_mode and correction.loss_type == "reinforce"


def _policy_loss(config: Config) -> str:
    if config.distillation.is_alone:
        return TEACHER_LOSS
    # Supervised fine-tuning uses REINFORCE too, because with an advantage of 1 it is the negative log-likelihood.
    return (
        REINFORCE_LOSS
        if _reinforces(config) or config.sft.enabled
        else config.actor_rollout_ref.actor.policy_loss.loss_mode
    )


def _estimator(config: Config) -> EstimatorTraits:
    if not config.learns_from_rewards:
        return EstimatorTraits(reads=())
    return estimator_traits(config.algorithm.adv_estimator)


def _learns_entropy(config: Config) -> bool:
    return config.actor_rollout_ref.actor.entropy_coeff != 0 or config.actor_rollout_ref.actor.adaptive_entropy.enabled


def _skips_zero_advantage(config: Config) -> bool:
    """Return whether samples with zero advantage have no gradient, so that the update may skip them."""
    actor = config.actor_rollout_ref.actor
    # KL, entropy bonus, teacher and load balancing have a gradient in every sample; whitening makes a 0 nonzero; and
    # high-entropy tokens and expert loads are determined over all samples.
    needs_all = (
        actor.use_kl_loss,
        _learns_entropy(config),
        config.distillation.enabled,
        actor.router_aux_loss_coef,
        actor.router_bias_update_rate,
        _estimator(config).whitens,
        actor.top_entropy_quantile < 1,
    )
    return loss_traits(_policy_loss(config)).silent_at_zero and not any(needs_all)


def roles_of(config: Config) -> frozenset[Role]:
    """Return `StepPasses.roles`."""
    loaded = {role: row for role, row in ROLES.items() if row.in_evaluation or not config.trainer.val_only}
    return frozenset(role for role, row in loaded.items() if row.is_needed(config))


def rests_on_host(config: Config, role: Role) -> bool:
    """Return whether the model of ``role`` is offloaded in the phases that do not need it."""
    # The engines of an evaluation get the policy's weights once, and nothing else needs them.
    return role not in roles_of(config) or bool(get(config, f"{ROLES[role].fsdp}.param_offload"))


def offloads(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield offloading keys, and the phases in which the offloaded state is on the device anyway (optimizer: none).

    The key that costs the least time is first.
    """
    passes = make_step_passes(config)
    for role, row in ROLES.items():
        if role in passes.roles and updates_of(role):
            yield f"{row.fsdp}.optimizer_offload", ()
        if role in passes.roles and role != "actor":
            yield f"{row.fsdp}.param_offload", passes.needs(role)
    if passes.trains:
        yield f"{ROLES['actor'].fsdp}.param_offload", passes.needs("actor")


def _old_log_probs(config: Config) -> OldLogProbs:
    """Return the samples that the old_log_prob pass covers, by the first matching row."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    rows: tuple[tuple[bool, OldLogProbs], ...] = (
        # The engine's log-probs are the old ones, even if a setting needs old log-probs early.
        (correction.bypass_mode or config.sft.enabled, "none"),
        (actor.recompute_old_log_prob == "always" or bool(needs_all_old_log_probs(config)), "all"),
        (_reads_old_log_probs(config), "all but the first mini-batch"),
        (True, "none"),
    )
    return next(covered for holds, covered in rows if holds)


def needs_all_old_log_probs(config: Config) -> list[str]:
    """Return the keys that need the old log-probs of all samples before the update."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    loss = loss_traits(_policy_loss(config))
    reasons = {
        "algorithm.use_kl_in_reward": config.algorithm.use_kl_in_reward,
        "algorithm.adv_estimator": _estimator(config).sum_pi_squared,
        # The denominators of the loss exclude rejected tokens.
        "algorithm.rollout_correction.rollout_rs": bool(correction.rollout_rs),
        # The mean weight of the batch scales every optimizer step.
        "algorithm.rollout_correction.rollout_is_batch_normalize": bool(correction.rollout_is)
        and correction.rollout_is_batch_normalize,
        # A token selection over the mini-batch.
        f"{_A}policy_loss.loss_mode": loss.selects or loss.weighs_groups,
        f"{_A}top_entropy_quantile": config.learns_from_rewards and actor.top_entropy_quantile < 1,
        f"{_A}adaptive_entropy.target_entropy": actor.adaptive_entropy.enabled,
        # Load balancing with replayed experts.
        f"{_A}router_aux_loss_coef": bool(actor.router_aux_loss_coef) and actor.router_replay.mode == "R2",
        # In the second epoch a sample may be on another rank than the one that has its old log-probs.
        f"{_A}ppo_epochs": actor.ppo_epochs > 1,
        # The alarm stops the run before the update.
        "actor_rollout_ref.rollout.on_log_prob_gap": config.actor_rollout_ref.rollout.on_log_prob_gap == "stop",
    }
    return [key for key, holds in reasons.items() if holds]


def _reads_old_log_probs(config: Config) -> bool:
    """Return whether the update reads results of the old_log_prob pass.

    These are the log-probs, which a teacher alone does not need unless it is used as a cost, or the router indices.
    """
    actor, loss = config.actor_rollout_ref.actor, config.distillation.distillation_loss
    return (
        not config.distillation.is_alone
        or loss.use_policy_gradient
        or actor.router_replay.mode == "R2"
        or (actor.use_kl_loss and actor.use_bias_correction_kl)
    )
