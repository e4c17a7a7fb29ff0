"""Advantage estimators for responses, turns and tokens.

An *outcome* estimator returns one number per response and runs on the driver, which has the rewards of all samples. A
*turn* estimator returns one number per turn of the policy and runs there too. A *token* estimator returns one number
per token and runs on the workers that store the tokens. Whitening needs the whole batch, so it is applied later, with
moments that are joined over all ranks.
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
from rltrain.algorithms.shapes import PerResponse, ResponseInts
from rltrain.common.columns.ragged import Ragged
from rltrain.common.plugin import is_plugin, load_plugin
from rltrain.config.schema.algorithm import AlgorithmConfig
from rltrain.config.schema.declarations import ESTIMATOR_KEY, EstimatorTraits, declared


@dataclass(frozen=True)
class OutcomeInputs:
    """Inputs of an outcome estimator, all [n]: one number per response."""

    scores: PerResponse
    """Reward of the response."""
    groups: ResponseInts
    """Group number: equal for all samples of a prompt."""
    lengths: ResponseInts
    """Tokens of the response."""
    terms: dict[str, PerResponse] = field(default_factory=dict)
    """Parts of the reward by name."""
    baselines: PerResponse | None = None
    """Reward of a greedy response to the same prompt, if the estimator declares ``greedy_baseline``."""
    rounding: PerResponse | None = None
    """Upper bound on the rounding error of a reward, if parts of it were computed in fp32; None for exact rewards."""


@dataclass(frozen=True)
class TokenInputs:
    """Inputs of a token estimator. ``values`` and ``baselines`` are set if the estimator declares them."""

    rewards: Ragged
    values: Ragged | None = None
    """rewards, values: one number per token."""
    baselines: PerResponse | None = None
    """[n]: reward of a greedy response to the same prompt."""
    groups: ResponseInts | None = None
    """[n]: group number. This and the following fields are set if the estimator declares ``sum_pi_squared``."""
    log_probs: Ragged | None = None
    """log pi_old of every token."""
    sum_pi_squared: Ragged | None = None
    """Sum over the vocabulary of pi_old^2 at every token."""
    weights: Ragged | None = None
    """Importance weights of the rollout correction, if it uses any."""


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages (before whitening) and returns, one number per token. A critic is trained on the returns."""

    advantages: Ragged
    returns: Ragged


@dataclass(frozen=True)
class TurnInputs:
    """Inputs of a turn estimator, for n responses with at least one turn each."""

    rewards: Ragged
    """One reward per turn. The rewards of the turns sum to the reward of the response."""
    states: Ragged
    """Hash of the context before each turn: equal numbers for equal tokens, 0 for the prompt."""
    groups: ResponseInts
    """[n]: group number, equal for all samples of a prompt."""
    rounding: PerResponse | None = None
    """[n]: see `OutcomeInputs`."""


OutcomeEstimator = Callable[[OutcomeInputs, AlgorithmConfig], Tensor]
TokenEstimator = Callable[[TokenInputs, AlgorithmConfig], TokenAdvantages]
Estimator = TypeVar("Estimator", bound=Callable[..., Any])
# Built-in estimators by name. `config.schema.declarations` declares their properties, such as ``compares``.
ESTIMATORS: dict[str, Callable[..., Any]] = {}


def built_in(function: Estimator) -> Estimator:
    """Register a function of this file as ``algorithm.adv_estimator=<its name>``."""
    ESTIMATORS[function.__name__] = function
    return function


def outcome_estimator(
    *, compares: bool = False, greedy_baseline: bool = False
) -> Callable[[OutcomeEstimator], OutcomeEstimator]:
    """Declare a custom estimator ``(OutcomeInputs, AlgorithmConfig) -> [n]``: one advantage per response.

    compares: the estimator compares the samples of a group, so a run with one sample per prompt is rejected.
    greedy_baseline: it gets ``baselines``: the reward of an additional greedy response to every prompt.
    """
    return partial(declared, traits=EstimatorTraits(compares=compares, greedy_baseline=greedy_baseline))


