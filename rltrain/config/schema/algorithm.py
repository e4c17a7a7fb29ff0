"""Keys under algorithm: advantages from rewards."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from rltrain.config.schema.declarations import ESTIMATORS, EstimatorTraits, estimator_traits
from rltrain.config.schema.fields import key, section

KLKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+", "full"
]  # fmt: skip
# Maximum rounds of dynamic sampling in a step, unless filter_groups.max_num_gen_batches is set. Without a limit, a
# policy that solves everything or nothing would generate forever.
_DEFAULT_ROUNDS = 100
# Metrics of dynamic sampling that are available with every scorer.
FILTER_METRICS = ("acc", "score", "seq_reward", "seq_final_reward")
_ADAPTIVE = "type=adaptive"
REWARDED = {
    "distillation.is_alone=False": "distillation.distillation_loss.use_task_rewards=False trains on the teacher only",
    "sft.enabled=False": "sft.enabled=True learns from the responses in the data",
}
_WEIGHS = {
    "bypass_mode=False or loss_type=reinforce": (
        "with bypass_mode and loss_type=ppo_clip the ratio is computed against the engine"
    )
}


@dataclass
class KLControlConfig:
    """Weight of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed, or adaptive (the weight follows the measured KL)."""
    kl_coef: float = key(0.001, least=0)
    """Weight (adaptive: initial weight)."""
    horizon: int = key(10000, least=1, only_with=_ADAPTIVE)
    """Adaptive: samples over which the weight adapts."""
    target_kl: float = key(0.1, over=0, only_with=_ADAPTIVE)
    """Adaptive: target of the KL."""


@dataclass
class FilterGroupsConfig:
    """DAPO's dynamic sampling."""

    enable: bool = key(False, only_with={"actor_rollout_ref.rollout.n>1": "a prompt has one response, which is kept"})
    """Replace groups whose responses all have the same score by new generations."""
    metric: str = key("acc", only_with="enable")
    """Metric that is compared: acc (else the scorer's score), score (the scorer's, without penalties), seq_reward and
    seq_final_reward (with penalties), or another number of the scorer."""
    max_num_gen_batches: int = key(0, only_with="enable")
    """Maximum rounds of generation in a step; 0 or less: 100. After the last round, missing groups are filled with
    discarded ones."""

    @property
    def most_rounds(self) -> int:
        """Maximum rounds of generation in a step."""
        return self.max_num_gen_batches if self.max_num_gen_batches > 0 else _DEFAULT_ROUNDS


@dataclass
class GiGPOConfig:
    """GiGPO: comparison of turns in the same state."""

    step_advantage_w: float = key(1.0, least=0)
    """gigpo: weight of the comparison of turns, added to the comparison of whole responses."""


@dataclass
class AdvNormConfig:
    """Second normalisation of advantages.

    It applies to one advantage per response, over the tokens of the batch or of a group, as AReaL's adv_norm.
    """

    mean_level: Literal["batch", "group"] | None = None
    """Subtract the mean of the batch, or of the group; null: none."""
    std_level: Literal["batch", "group"] | None = None
    """Divide by the standard deviation of the batch, or of the group; null: none."""


@dataclass(frozen=True)
class RejectionRule:
    """A rule that keeps values within [low, high]."""

    over: str
    """Unit of the bounded value: token, seq_sum, seq_mean or seq_max."""
    measure: str
    """Estimator of the KL: k1, k2, k3, or binary_kl (see `correction`)."""
    low: float
    high: float


