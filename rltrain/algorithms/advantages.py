"""Advantage estimators: how much better an answer, or a token of it, was than expected.

There are three kinds. An *outcome* estimator gives one number per answer and runs on the driver, which knows all
answers to a prompt. So does a *turn* estimator, with one number per turn of the policy. A *token* estimator gives one
number per token and runs where the tokens are; whitening, which needs the whole batch, is applied later from its
moments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rltrain.algorithms.groups import STD_EPSILON, Groups
from rltrain.algorithms.normalisation import whiten
from rltrain.base.columns.ragged import Ragged
from rltrain.base.plugin import is_plugin, load_plugin
from rltrain.config.schema.algorithm import AlgorithmConfig
from rltrain.config.schema.declarations import ESTIMATOR_KEY, EstimatorTraits, declared


@dataclass(frozen=True)
class OutcomeInputs:
    """One number per answer, all [n]."""

    scores: Tensor
    """Reward of the whole answer."""
    groups: Tensor
    """The same number for all answers to a prompt."""
    lengths: Tensor
    """Tokens of the answer."""
    terms: dict[str, Tensor] = field(default_factory=dict)
    """The parts that a reward is made of, by name."""
    baselines: Tensor | None = None
    """Reward of a greedy answer to the same prompt, where declared."""
    rounding: Tensor | None = None
    """How far a reward may be off because its parts were computed in fp32, None for not at all."""


@dataclass(frozen=True)
class TokenInputs:
    """What an estimator per token gets; values and baselines where it declares that it needs them."""

    rewards: Ragged
    values: Ragged | None = None
    """Both: one number per token."""
    baselines: Tensor | None = None
    """[n]: reward of a greedy answer to the same prompt."""
    groups: Tensor | None = None
    """[n]: the same number for all answers to a prompt; this and what follows where sum_pi_squared is declared."""
    log_probs: Ragged | None = None
    """log pi_old of every token."""
    sum_pi_squared: Ragged | None = None
    """Sum over the vocabulary of pi_old^2 at every token."""
    weights: Ragged | None = None
    """Importance weights of the rollout correction, where it has some."""


@dataclass(frozen=True)
class TokenAdvantages:
    """advantages (before whitening) and returns, one number per token. A critic learns the returns."""

    advantages: Ragged
    returns: Ragged


@dataclass(frozen=True)
class TurnInputs:
    """What an estimator per turn gets of n answers, each of at least one turn."""

    rewards: Ragged
    """One number per turn. Those of an answer add up to its reward."""
    states: Ragged
    """What the policy was told before each turn: equal numbers for equal tokens, 0 for the prompt."""
    groups: Tensor
    """[n]: the same number for all answers to a prompt."""
    rounding: Tensor | None = None
    """[n]: see `OutcomeInputs`."""


OutcomeEstimator = Callable[[OutcomeInputs, AlgorithmConfig], Tensor]
TokenEstimator = Callable[[TokenInputs, AlgorithmConfig], TokenAdvantages]
Estimator = TypeVar("Estimator", bound=Callable[..., Any])
# The built-in functions; their declarations are those of their names in `config.schema.declarations`.
ESTIMATORS: dict[str, Callable[..., Any]] = {}


def built_in(function: Estimator) -> Estimator:
    """Make a function of this file ``algorithm.adv_estimator=<its name>``."""
    ESTIMATORS[function.__name__] = function
    return function


def outcome_estimator(
    *, compares: bool = False, greedy_baseline: bool = False
) -> Callable[[OutcomeEstimator], OutcomeEstimator]:
    """Declare a function of your own as ``(OutcomeInputs, AlgorithmConfig) -> [n]``: one advantage per answer.

    compares: it compares the answers of a prompt group, so a run with one answer per prompt is refused.
    greedy_baseline: it gets ``baselines``, for which every prompt is also answered greedily.
    """
    return partial(declared, traits=EstimatorTraits(compares=compares, greedy_baseline=greedy_baseline))


def token_estimator(
    *, values: bool = False, greedy_baseline: bool = False, whitens: bool = False, sum_pi_squared: bool = False
) -> Callable[[TokenEstimator], TokenEstimator]:
    """Declare a function of your own as ``(TokenInputs, AlgorithmConfig) -> TokenAdvantages``: one advantage per token.

    values: it gets ``values`` of a critic, which learns its ``returns``. greedy_baseline: it gets ``baselines``, for
    which every prompt is also answered greedily. whitens: its advantages are whitened over the batch. sum_pi_squared:
    it gets ``log_probs``, ``sum_pi_squared`` and ``groups``, all answers of a group in one call.
    """
    traits = EstimatorTraits(
        per_token=True, values=values, greedy_baseline=greedy_baseline, whitens=whitens, sum_pi_squared=sum_pi_squared
    )
    return partial(declared, traits=traits)


def find_estimator(name: str) -> Callable[..., Any]:
    """The function of ``algorithm.adv_estimator``, which may be FILE.py:NAME."""
    return load_plugin(ESTIMATOR_KEY, name) if is_plugin(name) else ESTIMATORS[name]


# -- token estimators --------------------------------------------------------------------------------------------------


@built_in
def gae(inputs: TokenInputs, cfg: AlgorithmConfig) -> TokenAdvantages:
    """A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t   (Schulman et al. 2016, eq. 16).

    V is 0 after the last token. Returns R_t = A_t + V_t, of the advantages before whitening.
    """
    assert inputs.values is not None
    values = inputs.values.values
    # Rows hold the policy's tokens alone, so text that others wrote between them is skipped and not discounted. The
    # roll brings the first value of the next row to the last token of a row, where V is 0.
    following = torch.where(inputs.values.from_end == 0, torch.zeros_like(values), values.roll(-1))
    deltas = inputs.rewards.values + cfg.gamma * following - values
    advantages = suffix_sums(inputs.rewards.like(deltas), cfg.gamma * cfg.lam)
    # The critic learns the returns, so they keep the scale of the rewards: whitening comes later, to advantages alone.
    return TokenAdvantages(advantages, advantages.like(advantages.values + values))


@built_in
def reinforce_plus_plus(inputs: TokenInputs, cfg: AlgorithmConfig) -> TokenAdvantages:
    """A_t = G_t = r_t + gamma G_{t+1}, whitened over all tokens of the batch   (Hu 2025, REINFORCE++)."""
    returns = suffix_sums(inputs.rewards, cfg.gamma)
    return TokenAdvantages(returns, returns)


@built_in
def remax(inputs: TokenInputs, cfg: AlgorithmConfig) -> TokenAdvantages:
    """A_t = sum_{u >= t} r_u - r(greedy answer to the same prompt)   (Li et al. 2024, ReMax)."""
    assert inputs.baselines is not None
    returns = suffix_sums(inputs.rewards, 1.0)
    baselines = returns.broadcast(inputs.baselines.to(returns.values.dtype))
    return TokenAdvantages(returns.like(returns.values - baselines.values), returns)


@built_in
def optimal_token_baseline(inputs: TokenInputs, cfg: AlgorithmConfig) -> TokenAdvantages:
    """A_t = G_t - B_t, B_t = sum_i G_i,t W_i,t / sum_i W_i,t over the group's answers of more than t tokens.

    G_t = sum_{u >= t} r_u; W_t = sum_{u <= t} w_u, the energy of the gradients so far: w = 1 - 2 pi + sum_v pi_v^2, the
    squared length of 1_token - pi, times the square of the importance weight where there is one (2602.07078). Where an
    answer has no other beside it at t, B is 0, as in verl.
    """
    assert inputs.groups is not None
    assert inputs.log_probs is not None
    assert inputs.sum_pi_squared is not None
    returns = suffix_sums(inputs.rewards, 1.0)
    energy = 1 - 2 * inputs.log_probs.values.exp() + inputs.sum_pi_squared.values
    # What is 0 but for rounding must not be below it.
    energy = energy.clamp(min=0) * (1.0 if inputs.weights is None else inputs.weights.values.square())
    energy = _prefix_sums(returns.like(energy)).values
    groups = torch.unique(inputs.groups, return_inverse=True)[1]
    longest = int(returns.lengths.max()) if len(returns) else 0
    place = groups[returns.row_ids] * longest + returns.positions
    size = len(inputs.groups) * longest

    def summed(values: Tensor) -> Tensor:
        return torch.zeros(size, dtype=values.dtype).index_add(0, place, values)[place]

    # Less the smallest at t, so that equal returns have advantages of exactly 0.
    start = torch.full((size,), torch.inf, dtype=returns.values.dtype)
    above = returns.values - start.scatter_reduce(0, place, returns.values, "amin")[place]
    baseline = summed(above * energy) / summed(energy).clamp(min=1e-8)
    alone = summed(torch.ones_like(energy)) == 1
    return TokenAdvantages(returns.like(torch.where(alone, returns.values, above - baseline)), returns)


def _prefix_sums(values: Ragged) -> Ragged:
    """S_t = x_t + S_{t-1} in every row."""
    sums = values.values.cumsum(0)
    before = torch.cat([sums.new_zeros(1), sums])[values.offsets[:-1]]
    return values.like(sums - before[values.row_ids])


def suffix_sums(rewards: Ragged, decay: float) -> Ragged:
    """S_t = x_t + decay S_{t+1} in every row."""
    sums, from_end = rewards.values, rewards.from_end
    longest, reach = int(rewards.lengths.max()) if len(rewards) else 0, 1
    # Every round doubles the number of terms in a sum. The closed form, a cumulative sum of x_t decay^-t, would
    # overflow on long answers.
    while reach < longest:
        further = torch.where(from_end >= reach, sums.roll(-reach), torch.zeros_like(sums))
        sums, reach = sums + decay**reach * further, 2 * reach
    return rewards.like(sums)


# -- outcome estimators ------------------------------------------------------------------------------------------------


@built_in
def grpo(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> Tensor:
    """A_i = (r_i - mean of group) / (std of group + 1e-6)   (Shao et al. 2024, DeepSeekMath, section 4.1).

    The standard deviation is the unbiased one. With ``norm_adv_by_std_in_grpo=False`` A_i = r_i - mean of group (Liu
    et al. 2025, Dr. GRPO).
    """
    groups = Groups(inputs.groups, inputs.rounding)
    return groups.over_std(inputs.scores) if cfg.norm_adv_by_std_in_grpo else groups.centred(inputs.scores)


@built_in
def rloo(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> Tensor:
    """A_i = r_i - mean of the other answers of the group   (Ahmadian et al. 2024, eq. 8)."""
    return Groups(inputs.groups, inputs.rounding).against_others(inputs.scores)


# The names of verl's faster forms of the same formulas.
ESTIMATORS |= {"grpo_vectorized": grpo, "rloo_vectorized": rloo}


@built_in
def opo(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> Tensor:
    """A_i = r_i - (sum_j length_j r_j) / (sum_j length_j) in the group   (Hao et al. 2025, OPO)."""
    groups = Groups(inputs.groups, inputs.rounding)
    lengths = inputs.lengths.to(inputs.scores.dtype)
    baseline = groups.sum(lengths * inputs.scores) / groups.sum(lengths).clamp(min=1) * ~groups.alone
    difference = inputs.scores - baseline
    # As in `Groups.centred`: a weighted mean of equal scores may be off by a rounding error, also where responses of
    # other scores weigh nothing.
    none = groups.flat(inputs.scores) | (difference.abs() <= groups.rounding(inputs.scores))
    return torch.where(none, 0.0, difference)


@built_in
def maxrl(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> Tensor:
    """A_i = (r_i - mean of group) / mean of group   (Tajwar et al. 2026, MaxRL, 2602.02710).

    For rewards of 0 and 1, whose mean is the pass rate: hard prompts count more. A group whose mean is not above 0 has
    nothing that could be made likelier, and an advantage of 0.
    """
    groups = Groups(inputs.groups, inputs.rounding).several()
    mean = groups.sum(inputs.scores) / groups.size
    earns = mean > groups.rounding(inputs.scores)
    return torch.where(earns, groups.centred(inputs.scores) / torch.where(earns, mean, 1.0), 0.0)


@built_in
def lite_ppo(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> Tensor:
    """A_i = (r_i - mean of group) / (std of all rewards of the batch + 1e-6)   (Liu et al. 2025, Lite PPO, 2508.08221).

    The standard deviation is the unbiased one, so that a group that differs little is not blown up.
    """
    centred = Groups(inputs.groups, inputs.rounding).several().centred(inputs.scores)
    return centred / (inputs.scores.std() + STD_EPSILON)


@built_in
def grpo_passk(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> Tensor:
    """The best answer of a group gets r_best - r_second, the others 0   (Chen et al. 2025, pass@k training).

    It is divided by the group's std + 1e-6 unless ``norm_adv_by_std_in_grpo=False``. A tie for the best gives 0 to all.
    """
    groups = Groups(inputs.groups, inputs.rounding).several()
    best = groups.largest(inputs.scores)
    is_best = best - inputs.scores <= groups.rounding(inputs.scores)
    second = groups.largest(inputs.scores.masked_fill(is_best, -torch.inf))
    # With a tie of all answers r_second is -inf and the lead infinite: it must be replaced, as a product with 0 is NaN.
    lead = torch.where(is_best & (groups.sum(is_best.to(best.dtype)) == 1), best - second, torch.zeros_like(best))
    return lead / (groups.std(inputs.scores) + STD_EPSILON) if cfg.norm_adv_by_std_in_grpo else lead


@built_in
def gpg(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> Tensor:
    """A_i = alpha (r_i - mean of group), alpha = answers / answers whose reward is not 0   (GPG as in verl).

    The paper counts the answers of groups without a gradient instead, see `gpg_paper`.
    """
    earning = int((inputs.scores.abs() > (0.0 if inputs.rounding is None else inputs.rounding)).sum())
    centred = Groups(inputs.groups, inputs.rounding).centred(inputs.scores)
    return centred * (len(inputs.scores) / max(earning, 1))


@built_in
def gpg_paper(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> Tensor:
    """A_i = alpha (r_i - mean of group), alpha = answers / answers in groups with a spread   (Chu et al. 2025, GPG)."""
    groups = Groups(inputs.groups, inputs.rounding).several()
    useful = int((~groups.flat(inputs.scores)).sum())
    return groups.centred(inputs.scores) * (len(inputs.scores) / max(useful, 1))


@built_in
def reinforce_plus_plus_baseline(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> Tensor:
    """r_i - mean of group, whitened over all tokens of the batch   (Hu 2025, REINFORCE++-baseline)."""
    return whiten(Groups(inputs.groups, inputs.rounding).centred(inputs.scores), inputs.lengths)


@built_in
def gdpo(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> Tensor:
    """The weighted sum of GRPO's advantages per reward term, whitened over all tokens   (Liu et al. 2026, GDPO).

    The terms are ``gdpo_reward_keys``, weighted by ``gdpo_reward_weights`` (1 each when left out).
    """
    weights = cfg.gdpo_reward_weights or [1.0] * len(cfg.gdpo_reward_keys)
    groups = Groups(inputs.groups)
    total = torch.zeros_like(inputs.scores)
    for name, weight in zip(cfg.gdpo_reward_keys, weights, strict=True):
        term = inputs.terms[name]
        spread = groups.std(term) + STD_EPSILON if cfg.norm_adv_by_std_in_grpo else 1.0
        total = total + weight * groups.centred(term) / spread
    return whiten(total, inputs.lengths)


# -- turn estimators ---------------------------------------------------------------------------------------------------


@built_in
def turn_rloo(inputs: TurnInputs, cfg: AlgorithmConfig) -> Ragged:
    """A_it = R_it - mean over j != i of R_js with s = min(t, T_j), where R_it = sum_{k >= t} gamma^(k - t) r_ik.

    A turn's return is compared with that of the other answers of the group from the same turn on, or from their last
    one, T_j. Answers to a prompt are sampled independently, so this baseline b depends on t and on other answers alone.
    Given the conversation h in front of turn t, which also decides that there is a turn t, what the policy says in it
    is independent of b: E[b grad log pi(a_t | h)] = E[b] grad sum_a pi(a | h) = 0, for every turn of every answer. So b
    moves no expected gradient, whatever the number of turns. Means over the rewards of single turns would: they are
    taken off once more for every turn that follows, and the policy chooses how many do. Where the last turn alone is
    rewarded and gamma is 1, this is `rloo`.
    """
    groups = Groups(inputs.groups, inputs.rounding)
    returns = suffix_sums(inputs.rewards, cfg.gamma)
    first, last = returns.offsets[:-1], returns.lengths - 1
    advantages = torch.zeros_like(returns.values)
    for turn in range(int(returns.lengths.max())):
        places = first + last.clamp(max=turn)
        advantages[places[last >= turn]] = groups.against_others(returns.values[places])[last >= turn]
    return returns.like(advantages)


@built_in
def gigpo(inputs: TurnInputs, cfg: AlgorithmConfig) -> Ragged:
    """A_it = A_i + omega A'_it: GRPO's over a group, and over its turns in one state   (Feng et al. 2025, GiGPO).

    A_i compares the rewards of whole answers. A'_it compares R_it = sum_{k >= t} gamma^(k - t) r_ik with that of all
    turns, of any answer of the group, before which the policy was told the same (anchor states); a turn alone in its
    state has 0. omega is ``gigpo.step_advantage_w``. With ``norm_adv_by_std_in_grpo=False`` neither is divided by a
    standard deviation. An answer that comes back to a state is compared with itself, which biases it, as the paper's.
    """
    returns = suffix_sums(inputs.rewards, cfg.gamma)
    state_of_turn = torch.stack([inputs.groups[returns.row_ids], inputs.states.values])
    rounding = None if inputs.rounding is None else inputs.rounding[returns.row_ids]
    states = Groups(state_of_turn.unique(dim=1, return_inverse=True)[1], rounding)
    of_answers = grpo(
        OutcomeInputs(inputs.rewards.sum(), inputs.groups, returns.lengths, rounding=inputs.rounding), cfg
    )
    of_turns = states.over_std(returns.values) if cfg.norm_adv_by_std_in_grpo else states.centred(returns.values)
    return returns.like(returns.broadcast(of_answers).values + cfg.gigpo.step_advantage_w * of_turns * ~states.alone)
