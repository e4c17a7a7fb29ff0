"""Shared parts of tests of complete steps: variants of the algorithm, an engine with different log-probs, the movement
of weights."""

import numpy as np
import torch

from rltrain.algorithms import policy_losses
from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch
from tests.tiny import save_tiny_moe

ESTIMATOR, LOSS = "algorithm__adv_estimator", "actor_rollout_ref__actor__policy_loss__loss_mode"


ACTOR, CORRECTION = "actor_rollout_ref__actor__", "algorithm__rollout_correction__"


NO_KL = {ACTOR + "use_kl_loss": False, ACTOR + "entropy_coeff": 0}


COV = {
    ACTOR + "policy_loss__clip_cov_lb": -100, ACTOR + "policy_loss__clip_cov_ub": 100,
    ACTOR + "policy_loss__clip_cov_ratio": 0.1,
    ACTOR + "policy_loss__kl_cov_ratio": 0.1, ACTOR + "ppo_epochs": 2,
}  # fmt: skip


# As in `small_run`.
GAE = {ESTIMATOR: "gae", "critic__optim__lr": 5e-3, "critic__optim__eps": 1e-2}


DISTILLATION, TEACHER = "distillation__distillation_loss__", "distillation__teacher__model__path"


# The policy as it begins is a teacher too, once it has moved.
TAUGHT = {"distillation__enabled": True, TEACHER: "${actor_rollout_ref.model.path}"}


VARIANTS = {
    **{name: {ESTIMATOR: name} for name in (
        "grpo", "rloo", "opo", "grpo_passk", "gpg", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "remax",
        "maxrl", "lite_ppo", "optimal_token_baseline",
    )},
    "group, then batch": {
        "algorithm__adv_norm__mean_level": "group", "algorithm__adv_norm__std_level": "batch",
        "algorithm__reward_scaling": 10.0, "algorithm__reward_bias": -0.5,
    },
    "gae": GAE,
    "gdpo": {ESTIMATOR: "gdpo", "algorithm__gdpo_reward_keys": "[acc,rule_score]"},
    **{f"loss {name}": {LOSS: name, **COV} for name in policy_losses.POLICY_LOSSES},
    # Against the engine: |log ratio| has a kink where a policy has not moved, and rounding would decide on its side.
    "loss kl_cov": {LOSS: "kl_cov", **COV, CORRECTION + "bypass_mode": True},
    **{f"agg {name}": {ACTOR + "loss_agg_mode": name} for name in (
        "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm",
    )},
    "unbiased kl": {ACTOR + "use_bias_correction_kl": True},
    "off-policy mask": {ACTOR + "off_policy_mask_threshold": 0.0},
    "high entropy": {ACTOR + "top_entropy_quantile": 0.3, CORRECTION + "rollout_rs": "token_k1",
                     CORRECTION + "rollout_rs_threshold": "1.1"},
    "adaptive entropy": {ACTOR + "adaptive_entropy__" + name: value for name, value in (
        ("target_entropy", 9.0), ("delta_ent_coef", 0.1), ("max_ent_coef", 1.0),
    )},
    "exact kl": {ACTOR + "kl_loss_type": "full"},
    "k3+": {ACTOR + "kl_loss_type": "k3+"},
    "kl in reward": {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"},
    "exact kl in reward, gae": {"algorithm__use_kl_in_reward": True, "algorithm__kl_penalty": "full", **GAE},
    "teacher": {**TAUGHT, DISTILLATION + "loss_mode": "jsd"},
    # The entropy moves the policy first: of a teacher that it equals, it would learn the rounding.
    "teacher alone": {**TAUGHT, ACTOR + "use_kl_loss": False, DISTILLATION + "use_task_rewards": False},
    "tis": {CORRECTION + "rollout_is": "token", CORRECTION + "rollout_is_threshold": "1.1"},
    "sequence is": {CORRECTION + "rollout_is": "sequence", CORRECTION + "rollout_is_batch_normalize": True},
    "rejection": {
        **GAE, CORRECTION + "rollout_rs": "token_k1,seq_mean_k2,token_binary_kl",
        CORRECTION + "rollout_rs_threshold": "1.2,0.01,0.01",
    },
    "bypass": {
        CORRECTION + "bypass_mode": True, CORRECTION + "rollout_rs": "seq_max_k3",
        CORRECTION + "rollout_rs_threshold": "0.02",
    },
    "bypass reinforce": {
        CORRECTION + "bypass_mode": True, CORRECTION + "loss_type": "reinforce", CORRECTION + "rollout_is": "token",
    },
    "filter": {"algorithm__filter_groups__enable": True},
    "shuffle": {ACTOR + "shuffle": True, ACTOR + "ppo_epochs": 2},
}  # fmt: skip


def engine_is_off(trainer) -> None:
    """Make the engine report log-probs that differ from the trainer's, by a different amount for every token."""
    rollout = trainer.worker.rollout
    generate = rollout.generate

    def off(task):
        batch, texts, numbers = generate(task)
        exact = batch.ragged("rollout_log_probs")
        batch.update({"rollout_log_probs": exact.like(exact.values + 0.2 * torch.sin(7 * exact.values))})
        return batch, texts, numbers

    rollout.generate = off


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()]).detach().clone()


