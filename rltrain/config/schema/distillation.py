"""Keys under distillation: a teacher whose distribution the policy learns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rltrain.config.schema.fields import key, section
from rltrain.config.schema.model import ACTOR, OffloadConfig, SharesSequences

# Divergences over the whole vocabulary; every other loss_mode is an estimate from the sampled token.
EXACT = ("reverse_kl", "forward_kl", "jsd")
# Estimators whose value is log pi - log q itself. Its gradient in pi does not depend on the teacher.
WITHOUT_TEACHER = ("kl", "k1")
_ESTIMATES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+")
_D = "distillation."
_L = _D + "distillation_loss."
_OF_ESTIMATES = {
    f"distillation.distillation_loss.loss_mode!={'|'.join(EXACT)}": (
        "whole distributions are compared within the update, which runs the teacher"
    )
}


@dataclass
class DistillationLossConfig:
    """Distance of the policy from the teacher."""

    loss_mode: str = key("k3", among=(*EXACT, *_ESTIMATES))
    """Over the whole vocabulary: reverse_kl, forward_kl, jsd. From the sampled token: the names of actor.kl_loss_type
    except full."""
    jsd_beta: float = key(0.5, over=0, only_with="loss_mode=jsd")
    """jsd: weight of the teacher in the mean of both, below 1. Near 0 it resembles forward_kl, near 1 reverse_kl."""
    use_task_rewards: bool = True
    """Learn from rewards too. False: learn only from the teacher; the advantage estimator does not run."""
    distillation_loss_coef: float = key(1.0, least=0, only_with="use_task_rewards")
    """Weight of the distance, which is added to the policy loss."""
    use_policy_gradient: bool = False
    """Use the distance as a cost of the sampled token (its advantage is minus the distance, in PPO's loss with the
    actor's clip); False: use it as a loss that is differentiated."""
    loss_max_clamp: float | None = key(None, over=0)
    """Clamp distances to +- this value, with no gradient beyond it; null: no limit."""
    log_prob_min_clamp: float | None = key(None, most=0, only_with=_OF_ESTIMATES)
    """Clamp log-probs of both models to at least this value; null: no limit."""

    @property
    def is_exact(self) -> bool:
        """True if whole distributions are compared instead of the sampled token."""
        return self.loss_mode in EXACT


@dataclass
class TeacherModelConfig:
    """The weights of the teacher."""

    path: str | None = None
    """Hugging Face folder or hub name of a model with the policy's tokenizer (verl's
    teacher_models.teacher_model.model_path)."""


@dataclass
class TeacherConfig(SharesSequences):
    """The teacher, sharded and computed like the actor. Its budgets follow the actor's unless set."""

    model: TeacherModelConfig = section(TeacherModelConfig)
    """Model."""
    fsdp_config: OffloadConfig = section(OffloadConfig)
    """Sharding; param_offload keeps the teacher in host memory while it is unused."""
    log_prob_micro_batch_size_per_gpu: int | None = key(None, least=1, only_with=_OF_ESTIMATES)
    """Samples per forward on one device; null: as for the actor."""
    log_prob_use_dynamic_bsz: bool | None = key(ACTOR + "use_dynamic_bsz}", only_with=_OF_ESTIMATES)
    """As actor.use_dynamic_bsz."""
    log_prob_max_token_len_per_gpu: int | None = key(None, least=1, only_with=_OF_ESTIMATES)
    """Tokens per forward on one device; null: as for the actor."""
    ulysses_sequence_parallel_size: int = key(ACTOR + "ulysses_sequence_parallel_size}", least=1)
    """Devices that share each sequence. It may differ from the actor's, except if whole distributions are compared."""
    ring_attention_size: int = key(ACTOR + "ring_attention_size}", least=1)
    """As actor.ring_attention_size."""


@dataclass
class DistillationConfig:
    """A teacher that evaluates every token of the policy.

    This is on-policy distillation: the responses are sampled from the policy.
    """

    enabled: bool = False
    """Learn from a teacher."""
    teacher: TeacherConfig = section(TeacherConfig, only_with="enabled")
    """Teacher."""
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig, only_with="enabled")
    """Loss."""

    @property
    def compares_all(self) -> bool:
        """True if the update compares the policy's whole distribution with the teacher's."""
        return self.enabled and self.distillation_loss.is_exact

    @property
    def is_alone(self) -> bool:
        """True if rewards are not a training signal."""
        return self.enabled and not self.distillation_loss.use_task_rewards


def distillation_problems(distillation: DistillationConfig, exact_kl: bool, kl_in_reward: bool) -> Iterator[str]:
    """Yield one line for every broken rule about a teacher.

    exact_kl: the actor's loss compares whole distributions. kl_in_reward: the reward has a KL penalty.
    """
    loss = distillation.distillation_loss
    if not distillation.enabled:
        return
    mode, gradient = f"{_L}loss_mode={loss.loss_mode}", f"{_L}use_policy_gradient"
    if not distillation.teacher.model.path:
        yield f"{_D}enabled=True needs a teacher. Set {_D}teacher.model.path."
    if loss.loss_mode.startswith("forward_kl_topk"):
        yield f"{mode}: all tokens of the vocabulary are compared, chunk by chunk: use {_L}loss_mode=forward_kl."
    if loss.is_exact and loss.use_policy_gradient:
        yield (
            f"{gradient}=True uses the distance as the cost of the sampled token, but {mode} is the same for every "
            f"token. Leave {gradient} out, or use loss_mode=k1."
        )
    if loss.loss_mode in WITHOUT_TEACHER and not loss.use_policy_gradient:
        yield (
            f"{mode}: its gradient is that of log pi, which does not depend on the teacher. Set {gradient}=True, or "
            f"use one of {', '.join(EXACT)}, k2, k3."
        )
    if loss.loss_mode == "jsd" and loss.jsd_beta >= 1:
        yield f"{_L}jsd_beta={loss.jsd_beta}: it must be below 1. Near 1 it behaves like loss_mode=reverse_kl."
    if distillation.compares_all and exact_kl:
        yield (
            f"actor_rollout_ref.actor.kl_loss_type=full and {mode} both compare full distributions, but an update can "
            "compare with one other model only. Use kl_loss_type=k3+."
        )
    if distillation.is_alone and kl_in_reward:
        yield (
            f"algorithm.use_kl_in_reward=True subtracts the KL from the reward, but with {_L}use_task_rewards=False "
            "rewards are not used. Use actor_rollout_ref.actor.use_kl_loss=True."
        )