@dataclass
class RolloutCorrectionConfig:
    """Correction of the mismatch between the engine's and the trainer's policy."""

    rollout_is: Literal["token", "sequence"] | None = key(None, only_with=_WEIGHS)
    """Importance weights of the policy loss, per token or per sequence; null: none."""
    rollout_is_threshold: str = key("2.0", only_with={"rollout_is": "rollout_is is null", **_WEIGHS})
    """Truncate weights from above at this number; low_high (0.5_2.0): weights outside become 0."""
    rollout_is_batch_normalize: bool = key(
        False,
        only_with={
            "rollout_is": "rollout_is is null",
            "bypass_mode=False": "with bypass_mode weights are computed per micro-batch in the update",
        },
    )
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Reject tokens or sequences: comma list of token_k1|k2|k3, seq_sum_k1|k2|k3, seq_mean_k1|k2|k3, seq_max_k2|k3, or
    these with binary_kl (KPop); null: none."""
    rollout_rs_threshold: str | None = key(None, only_with={"rollout_rs": "rollout_rs is null"})
    """Bounds of rollout_rs, one for all or one for each: k1 takes low_high of pi_engine / pi_trainer (x means 1/x to
    x); all others take the largest value."""
    bypass_mode: bool = False
    """Use the engine's log-probs as the old policy's, without an old_log_prob pass."""
    loss_type: Literal["ppo_clip", "reinforce"] = key("ppo_clip", only_with="bypass_mode")
    """bypass_mode: ppo_clip (the policy loss, with its ratio taken against the engine) or reinforce (-A w log pi)."""

    def importance_bounds(self) -> tuple[float | None, float]:
        """Return (low, high) of rollout_is_threshold; low is None for a plain truncation. Raises ValueError."""
        low, high = bounds(str(self.rollout_is_threshold))
        return low, high

    def rejection_rules(self) -> list[RejectionRule]:
        """Return the rules of rollout_rs. Raises ValueError with the reason."""
        names = [name.strip() for name in self.rollout_rs.split(",")] if self.rollout_rs else []
        limits = [limit.strip() for limit in str(self.rollout_rs_threshold or "").split(",")]
        limits = limits * len(names) if len(limits) == 1 else limits
        if len(limits) != len(names):
            raise ValueError(f"{len(names)} rules and {len(limits)} thresholds")
        rules = []
        for name, limit in zip(names, limits, strict=True):
            found = re.fullmatch("(token|seq_sum|seq_mean|seq_max)_(k1|k2|k3|binary_kl)", name)
            if found is None:
                raise ValueError(f"'{name}' is not a rule")
            over, measure = found.groups()
            # k1 is signed, so its largest value does not cover tokens that differ in the other direction.
            if (over, measure) == ("seq_max", "k1"):
                raise ValueError("seq_max needs k2 or k3")
            low, high = bounds(limit)
            # k1 is measured as log(pi_engine / pi_trainer), so bounds on the ratio become bounds on its logarithm.
            if measure == "k1":
                if low is None and high <= 1:
                    raise ValueError(f"{name}={limit}: a single bound x means 1/x to x, so it must be above 1")
                if low == 0:
                    raise ValueError(f"{name}={limit}: the lower bound of a ratio must be above 0")
                rules.append(RejectionRule(over, measure, math.log(low or 1 / high), math.log(high)))
            else:
                if low is not None:
                    raise ValueError(f"{name}={limit}: {measure} takes a single upper bound")
                rules.append(RejectionRule(over, measure, -math.inf, high))
        return rules


@dataclass
class AlgorithmConfig:
    """Advantages from rewards."""

    adv_estimator: str = key("gae", among=tuple(ESTIMATORS), plugin=True, only_with=REWARDED)
    """gae (with a critic), grpo, reinforce_plus_plus, reinforce_plus_plus_baseline, rloo, remax, opo, maxrl, lite_ppo,
    optimal_token_baseline, grpo_passk, gpg, gpg_paper, gdpo, turn_rloo and gigpo (over turns), or a user's function:
    FILE.py:NAME. grpo_vectorized and rloo_vectorized are grpo and rloo."""
    gamma: float = key(1.0, least=0, most=1)
    """Discount of later rewards: of tokens (gae, reinforce_plus_plus) or of turns (turn_rloo, gigpo)."""
    lam: float = key(1.0, least=0, most=1)
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo, grpo_passk, gdpo, gigpo: divide by the standard deviation of the group; False: Dr. GRPO."""
    gdpo_reward_keys: list[str] = key([])
    """gdpo: numbers of the scorer that are compared one by one."""
    gdpo_reward_weights: list[float] | None = None
    """gdpo: weight of each number in gdpo_reward_keys; null: 1 each."""
    gigpo: GiGPOConfig = section(GiGPOConfig)
    """Comparison of turns."""
    adv_norm: AdvNormConfig = section(AdvNormConfig)
    """Normalisation after the estimator."""
    reward_scaling: float = key(1.0, over=0)
    """Advantages come from (score + reward_bias) * reward_scaling."""
    reward_bias: float = 0.0
    """Added to the score before reward_scaling."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the reward, token by token."""
    kl_penalty: KLKind = key("kl", only_with="use_kl_in_reward")
    """Estimator of the KL in the reward, as in actor.kl_loss_type."""
    kl_ctrl: KLControlConfig = section(KLControlConfig, only_with="use_kl_in_reward")
    """Weight of the KL in the reward."""
    mask_truncated: bool = False
    """DAPO's overlong filtering: exclude responses cut at the limit from the loss (of critic, KL and entropy too) and
    from its denominators, which count tokens and responses. Their rewards stay in the baseline of their group."""
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    """Dynamic sampling."""
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    """Mismatch between engine and trainer."""

    @property
    def needs_critic(self) -> bool:
        """True if the advantages need a value function."""
        return self.estimator.values

    @property
    def estimator(self) -> EstimatorTraits:
        """The declaration of the advantage estimator."""
        return estimator_traits(self.adv_estimator)


def bounds(text: str) -> tuple[float | None, float]:
    """Return (low, high) of "high" or "low_high". Raises ValueError with the reason."""
    low, _, high = text.rpartition("_")
    try:
        numbers = (float(low) if low else None, float(high))
    except ValueError:
        raise ValueError(f"'{text}' is not a number or low_high, such as 2.0 or 0.5_2.0") from None
    if not float("inf") > numbers[1] > (numbers[0] or 0.0) >= 0:
        raise ValueError(f"'{text}': bounds must be positive and finite, lower bound first")
    return numbers
