"""Columns that the policy's passes make and are sent, as `StepPasses` decides."""

from __future__ import annotations

from rltrain.base.columns import names as c
from rltrain.config.step_passes import StepPasses


def old_log_probs(passes: StepPasses) -> str:
    """The column of the old policy's log-probs."""
    # Under bypass the engine is the old policy, and there is no other column of them.
    return c.ROLLOUT_LOG_PROBS if passes.bypass else c.OLD_LOG_PROBS


def made_by_rollout(passes: StepPasses) -> tuple[str, ...]:
    """What an answer has after the rollout, and the old_log_prob pass is sent."""
    return (*c.GENERATED, c.ROUTED_EXPERTS) if passes.router_replay == "R3" else c.GENERATED


def made_by_log_probs(passes: StepPasses) -> list[str]:
    """What the old_log_prob pass adds."""
    made = [c.OLD_LOG_PROBS]
    made += [c.IS_WEIGHTS] if passes.importance_weights else []
    made += [c.LOSS_MASK] if passes.rejects else []
    made += [c.SUM_PI_SQUARED] if passes.estimator.sum_pi_squared else []
    made += [c.ENTROPY] if passes.masks_certain else []
    made += [c.ROUTED_EXPERTS] if passes.router_replay == "R2" else []
    return made


def columns_of_update(passes: StepPasses, *, waits: bool) -> tuple[list[str], tuple[str, ...]]:
    """What the update is sent of every sample, and what only of those that have it.

    waits: the samples of its first mini-batch have no old log-probs yet.
    """
    columns = [*c.PROMPT_AND_ANSWER, old_log_probs(passes)]
    columns += [c.REF_LOG_PROBS] if passes.sampled_kl_in_loss else []
    columns += [c.TEACHER_LOG_PROBS] if passes.teacher else []
    columns += [c.ADVANTAGES] if passes.token_advantages else []
    columns += [c.IS_WEIGHTS] if passes.importance_weights and not passes.bypass else []
    columns += [c.LOSS_MASK] if passes.rejects_early else []
    columns += [c.ENTROPY] if passes.masks_certain else []
    # As required columns the request would refuse them. The worker makes them from its own forward and compares them
    # with the engine's, which it therefore needs.
    optional = [c.OLD_LOG_PROBS, c.IS_WEIGHTS] if waits else []
    columns = [name for name in columns if name not in optional]
    if waits or (passes.reads_engine and not passes.bypass):
        columns += [c.ROLLOUT_LOG_PROBS]
    # Where a first mini-batch has no old log-probs nothing has been learnt, and its router chooses as it did.
    optional += [c.ROUTED_EXPERTS] if passes.router_replay != "disabled" else []
    return columns, tuple(optional)
