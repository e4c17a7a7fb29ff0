import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.algorithms.advantages import ESTIMATORS, OutcomeInputs, TokenInputs
from rltrain.algorithms.normalisation import normalise, shaped_reward
from rltrain.common.columns.ragged import Ragged
from rltrain.config.schema import declarations
from rltrain.config.schema.algorithm import AdvNormConfig, AlgorithmConfig
from tests.algorithms import references as slow

settings.register_profile("quick", max_examples=60, deadline=None)
settings.load_profile("quick")
# Realistic scores: few values, so that groups tie, and some that are not exact in binary.
SCORES = st.sampled_from([0.0, 1.0, -1.0, 0.1, 0.3, 2.5])
TERMS = AlgorithmConfig(gdpo_reward_keys=["a", "b"], gdpo_reward_weights=[1.0, 0.5])
OUTCOME = {
    "grpo": lambda s, g, n, t: slow.grpo(s, g),
    "grpo_vectorized": lambda s, g, n, t: slow.grpo(s, g),
    "rloo": lambda s, g, n, t: slow.rloo(s, g),
    "rloo_vectorized": lambda s, g, n, t: slow.rloo(s, g),
    "opo": lambda s, g, n, t: slow.opo(s, g, n),
    "maxrl": lambda s, g, n, t: slow.maxrl(s, g),
    "lite_ppo": lambda s, g, n, t: slow.lite_ppo(s, g),
    "grpo_passk": lambda s, g, n, t: slow.grpo_passk(s, g),
    "gpg": lambda s, g, n, t: slow.gpg(s, g),
    "gpg_paper": lambda s, g, n, t: slow.gpg_paper(s, g),
    "reinforce_plus_plus_baseline": lambda s, g, n, t: slow.whiten_answers(slow.grpo(s, g, by_std=False), n),
    "gdpo": lambda s, g, n, t: slow.gdpo(t, [1.0, 0.5], g, n),
}


@st.composite
def answers(draw):
    """Draw (scores, groups, lengths, two terms). Groups have at least two members in any order; lengths may be 0."""
    sizes = draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    groups = draw(st.permutations([group * 7 for group, size in enumerate(sizes) for _ in range(size)]))
    column = st.lists(SCORES, min_size=len(groups), max_size=len(groups))
    lengths = draw(st.lists(st.integers(0, 6), min_size=len(groups), max_size=len(groups)))
    return draw(column), groups, lengths, (draw(column), draw(column))


def inputs_of(scores, groups, lengths, terms=()):
    columns = {name: torch.tensor(term, dtype=torch.float64) for name, term in zip("ab", terms, strict=False)}
    return OutcomeInputs(
        torch.tensor(scores, dtype=torch.float64), torch.tensor(groups), torch.tensor(lengths), columns
    )


def estimate(name, *arguments, cfg=TERMS):
    return ESTIMATORS[name](inputs_of(*arguments), cfg).tolist()


def test_every_estimator_is_declared_and_has_a_formula():
    assert set(declarations.ESTIMATORS) == set(ESTIMATORS)
    assert {
        name for name, traits in declarations.ESTIMATORS.items() if not (traits.per_token or traits.per_turn)
    } == set(OUTCOME)


@pytest.mark.parametrize("name", OUTCOME)
@given(batch=answers())
def test_an_outcome_estimator_equals_its_loop(name, batch):
    assert estimate(name, *batch) == pytest.approx(OUTCOME[name](*batch), abs=1e-6, rel=1e-6)
    if name in ("grpo", "grpo_passk"):
        cfg = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
        expected = getattr(slow, name)(*batch[:2], by_std=False)
        assert estimate(name, *batch, cfg=cfg) == pytest.approx(expected, abs=1e-9)


# By verl's formulas: a mean of 0, a deviation of 1 (grpo), no baseline (rloo, opo); gpg: times 4 responses / 3 with a
# reward. The tokens of all responses, 1 0 0 -2 .5 .5, have a mean of 0 and a variance of 5.5 / 5.
@pytest.mark.parametrize(
    ("name", "factor"),
    [
        *(("grpo", 1), ("grpo_vectorized", 1), ("rloo", 1), ("opo", 1), ("gpg", 4 / 3)),
        *(("reinforce_plus_plus_baseline", 1.1**-0.5), ("gdpo", 1.1**-0.5)),
    ],
)
def test_an_answer_alone_has_its_score_for_an_advantage(name, factor):
    scores = [1.0, 0.0, -2.0, 0.5]
    advantages = estimate(name, scores, [0, 3, 1, 2], [1, 2, 1, 2], (scores, [0.0] * 4))
    assert advantages == pytest.approx([factor * score for score in scores], abs=1e-5)
    assert advantages[1] == 0.0


