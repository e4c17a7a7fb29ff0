"""Input and output columns of the policy's passes, as selected by `StepPasses`."""

from __future__ import annotations

from rltrain.common.columns import names as c
from rltrain.config.step_passes import StepPasses


def old_log_probs(passes: StepPasses) -> str:
    """Return the column name of the old policy's log-probs."""
    # With bypass, the engine's policy is the old policy, and the other column does not exist.
    return c.ROLLOUT_LOG_PROBS if passes.bypass else c.OLD_LOG_PROBS


def made_by_rollout(passes: StepPasses) -> tuple[str, ...]:
    """Return the columns of the rollout, which are also the inputs of the old_log_prob pass."""
    return (*c.GENERATED, c.ROUTED_EXPERTS) if passes.router_replay == "R3" else c.GENERATED


def made_by_log_probs(passes: StepPasses) -> list[str]:
    """Return the columns that the old_log_prob pass adds."""
    made = [c.OLD_LOG_PROBS]
    made += [c.IS_WEIGHTS] if passes.importance_weights else []
    made += [c.LOSS_MASK] if passes.rejects else []
    made += [c.SUM_PI_SQUARED] if passes.estimator.sum_pi_squared else []
    made += [c.ENTROPY] if passes.masks_certain else []
    made += [c.ROUTED_EXPERTS] if passes.router_replay == "R2" else []
    return made


def columns_of_update(passes: StepPasses, *, waits: bool) -> tuple[list[str], tuple[str, ...]]:
    """Return the required and the optional columns of the update.

    waits: True if the samples of the first mini-batch have no old log-probs yet.
    """
    columns = [*c.PROMPT_AND_ANSWER, old_log_probs(passes)]
    columns += [c.REF_LOG_PROBS] if passes.sampled_kl_in_loss else []
    columns += [c.TEACHER_LOG_PROBS] if passes.teacher else []
    columns += [c.ADVANTAGES] if passes.token_advantages else []
    columns += [c.IS_WEIGHTS] if passes.importance_weights and not passes.bypass else []
    columns += [c.LOSS_MASK] if passes.rejects_early else []
    columns += [c.ENTROPY] if passes.masks_certain else []
    # The log-probs are optional because the request would reject samples without a required column. The worker computes
    # missing old log-probs in its forward pass and compares them with the engine's, so it needs the engine's too.
    optional = [c.OLD_LOG_PROBS, c.IS_WEIGHTS] if waits else []
    columns = [name for name in columns if name not in optional]
    if waits or (passes.reads_engine and not passes.bypass):
        columns += [c.ROLLOUT_LOG_PROBS]
    # The routing is optional because a first mini-batch without old log-probs may have none. Its weights are unchanged,
    # so its routing is the same.
    optional += [c.ROUTED_EXPERTS] if passes.router_replay != "disabled" else []
    return columns, tuple(optional)
