"""Rules of distillation: the available losses, and settings that exclude a teacher."""

from __future__ import annotations

from collections.abc import Iterator

from rltrain.config.schema import Config
from rltrain.config.schema.distillation import EXACT, WITHOUT_TEACHER

_D = "distillation."
_L = _D + "distillation_loss."


def distillation_problems(config: Config) -> Iterator[str]:
    """Yield one line for every rule about a teacher that the config breaks."""
    distillation, loss, actor = config.distillation, config.distillation.distillation_loss, config.actor_rollout_ref
    if not distillation.enabled:
        return
    mode, gradient = f"{_L}loss_mode={loss.loss_mode}", f"{_L}use_policy_gradient"
    if not distillation.teacher.model.path:
        yield f"{_D}enabled=True needs a teacher: name it with {_D}teacher.model.path."
    if loss.loss_mode.startswith("forward_kl_topk"):
        yield f"{mode}: all tokens of the vocabulary are compared, chunk by chunk: use {_L}loss_mode=forward_kl."
    if loss.is_exact and loss.use_policy_gradient:
        yield (
            f"{gradient}=True takes the distance as a cost of the token that was drawn, and {mode} is the same for "
            f"every token. Leave {gradient} out, or use loss_mode=k1."
        )
    if loss.loss_mode in WITHOUT_TEACHER and not loss.use_policy_gradient:
        yield (
            f"{mode}: differentiated, it is log pi, which moves the policy whatever the teacher says. Set "
            f"{gradient}=True, or use one of {', '.join(EXACT)}, k2, k3."
        )
    if loss.loss_mode == "jsd" and loss.jsd_beta >= 1:
        yield f"{_L}jsd_beta={loss.jsd_beta}: it must be below 1. Near 1 it goes like loss_mode=reverse_kl."
    if distillation.compares_all and actor.actor.use_kl_loss and actor.actor.kl_loss_type == "full":
        yield (
            f"actor_rollout_ref.actor.kl_loss_type=full and {mode} both compare whole distributions, and an update "
            "has room for those of one other model. Use kl_loss_type=k3+."
        )
    if distillation.is_alone and config.algorithm.use_kl_in_reward:
        yield (
            f"algorithm.use_kl_in_reward=True takes the KL off a reward, and with {_L}use_task_rewards=False nothing "
            "is learnt from rewards. Use actor_rollout_ref.actor.use_kl_loss=True."
        )
