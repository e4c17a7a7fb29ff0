"""Keys under algorithm: how advantages come from rewards."""

from __future__ import annotations

from dataclasses import dataclass, field

from rltrain.config.declarations import EstimatorTraits, estimator_traits


@dataclass
class KLControlConfig:
    """Weight of the KL in the reward."""

    type: str = "fixed"
    """fixed or adaptive."""
    kl_coef: float = 0.001
    """Weight (adaptive: at the start)."""
    horizon: int = 10000
    """Adaptive: samples over which the weight adapts."""
    target_kl: float = 0.1
    """Adaptive: the KL to hold."""


@dataclass
class FilterGroupsConfig:
    """DAPO's dynamic sampling."""

    enable: bool = False
    """Generate again in place of groups whose answers all score alike."""
    metric: str = "acc"
    """What is compared: acc (else the scorer's score), score (with penalties; seq_reward is the same), or another number of the scorer."""
    max_num_gen_batches: int = 0
    """Most rounds of generation in a step; 0: 10. What is then still missing is filled with groups that were thrown away."""


@dataclass(frozen=True)
class RejectionRule:
    """Keep what lies within [low, high]. over: token, seq_sum, seq_mean or seq_max; measure: k1, k2 or k3."""

    over: str
    measure: str
    low: float
    high: float


@dataclass
class RolloutCorrectionConfig:
    """What to do about an engine whose policy is not quite the trainer's."""

    rollout_is: str | None = None
    """Importance weights of the policy loss: null, token or sequence."""
    rollout_is_threshold: str = "2.0"
    """Truncate weights from above at this number; low_high (0.5_2.0): weights outside become 0."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Reject tokens or sequences: comma list of token_k1|k2|k3, seq_sum_k1|k2|k3, seq_mean_k1|k2|k3, seq_max_k2|k3; null: none."""
    rollout_rs_threshold: str | None = None
    """Bounds of rollout_rs, one for all or one each: k1 low_high in pi_engine / pi_trainer (x: 1/x to x); k2, k3 the largest value."""
    bypass_mode: bool = False
    """Take the engine's log-probs as the old policy's, and make no old_log_prob pass."""
    loss_type: str = "ppo_clip"
    """bypass_mode: ppo_clip (the policy loss, its ratio taken against the engine) or reinforce (-A w log pi)."""

    def importance_bounds(self) -> tuple[float | None, float]:
        """(low, high) of rollout_is_threshold; low is None for a plain truncation. Raises ValueError."""
        low, high = _bounds(str(self.rollout_is_threshold))
        return low, high

    def rejection_rules(self) -> list[RejectionRule]:
        """The rules of rollout_rs. Raises ValueError that says what is wrong."""
        import math

        names = [name.strip() for name in self.rollout_rs.split(",")] if self.rollout_rs else []
        limits = [limit.strip() for limit in str(self.rollout_rs_threshold or "").split(",")]
        limits = limits * len(names) if len(limits) == 1 else limits
        if len(limits) != len(names):
            raise ValueError(f"{len(names)} rules and {len(limits)} thresholds")
        rules = []
        for name, limit in zip(names, limits, strict=True):
            over, _, measure = name.rpartition("_")
            if over not in ("token", "seq_sum", "seq_mean", "seq_max") or measure not in ("k1", "k2", "k3"):
                raise ValueError(f"'{name}' is not a rule")
            if (over, measure) == ("seq_max", "k1"):
                raise ValueError("seq_max goes with k2 or k3")
            low, high = _bounds(limit)
            if measure == "k1":
                if low is None and high <= 1:
                    raise ValueError(f"{name}={limit}: one bound x means 1/x to x, so it must be over 1")
                if low == 0:
                    raise ValueError(f"{name}={limit}: the lower bound of a ratio must be over 0")
                rules.append(RejectionRule(over, measure, math.log(low or 1 / high), math.log(high)))
            else:
                if low is not None:
                    raise ValueError(f"{name}={limit}: {measure} has one bound, the largest value")
                rules.append(RejectionRule(over, measure, -math.inf, high))
        return rules


@dataclass
class AlgorithmConfig:
    """How advantages come from rewards."""

    adv_estimator: str = "gae"
    """gae (with a critic), grpo, reinforce_plus_plus, reinforce_plus_plus_baseline, rloo, remax, opo, grpo_passk, gpg, gdpo,
    or your own: FILE.py:NAME."""
    gamma: float = 1.0
    """Discount of later rewards (gae, reinforce_plus_plus)."""
    lam: float = 1.0
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo, grpo_passk, gdpo: divide by the standard deviation of the group; False: Dr. GRPO."""
    gdpo_reward_keys: list[str] = field(default_factory=list)
    """gdpo: numbers the scorer returns that are compared one by one."""
    gdpo_reward_weights: list[float] | None = None
    """gdpo: weight of each; null: 1 each."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the reward, token by token."""
    kl_penalty: str = "kl"
    """Estimator of that KL, as in actor.kl_loss_type."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """Weight of that KL."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Dynamic sampling."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """Mismatch between engine and trainer."""

    @property
    def needs_critic(self) -> bool:
        """Whether the advantages need a value function."""
        return self.estimator.values

    @property
    def estimator(self) -> EstimatorTraits:
        """What the advantage estimator declares about itself."""
        return estimator_traits(self.adv_estimator)


def _bounds(text: str) -> tuple[float | None, float]:
    low, _, high = text.rpartition("_")
    try:
        numbers = (float(low) if low else None, float(high))
    except ValueError:
        raise ValueError(f"'{text}' is neither a number nor low_high, such as 2.0 or 0.5_2.0") from None
    if not float("inf") > numbers[1] > (numbers[0] or 0.0) >= 0:
        raise ValueError(f"'{text}': bounds are positive and finite, the lower one first")
    return numbers
