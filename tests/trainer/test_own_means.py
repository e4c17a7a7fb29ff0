"""Losses with their own default mean, in complete steps: the mean that is used unless loss_agg_mode is set."""

import pytest
import torch

from rltrain.algorithms.aggregation import Denominators
from rltrain.algorithms.losses import actor_loss
from rltrain.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from rltrain.common.columns.ragged import Ragged
from rltrain.config.schema import ActorConfig
from tests.trainer.steps import ACTOR, LOSS, actor_weights, numbers_of


@pytest.mark.parametrize("loss", ["gspo", "sapo", "geo_mean"])
def test_a_step_takes_the_mean_of_its_loss(make, loss):
    modes = {"unset": {}, "own": "seq-mean-token-mean", "other": "token-mean"}
    found = {}
    for name, mode in modes.items():
        keys = {ACTOR + "loss_agg_mode": mode} if mode else {}
        # Without a KL or an entropy, which have the usual mean either way.
        trainer = make(**{LOSS: loss, ACTOR + "use_kl_loss": False, ACTOR + "entropy_coeff": 0}, **keys)
        found[name] = numbers_of(trainer.step(1).metrics), actor_weights(trainer)
    assert found["unset"][0] == found["own"][0]
    assert torch.equal(found["unset"][1], found["own"][1])
    assert not torch.equal(found["unset"][1], found["other"][1])


def test_gmpo_weighs_an_answer_by_the_geometric_mean():
    mask = Ragged(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([3, 1]))
    inputs = PolicyLossInputs(torch.zeros(4), torch.zeros(4), torch.ones(4), mask)
    weights = torch.tensor([1.0, 4.0, 9.0, 3.0])
    found = {
        name: actor_loss(
            inputs, Denominators(3, 2, 8), ActorConfig(), POLICY_LOSSES[name].function, "seq-mean-token-mean",
            weights=weights,
        )
        for name in ("geo_mean", "gspo")
    }  # fmt: skip
    # Of the first answer two tokens count: sqrt(1 x 4), or (1 + 4) / 2 where every token has a loss of its own.
    assert float(found["geo_mean"].shares["pg_loss"]) == pytest.approx(-(2 + 3) / 2)
    assert float(found["gspo"].shares["pg_loss"]) == pytest.approx(-(2.5 + 3) / 2)


def test_entropy_and_kl_keep_the_token_mean_beside_it():
    # Two answers of 1 and 3 tokens: means over answers differ from means over tokens.
    mask = Ragged(torch.ones(4), torch.tensor([1, 3]))
    inputs = PolicyLossInputs(torch.zeros(4), torch.zeros(4), torch.tensor([4.0, 0.0, 0.0, 0.0]), mask)
    kl = torch.tensor([4.0, 0.0, 0.0, 0.0])
    cfg, function = ActorConfig(kl_loss_coef=1.0), POLICY_LOSSES["gspo"].function
    found = actor_loss(inputs, Denominators(4, 2, 8), cfg, function, "seq-mean-token-mean", kl=kl)
    assert (float(found.shares["pg_loss"]), float(found.shares["kl_loss"])) == (-2.0, 1.0)
    cfg.loss_agg_mode = "seq-mean-token-mean"
    found = actor_loss(inputs, Denominators(4, 2, 8), cfg, function, "seq-mean-token-mean", kl=kl)
    assert (float(found.shares["pg_loss"]), float(found.shares["kl_loss"])) == (-2.0, 2.0)