def test_estimators_that_need_a_second_answer_say_so():
    """Both estimators need other responses: the lead over the second best, and counts of mixed groups. With one
    response, verl's vectorized RLOO returns 0, so a run would learn nothing."""
    for name in ("grpo_passk", "gpg_paper", "maxrl", "lite_ppo"):
        with pytest.raises(ValueError, match="one response"):
            estimate(name, [1.0, 0.0, 1.0], [0, 0, 1], [1, 1, 1])
    alone = {name for name, traits in declarations.ESTIMATORS.items() if traits.compares and not traits.takes_one}
    # A run with one response per prompt is also refused for estimators over turns, which verl lacks.
    assert alone == {"grpo_passk", "gpg_paper", "maxrl", "lite_ppo", "rloo_vectorized", "turn_rloo", "gigpo"}


@pytest.mark.parametrize("name", OUTCOME)
def test_the_order_in_which_a_score_is_added_up_is_no_advantage(name):
    """In floating point 0.1 + 0.2 is not 0.3, and Adam would follow even a spread of 6e-17 divided by 1e-6."""
    scores = [0.1 + 0.2, 0.3, 0.3, 0.3]
    assert estimate(name, scores, [0] * 4, [3, 1, 2, 2], (scores, scores)) == [0.0] * 4


@given(score=st.floats(0.01, 100), length=st.integers(1, 1000))
def test_a_response_that_alone_weighs_in_its_group_has_exactly_no_advantage_with_opo(score, length):
    """A rounding error of 1e-17 would include masked responses in the update and in its metrics."""
    assert estimate("opo", [score, 2 * score, 0.0], [0, 0, 0], [length, 0, 0])[0] == 0.0


@pytest.mark.parametrize("name", [name for name in OUTCOME if name != "gdpo"])  # reward terms do not include the KL
def test_what_a_reward_may_be_off_is_no_advantage_and_more_is_one(name):
    def advantages(off):
        scores = torch.tensor([1 - 1e-9, 1.0, 1 + off, 1.0, 1.0, 0.0], dtype=torch.float64)
        groups, lengths = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([3, 1, 2, 2, 2, 2])
        rounding = torch.tensor([1e-9, 1e-9, 3e-9, 1e-9, 0, 0], dtype=torch.float64)
        return ESTIMATORS[name](OutcomeInputs(scores, groups, lengths, rounding=rounding), TERMS)

    # A whitened estimator subtracts the mean of the batch, which is 0 here.
    assert advantages(1e-9)[:4].abs().max() < 1e-15
    assert advantages(1e-8)[:4].abs().max() > 1e-9
    assert advantages(1e-9)[4] > 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [math.sqrt(3) / 2, -math.sqrt(3) / 2, -math.sqrt(3) / 2, math.sqrt(3) / 2, 0, 0]),
        ("rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0, 0]),
        ("opo", [0.7, -0.3, -0.3, 0.7, 0, 0]),  # baseline (1 + 2) / 10
        ("gpg", [0.75, -0.75, -0.75, 0.75, 0, 0]),  # half, times 6 responses / 4 with a reward
        ("gpg_paper", [0.75, -0.75, -0.75, 0.75, 0, 0]),  # half, times 6 responses / 4 in a mixed group
        ("grpo_passk", [0.0] * 6),  # two responses share the best score
        ("maxrl", [1, -1, -1, 1, 0, 0]),  # the mean is a half
        ("lite_ppo", [a / math.sqrt(28 / 5) for a in (0.5, -0.5, -0.5, 0.5, 0, 0)]),  # all rewards: mean 2, squares 28
    ],
)
def test_outcome_estimators_by_hand(name, expected):
    scores, groups, lengths = [1.0, 0.0, 0.0, 1.0, 5.0, 5.0], [7, 7, 7, 7, 3, 3], [1, 3, 4, 2, 1, 1]
    assert estimate(name, scores, groups, lengths) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("mean_level", [None, "batch", "group"])