def token_estimator(
    *, values: bool = False, greedy_baseline: bool = False, whitens: bool = False, sum_pi_squared: bool = False
) -> Callable[[TokenEstimator], TokenEstimator]:
    """Declare a custom estimator ``(TokenInputs, AlgorithmConfig) -> TokenAdvantages``: one advantage per token.

    values: it gets ``values`` of a critic, which is trained on its ``returns``. greedy_baseline: it gets ``baselines``:
    the reward of an additional greedy response to every prompt. whitens: its advantages are whitened over the batch.
    sum_pi_squared: it gets ``log_probs``, ``sum_pi_squared`` and ``groups``, with all samples of a group in one call.
    """
    traits = EstimatorTraits(
        per_token=True, values=values, greedy_baseline=greedy_baseline, whitens=whitens, sum_pi_squared=sum_pi_squared
    )
    return partial(declared, traits=traits)


def find_estimator(name: str) -> Callable[..., Any]:
    """Return the function of ``algorithm.adv_estimator``, which may be FILE.py:NAME."""
    return load_plugin(ESTIMATOR_KEY, name) if is_plugin(name) else ESTIMATORS[name]


# -- token estimators --------------------------------------------------------------------------------------------------


@built_in
def gae(inputs: TokenInputs, cfg: AlgorithmConfig) -> TokenAdvantages:
    """Compute generalised advantage estimates   (Schulman et al. 2016, eq. 16).

    A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t. V is 0 after the last token. The
    returns are R_t = A_t + V_t, with A_t before whitening.
    """
    assert inputs.values is not None
    values = inputs.values.values
    # A row contains the policy's tokens only, so context tokens between them are skipped and not discounted. At the
    # last token of a row, `roll` inserts the first value of the next row; `where` replaces it by 0.
    following = torch.where(inputs.values.from_end == 0, torch.zeros_like(values), values.roll(-1))
    deltas = inputs.rewards.values + cfg.gamma * following - values
    advantages = suffix_sums(inputs.rewards.like(deltas), cfg.gamma * cfg.lam)
    # Returns keep the scale of the rewards for the critic: whitening is applied later, to advantages only.
    return TokenAdvantages(advantages, advantages.like(advantages.values + values))


@built_in
def reinforce_plus_plus(inputs: TokenInputs, cfg: AlgorithmConfig) -> TokenAdvantages:
    """Compute A_t = G_t = r_t + gamma G_{t+1}, whitened over all tokens of the batch   (Hu 2025, REINFORCE++)."""
    returns = suffix_sums(inputs.rewards, cfg.gamma)
    return TokenAdvantages(returns, returns)


@built_in
def remax(inputs: TokenInputs, cfg: AlgorithmConfig) -> TokenAdvantages:
    """Compute A_t = sum_{u >= t} r_u - r(greedy response to the same prompt)   (Li et al. 2024, ReMax)."""
    assert inputs.baselines is not None
    returns = suffix_sums(inputs.rewards, 1.0)
    baselines = returns.broadcast(inputs.baselines.to(returns.values.dtype))
    return TokenAdvantages(returns.like(returns.values - baselines.values), returns)


@built_in
def optimal_token_baseline(inputs: TokenInputs, cfg: AlgorithmConfig) -> TokenAdvantages:
    """Compute A_t = G_t - B_t, B_t = sum_i G_i,t W_i,t / sum_i W_i,t over the group's responses with more than t
    tokens.

    G_t = sum_{u >= t} r_u. W_t = sum_{u <= t} w_u is the accumulated gradient energy: w = 1 - 2 pi + sum_v pi_v^2, the
    squared norm of 1_token - pi, times the squared importance weight if there is one (2602.07078). B is 0 where only
    one response of the group reaches t, as in verl.
    """
    assert inputs.groups is not None
    assert inputs.log_probs is not None
    assert inputs.sum_pi_squared is not None
    returns = suffix_sums(inputs.rewards, 1.0)
    energy = 1 - 2 * inputs.log_probs.values.exp() + inputs.sum_pi_squared.values
    # Rounding may make the gradient energy negative.
    energy = energy.clamp(min=0) * (1.0 if inputs.weights is None else inputs.weights.values.square())
    energy = _prefix_sums(returns.like(energy)).values
    groups = torch.unique(inputs.groups, return_inverse=True)[1]
    longest = int(returns.lengths.max()) if len(returns) else 0
    place = groups[returns.row_ids] * longest + returns.positions
    size = len(inputs.groups) * longest

    def summed(values: Tensor) -> Tensor:
        return torch.zeros(size, dtype=values.dtype).index_add(0, place, values)[place]

    # Subtract the smallest return at t, so that equal returns have an advantage of exactly 0.
    start = torch.full((size,), torch.inf, dtype=returns.values.dtype)
    above = returns.values - start.scatter_reduce(0, place, returns.values, "amin")[place]
    baseline = summed(above * energy) / summed(energy).clamp(min=1e-8)
    alone = summed(torch.ones_like(energy)) == 1
    return TokenAdvantages(returns.like(torch.where(alone, returns.values, above - baseline)), returns)


