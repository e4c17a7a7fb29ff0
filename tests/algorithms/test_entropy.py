"""The selection of high-entropy tokens, and the coefficient of an entropy bonus."""

import math

import pytest
import torch

from rltrain.algorithms.entropy import adapted_entropy_coef, certainty, entropy_weight
from rltrain.config.schema import AdaptiveEntropyConfig

CFG = AdaptiveEntropyConfig(target_entropy=0.2, delta_ent_coef=0.1, max_ent_coef=0.25)


def test_the_least_certain_tokens_come_first_and_masked_ones_never():
    found = certainty(torch.tensor([0.5, 2.0, 0.0, 3.0]), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert found.tolist() == [-0.5, -2.0, 0.0, math.inf]


@pytest.mark.parametrize(
    ("entropy", "weight", "then"),
    # Below the target, at it, above it; near its bounds; NaN.
    [(0.1, 0.1, 0.2), (0.2, 0.1, 0.1), (0.3, 0.0, 0.0), (math.nan, 0.0, 0.1)],
)
def test_the_weight_of_the_bonus_by_hand(entropy, weight, then):
    assert entropy_weight(0.1, entropy, CFG) == weight
    assert adapted_entropy_coef(0.1, entropy, CFG) == pytest.approx(then)


def test_the_weight_stays_within_its_bounds():
    coefs = [0.0]
    for entropy in [0.1] * 4 + [0.9] * 4:
        coefs.append(adapted_entropy_coef(coefs[-1], entropy, CFG))
    assert coefs == pytest.approx([0.0, 0.1, 0.2, 0.25, 0.25, 0.15, 0.05, 0.0, 0.0])
