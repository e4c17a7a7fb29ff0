"""Joined moments of parts are the moments of the whole."""

import pytest
import torch

from rltrain.algorithms.moments import Moments, join

VALUES = torch.tensor([3.0, -1.0, 4.0, 1.0, -5.0, 9.0])


@pytest.mark.parametrize("cuts", [[6], [1, 5], [2, 0, 4], [3, 3]])
def test_parts_join_to_the_moments_of_the_whole(cuts):
    parts = [{"gap": Moments.of(part)} for part in VALUES.split(cuts)]
    assert join(parts)["gap"] == Moments(6.0, 11.0, 133.0, 9.0, -5.0)


def test_a_part_may_lack_a_quantity():
    joined = join([{"gap": Moments.of(VALUES[:2])}, {"kl": Moments.of(VALUES[2:])}, {"gap": Moments.of(VALUES[2:])}])
    assert joined["gap"] == Moments.of(VALUES)
    assert joined["kl"].mean == pytest.approx(float(VALUES[2:].mean()))
    shift, scale = joined["gap"].whitening()
    white = (VALUES - shift) * scale
    assert (float(white.mean()), float(white.var())) == pytest.approx((0, 1), abs=1e-6)