def _prefix_sums(values: Ragged) -> Ragged:
    """Compute S_t = x_t + S_{t-1} in every row."""
    sums = values.values.cumsum(0)
    before = torch.cat([sums.new_zeros(1), sums])[values.offsets[:-1]]
    return values.like(sums - before[values.row_ids])


def suffix_sums(rewards: Ragged, decay: float) -> Ragged:
    """Compute S_t = x_t + decay S_{t+1} in every row."""
    sums, from_end = rewards.values, rewards.from_end
    longest, reach = int(rewards.lengths.max()) if len(rewards) else 0, 1
    # Every round doubles the number of terms. A cumulative sum of x_t decay^-t would overflow on long responses.
    while reach < longest:
        further = torch.where(from_end >= reach, sums.roll(-reach), torch.zeros_like(sums))
        sums, reach = sums + decay**reach * further, 2 * reach
    return rewards.like(sums)


# -- outcome estimators ------------------------------------------------------------------------------------------------


@built_in
def grpo(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> PerResponse:
    """Compute A_i = (r_i - mean of group) / (std of group + 1e-6)   (Shao et al. 2024, DeepSeekMath, section 4.1).

    The standard deviation is unbiased. With ``norm_adv_by_std_in_grpo=False`` A_i = r_i - mean of group (Liu et al.
    2025, Dr. GRPO).
    """
    groups = Groups(inputs.groups, inputs.rounding)
    return groups.over_std(inputs.scores) if cfg.norm_adv_by_std_in_grpo else groups.centred(inputs.scores)


@built_in
def rloo(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> PerResponse:
    """Compute A_i = r_i - mean of the other responses of the group   (Ahmadian et al. 2024, eq. 8)."""
    return Groups(inputs.groups, inputs.rounding).against_others(inputs.scores)


# verl uses these names for faster implementations of the same formulas.
ESTIMATORS |= {"grpo_vectorized": grpo, "rloo_vectorized": rloo}


@built_in
def opo(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> PerResponse:
    """Compute A_i = r_i - (sum_j length_j r_j) / (sum_j length_j) in the group   (Hao et al. 2025, OPO)."""
    groups = Groups(inputs.groups, inputs.rounding)
    lengths = inputs.lengths.to(inputs.scores.dtype)
    baseline = groups.sum(lengths * inputs.scores) / groups.sum(lengths).clamp(min=1) * ~groups.alone
    difference = inputs.scores - baseline
    # As in `Groups.centred`, differences within the rounding error count as 0. A weighted mean of equal scores may have
    # such an error. So may a mean in which only responses with equal scores have a weight above 0.
    none = groups.flat(inputs.scores) | (difference.abs() <= groups.rounding(inputs.scores))
    return torch.where(none, 0.0, difference)


@built_in
def maxrl(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> PerResponse:
    """Compute A_i = (r_i - mean of group) / mean of group   (Tajwar et al. 2026, MaxRL, 2602.02710).

    For rewards of 0 and 1 the mean is the pass rate, so hard prompts count more. In a group with a mean of 0 or less no
    response can be reinforced, and the advantage is 0.
    """
    groups = Groups(inputs.groups, inputs.rounding).several()
    mean = groups.sum(inputs.scores) / groups.size
    earns = mean > groups.rounding(inputs.scores)
    return torch.where(earns, groups.centred(inputs.scores) / torch.where(earns, mean, 1.0), 0.0)


@built_in
def lite_ppo(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> PerResponse:
    """Compute A_i = (r_i - mean of group) / (std of batch + 1e-6)   (Liu et al. 2025, Lite PPO, 2508.08221).

    The unbiased standard deviation is taken over all rewards of the batch, so that groups with a small spread are not
    amplified.
    """
    centred = Groups(inputs.groups, inputs.rounding).several().centred(inputs.scores)
    return centred / (inputs.scores.std() + STD_EPSILON)


@built_in
def grpo_passk(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> PerResponse:
    """Assign r_best - r_second to the best response of a group, 0 to the others   (Chen et al. 2025, pass@k training).

    The difference is divided by the standard deviation of the group + 1e-6 unless ``norm_adv_by_std_in_grpo=False``. If
    several responses tie for the best, all get 0.
    """
    groups = Groups(inputs.groups, inputs.rounding).several()
    best = groups.largest(inputs.scores)
    is_best = best - inputs.scores <= groups.rounding(inputs.scores)
    second = groups.largest(inputs.scores.masked_fill(is_best, -torch.inf))
    # If all responses tie, r_second is -inf and the difference is infinite. `where` replaces it, because a product of
    # infinity and 0 is NaN.
    lead = torch.where(is_best & (groups.sum(is_best.to(best.dtype)) == 1), best - second, torch.zeros_like(best))
    return lead / (groups.std(inputs.scores) + STD_EPSILON) if cfg.norm_adv_by_std_in_grpo else lead


@built_in
def gpg(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> PerResponse:
    """Compute A_i = alpha (r_i - mean of group), alpha = responses / responses with nonzero reward   (GPG as in verl).

    The paper counts responses in groups with a gradient instead (`gpg_paper`).
    """
    earning = int((inputs.scores.abs() > (0.0 if inputs.rounding is None else inputs.rounding)).sum())
    centred = Groups(inputs.groups, inputs.rounding).centred(inputs.scores)
    return centred * (len(inputs.scores) / max(earning, 1))


@built_in
def gpg_paper(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> PerResponse:
    """Compute A_i = alpha (r_i - mean of group)   (Chu et al. 2025, GPG).

    alpha is the number of responses divided by the number of responses in groups whose rewards differ.
    """
    groups = Groups(inputs.groups, inputs.rounding).several()
    useful = int((~groups.flat(inputs.scores)).sum())
    return groups.centred(inputs.scores) * (len(inputs.scores) / max(useful, 1))


@built_in
def reinforce_plus_plus_baseline(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> PerResponse:
    """Compute r_i - mean of group, whitened over all tokens of the batch   (Hu 2025, REINFORCE++-baseline)."""
    return whiten(Groups(inputs.groups, inputs.rounding).centred(inputs.scores), inputs.lengths)


@built_in
def gdpo(inputs: OutcomeInputs, cfg: AlgorithmConfig) -> PerResponse:
    """Compute the weighted sum of GRPO's advantages per reward term, whitened over tokens   (Liu et al. 2026, GDPO).

    The terms are ``gdpo_reward_keys``, weighted by ``gdpo_reward_weights`` (default: 1 each).
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
    """Compute A_it = R_it - mean over j != i of R_js, s = min(t, T_j), where R_it = sum_{k >= t} gamma^(k - t) r_ik.

    The return of a turn is compared with the returns of the group's other responses from the same turn on, or from
    their last turn T_j if they have fewer turns. Responses to a prompt are sampled independently, so this baseline b
    depends only on t and on other responses. Given the conversation h before turn t, which also determines that turn t
    exists, the policy's action is independent of b: E[b grad log pi(a_t | h)] = E[b] grad sum_a pi(a | h) = 0, for
    every turn of every response. So b does not bias the gradient, for any number of turns. Baselines that are means
    over the rewards of single turns would bias it: one more mean is subtracted for every following turn, and the policy
    chooses the number of turns. If only the last turn is rewarded and gamma is 1, this is `rloo`.
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
    """Compute A_it = A_i + omega A'_it: GRPO over a group, and over its turns in one state   (Feng et al. 2025, GiGPO).

    A_i compares the rewards of responses. A'_it compares R_it = sum_{k >= t} gamma^(k - t) r_ik with the returns of all
    turns in the group that have the same context (anchor states); it is 0 if a turn is the only one in its state. omega
    is ``gigpo.step_advantage_w``. With ``norm_adv_by_std_in_grpo=False`` neither is divided by a standard deviation. A
    response that returns to a state is compared with itself, which introduces a bias, as in the paper.
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
