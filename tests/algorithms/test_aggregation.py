from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.algorithms.aggregation import AGGREGATION_MODES, Denominators, token_weights
from rltrain.algorithms.losses import actor_loss, aggregate, value_loss
from rltrain.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from rltrain.common.columns.ragged import Ragged
from rltrain.config.schema import ActorConfig
from rltrain.config.schema.model import Aggregation
from tests.algorithms import references as slow

settings.register_profile("quick", max_examples=60, deadline=None)
settings.load_profile("quick")


@st.composite
def losses_and_masks(draw):
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    losses = [draw(st.lists(st.floats(-2, 2), min_size=n, max_size=n)) for n in lengths]
    masks = [draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n)) for n in lengths]
    return losses, masks


def counts(masks) -> Denominators:
    return Denominators(int(sum(map(sum, masks))), sum(sum(mask) > 0 for mask in masks), 7)


def ragged(rows):
    return Ragged.from_rows([torch.tensor(row, dtype=torch.float64) for row in rows])


def ones(lengths) -> Ragged:
    return Ragged(torch.ones(sum(lengths)), torch.tensor(lengths))


def test_the_names_in_the_config_are_the_implemented_ones():
    assert set(get_args(Aggregation)) == set(AGGREGATION_MODES)
    with pytest.raises(ValueError, match="unknown aggregation mode"):
        token_weights("mean", ones([1]), Denominators(1, 1, 1))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@given(batch=losses_and_masks(), cut=st.integers(0, 6))
def test_an_aggregation_equals_its_loop_for_any_cut(mode, batch, cut):
    losses, masks = batch
    total = sum(
        float(aggregate(ragged(rows).values, token_weights(mode, ragged(part), counts(masks))))
        for rows, part in ((losses[:cut], masks[:cut]), (losses[cut:], masks[cut:]))
        if rows
    )
    assert total == pytest.approx(slow.aggregate(mode, losses, masks, 7), abs=1e-9)


def test_weights_entropy_and_kl_enter_with_their_signs():
    cfg = ActorConfig(kl_loss_coef=0.5, use_kl_loss=True)
    inputs = PolicyLossInputs(torch.zeros(2), torch.zeros(2), torch.ones(2), ones([2]))
    more = {"weights": torch.tensor([1.0, 3.0]), "entropy": torch.full((2,), 3.0), "kl": torch.full((2,), 1.0)}
    vanilla = POLICY_LOSSES["vanilla"].function
    share = actor_loss(inputs, Denominators(2, 1, 4), cfg, vanilla, "token-mean", entropy_coeff=0.1, **more)
    assert float(share.shares["pg_loss"]) == pytest.approx(-2.0)
    assert float(share.loss) == pytest.approx(-2.0 - 0.1 * 3.0 + 0.5 * 1.0)


@given(st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=8), st.floats(0.01, 2))
def test_the_value_loss_equals_its_loop(tokens, width):
    values, old, returned = zip(*tokens, strict=True)
    losses, _ = value_loss(*(torch.tensor(column, dtype=torch.float64) for column in (values, old, returned)), width)
    assert losses.tolist() == pytest.approx(slow.value_loss(values, old, returned, width), abs=1e-9)


def test_the_value_loss_by_hand():
    # V = 2, V_old = 0, clip 1/2: the clipped value 1/2 is further from the return 3 than V itself.
    losses, statistics = value_loss(torch.tensor([2.0, 2.0]), torch.tensor([0.0, 1.9]), torch.tensor([3.0, 3.0]), 0.5)
    assert losses.tolist() == [2.5**2 / 2, 0.5]
    assert statistics["vf_clipfrac"].tolist() == [1.0, 0.0]
