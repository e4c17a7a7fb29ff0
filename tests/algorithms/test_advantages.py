import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.algorithms.advantages import ADVANTAGE_ESTIMATORS, OutcomeInputs, grpo


def by_loop(scores: list[float], groups: list[int], norm_by_std: bool) -> list[float]:
    advantages = []
    for score, group in zip(scores, groups, strict=True):
        mine = [s for s, g in zip(scores, groups, strict=True) if g == group]
        mean = sum(mine) / len(mine)
        deviation = (sum((s - mean) ** 2 for s in mine) / max(len(mine) - 1, 1)) ** 0.5
        advantages.append((score - mean) / (deviation + 1e-6) if norm_by_std else score - mean)
    return advantages


def test_grpo_by_hand():
    inputs = OutcomeInputs(
        torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0, 5.0], dtype=torch.float64), torch.tensor([7, 7, 7, 7, 3, 3])
    )
    # group 7: mean 1/2, unbiased variance 4 * 1/4 / 3 = 1/3, so (1/2) * sqrt(3); group 3 has no spread.
    expected = torch.tensor([3**0.5 / 2, -(3**0.5) / 2, -(3**0.5) / 2, 3**0.5 / 2, 0, 0], dtype=torch.float64)
    assert torch.allclose(grpo(inputs, True), expected, atol=1e-5)
    assert grpo(inputs, False).tolist() == [0.5, -0.5, -0.5, 0.5, 0.0, 0.0]


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 3)), min_size=1, max_size=12), st.booleans())
def test_grpo_equals_a_loop(pairs, norm_by_std):
    scores, groups = [p[0] for p in pairs], [p[1] for p in pairs]
    found = grpo(OutcomeInputs(torch.tensor(scores, dtype=torch.float64), torch.tensor(groups)), norm_by_std)
    assert found.tolist() == pytest.approx(by_loop(scores, groups, norm_by_std), abs=1e-6, rel=1e-6)


def test_estimators_are_found_by_their_config_name():
    assert ADVANTAGE_ESTIMATORS["grpo"] is grpo