def actor_weights(trainer) -> torch.Tensor:
    return weights(trainer.worker.actor.policy)


class Moved:
    """The movement of the weights of actor and critic since this object was created."""

    def __init__(self, trainer) -> None:
        self._models = [trainer.worker.actor.policy] + ([trainer.worker.critic.model] if trainer.critic else [])
        self._before = [weights(model) for model in self._models]

    def by_role(self) -> list[torch.Tensor]:
        return [weights(model) - before for model, before in zip(self._models, self._before, strict=True)]


def numbers_of(metrics: dict[str, float]) -> dict[str, float]:
    """Return the numbers that must not depend on the layout of the batch."""
    return {
        name: value for name, value in metrics.items() if not name.startswith(("timing", "perf/", "global_seqlen/"))
    }


ONE_STEP = {ACTOR + "ppo_mini_batch_size": 4}


def scored(trainer) -> tuple[Batch, Batch, dict]:
    """Return a generated batch, the result of its old_log_prob pass, and its numbers."""
    actor = trainer.worker.actor
    batch, *_ = trainer.worker.rollout.generate(trainer.experience_task())
    columns, numbers = actor.log_probs(batch, [len(batch)])
    return batch, columns, numbers


def with_failures(trainer, *samples: int, acc: float | None = None) -> None:
    """Make the given responses of every generation fail; acc: the accuracy of all others."""
    score = trainer.pool.score

    def failing(split, jobs):
        columns = score(split, jobs)
        columns["scorer/acc"][:] = columns["scorer/acc"] if acc is None else acc
        for sample in samples:
            columns["scorer/acc"][sample], columns["score"][sample], columns["reward_failed"][sample] = np.nan, 0.0, 1.0
        return columns

    trainer.pool.score = failing


LAYERS, EXPERTS, CHOSEN = 3, 8, 2


def save_moe(folder, **changes):
    own = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "head_dim": 16}
    own |= {"norm_topk_prob": True, "initializer_range": 0.4, "tie_word_embeddings": False}
    return save_tiny_moe(folder, **own | changes)


def generated(trainer) -> tuple[list, list, dict]:
    """Return tokens and mask of each response to the first prompts, their texts, and the numbers of each."""
    batch, texts, numbers = trainer.worker.rollout.generate(trainer.experience_task())
    rows = (batch.ragged(name).rows() for name in (c.RESPONSE, c.RESPONSE_MASK))
    return [(answer.tolist(), mask.tolist()) for answer, mask in zip(*rows, strict=True)], texts, numbers.per_sample
