"""Estimators over turns: by hand, against loops, and the expected gradient if the policy chooses whether to
continue."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.algorithms.advantages import ESTIMATORS, TurnInputs
from rltrain.common.columns.ragged import Ragged
from rltrain.config.schema.algorithm import AlgorithmConfig, GiGPOConfig
from tests.algorithms import references as slow

WITHOUT_STD = {"norm_adv_by_std_in_grpo": False}


def inputs_of(rewards, groups, states=None):
    columns = [[torch.tensor(row, dtype=torch.float64) for row in rewards]]
    columns.append([torch.tensor(row) for row in states or [list(range(len(row))) for row in rewards]])
    return TurnInputs(*map(Ragged.from_rows, columns), torch.tensor(groups))


def estimate(name, rewards, groups, states=None, **keys):
    found = ESTIMATORS[name](inputs_of(rewards, groups, states), AlgorithmConfig(**keys))
    return [row.tolist() for row in found.rows()]


def flat(rows):
    return list(itertools.chain(*rows))


@st.composite
def trajectories(draw):
    """Draw (rewards, groups, states): groups of at least two in any order, with one to four turns each."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    groups = draw(st.permutations([group * 5 for group, size in enumerate(sizes) for _ in range(size)]))
    turns = [draw(st.integers(1, 4)) for _ in groups]
    reward, state = st.sampled_from([0.0, 1.0, -1.0, 0.1, 2.5]), st.sampled_from([3, -9])
    rewards = [draw(st.lists(reward, min_size=count, max_size=count)) for count in turns]
    told = [[0, *draw(st.lists(state, min_size=count - 1, max_size=count - 1))] for count in turns]
    return rewards, groups, told


def test_turn_rloo_by_hand():
    # Returns: 1 | 1 2 | 6 4 8.
    advantages = estimate("turn_rloo", [[1.0], [0.0, 2.0], [4.0, 0.0, 8.0]], [5, 5, 5], gamma=0.5)
    assert advantages == [pytest.approx(row) for row in ([-2.5], [-2.5, -0.5], [5.0, 2.5, 6.5])]


def test_gigpo_by_hand():
    """Returns 1 1 | 3 2 2: response 1 is compared with 3, turn 1 with 3, and the turns 1, 2 and 2 with each other. A
    second group with equal states is not involved."""
    rewards, states = [[0.0, 1.0], [1.0, 0.0, 2.0]], [[0, 7], [0, 7, 7]]
    wanted = [[-1.5, -4 / 3], [1.5, 7 / 6, 7 / 6]]
    keys = {"gigpo": GiGPOConfig(0.5), **WITHOUT_STD}
    advantages = estimate("gigpo", [*rewards, [9.0], [9.0]], [0, 0, 1, 1], [*states, [0], [0]], **keys)
    assert advantages[:2] == [pytest.approx(row) for row in wanted]
    assert advantages[2:] == [[0.0], [0.0]]
    by_std = estimate("gigpo", rewards, [0, 0], states)
    assert by_std[0] == pytest.approx([-(2**0.5), -(0.5**0.5) - (2 / 3) * 3**0.5], abs=1e-5)


@given(batch=trajectories(), gamma=st.sampled_from([1.0, 0.7, 0.0]))
def test_turn_rloo_equals_its_loop(batch, gamma):
    rewards, groups, states = batch
    wanted = slow.turn_rloo(rewards, groups, gamma)
    found = estimate("turn_rloo", rewards, groups, states, gamma=gamma)
    assert flat(found) == pytest.approx(flat(wanted))


@given(batch=trajectories(), gamma=st.sampled_from([1.0, 0.7]), by_std=st.booleans())
def test_gigpo_equals_its_loop(batch, gamma, by_std):
    keys = {"gamma": gamma, "norm_adv_by_std_in_grpo": by_std, "gigpo": GiGPOConfig(0.5)}
    wanted = slow.gigpo(*batch, gamma, 0.5, by_std)
    assert flat(estimate("gigpo", *batch, **keys)) == pytest.approx(flat(wanted), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", ["turn_rloo", "gigpo"])
def test_turns_that_are_paid_alike_have_exactly_no_advantage(name):
    rewards, groups = [[0.1, 0.2], [0.1, 0.2], [0.1, 0.2], [1.0], [0.0]], [0, 0, 0, 1, 1]
    advantages = estimate(name, rewards, groups, [[0, 4], [0, 4], [0, 4], [0], [0]])
    assert advantages[:3] == [[0.0, 0.0]] * 3
    assert advantages[3][0] > 0