@pytest.mark.parametrize("std_level", [None, "batch", "group"])
@given(batch=answers())
def test_normalised_advantages_equal_their_loop_over_tokens(mean_level, std_level, batch):
    values, groups, lengths, _ = batch
    found = normalise(
        torch.tensor(values, dtype=torch.float64), torch.tensor(groups), torch.tensor(lengths),
        AdvNormConfig(mean_level, std_level),
    )  # fmt: skip
    expected = slow.normalise(values, groups, lengths, mean_level, std_level)
    # Values of a response without tokens have no effect.
    pairs = [(a, b) for a, b, length in zip(found.tolist(), expected, lengths, strict=True) if length]
    assert [a for a, _ in pairs] == pytest.approx([b for _, b in pairs], abs=1e-6, rel=1e-6)


def test_a_reward_is_moved_before_it_is_scaled():
    cfg = AlgorithmConfig(reward_scaling=10.0, reward_bias=-0.5)
    assert shaped_reward(torch.tensor([0.0, 1.0]), cfg).tolist() == [-5.0, 5.0]


# -- token estimators --------------------------------------------------------------------------------------------------


@st.composite
def token_rows(draw):
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    number = st.floats(-3, 3, allow_subnormal=False)
    rows = [draw(st.lists(number, min_size=n, max_size=n)) for n in lengths]
    return rows, [draw(st.lists(number, min_size=n, max_size=n)) for n in lengths]


def ragged(rows):
    return Ragged.from_rows([torch.tensor(row, dtype=torch.float64) for row in rows])


def flat(rows):
    return pytest.approx([value for row in rows for value in row], abs=1e-8)


@given(token_rows(), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_its_loop(rows, gamma, lam):
    rewards, values = rows
    estimated = ESTIMATORS["gae"](TokenInputs(ragged(rewards), ragged(values)), AlgorithmConfig(gamma=gamma, lam=lam))
    expected = slow.gae(rewards, values, gamma, lam)
    assert estimated.advantages.values.tolist() == flat(expected)
    assert estimated.returns.values.tolist() == flat(
        [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(expected, values, strict=True)]
    )


@given(token_rows(), st.floats(0, 1))
def test_reinforce_plus_plus_equals_its_loop(rows, gamma):
    estimated = ESTIMATORS["reinforce_plus_plus"](TokenInputs(ragged(rows[0])), AlgorithmConfig(gamma=gamma))
    assert estimated.advantages.values.tolist() == flat(slow.returns(rows[0], gamma))


@given(token_rows(), st.randoms(use_true_random=False))
def test_remax_equals_its_loop(rows, random):
    baselines = [random.uniform(-1, 1) for _ in rows[0]]
    inputs = TokenInputs(ragged(rows[0]), baselines=torch.tensor(baselines, dtype=torch.float64))
    estimated = ESTIMATORS["remax"](inputs, AlgorithmConfig(gamma=0.5))
    expected = [[g - b for g in row] for row, b in zip(slow.returns(rows[0], 1.0), baselines, strict=True)]
    assert estimated.advantages.values.tolist() == flat(expected)


@given(token_rows(), st.randoms(use_true_random=False))
def test_optimal_token_baseline_equals_its_loop(rows, random):
    rewards = rows[0]
    groups = [random.randint(5, 7) for _ in rewards]
    log_probs = [[random.uniform(-3, -0.1) for _ in row] for row in rewards]
    squares = [[math.exp(2 * p) + random.uniform(0, 0.3) for p in row] for row in log_probs]
    weights = [[random.uniform(0.5, 2) for _ in row] for row in rewards]
    inputs = TokenInputs(
        ragged(rewards), None, None, torch.tensor(groups), ragged(log_probs), ragged(squares), ragged(weights)
    )
    estimated = ESTIMATORS["optimal_token_baseline"](inputs, AlgorithmConfig())
    expected = slow.optimal_token_baseline(rewards, groups, log_probs, squares, weights)
    assert estimated.advantages.values.tolist() == flat(expected)
    assert estimated.returns.values.tolist() == flat(slow.returns(rewards, 1.0))


def test_gae_by_hand():
    # delta = [1 - 2, 1/2 * 0 + 4 - 1] with gamma 1/2: delta_0 = 0 + 1/2 * 1 - 2 = -3/2, delta_1 = 4 - 1 = 3.
    estimated = ESTIMATORS["gae"](
        TokenInputs(ragged([[0.0, 4.0]]), ragged([[2.0, 1.0]])), AlgorithmConfig(gamma=0.5, lam=0.5)
    )
    assert estimated.advantages.values.tolist() == [-1.5 + 0.25 * 3, 3.0]
    assert estimated.returns.values.tolist() == [-1.5 + 0.25 * 3 + 2, 4.0]
