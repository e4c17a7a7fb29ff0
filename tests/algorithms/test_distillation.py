"""Distillation by hand: the teacher's log-probs as a separate loss, or as a cost of the sampled token."""

from dataclasses import replace

import pytest
import torch

from rltrain.algorithms.aggregation import Denominators
from rltrain.algorithms.distillation import TeacherLoss
from rltrain.algorithms.losses import actor_loss
from rltrain.algorithms.policy_losses import PolicyLossInputs, find_policy_loss
from rltrain.common.columns.ragged import Ragged
from rltrain.config.schema import ActorConfig
from rltrain.config.schema.distillation import DistillationLossConfig

OURS, TEACHERS = [-1.0, -0.5, -4.0], [-0.5, -2.0, -1.0]


def loss(divergence=None, advantages=(1.0, -1.0, 0.0), mask=(1.0, 1.0, 1.0), weights=None, **settings):
    """Return (share, gradient with respect to the log-probs) of a response of three tokens, whose old log-probs are the
    current ones."""
    log_probs = torch.tensor(OURS, requires_grad=True)
    inputs = PolicyLossInputs(
        log_probs, torch.tensor(OURS), torch.tensor(advantages), Ragged(torch.tensor(mask), torch.tensor([3]))
    )
    teacher = TeacherLoss(DistillationLossConfig(**settings), torch.tensor(TEACHERS), divergence)
    share = actor_loss(
        inputs, Denominators(int(sum(mask)), 1, 3), ActorConfig(), find_policy_loss("vanilla").function, "token-mean",
        weights=weights, teacher=teacher,
    )  # fmt: skip
    share.loss.backward()
    return replace(share, loss=share.loss.detach()), log_probs.grad


def test_alone_it_is_all_that_is_learnt_from():
    share, gradient = loss(loss_mode="k2", use_task_rewards=False)
    assert share.shares.keys() == {"distillation/loss"}
    assert float(share.loss) == pytest.approx((0.5**2 + 1.5**2 + 3.0**2) / 2 / 3)
    assert gradient.tolist() == pytest.approx([-0.5 / 3, 1.5 / 3, -3.0 / 3])
    assert float(share.token_sums["distillation/kl"]) == pytest.approx(sum(OURS) - sum(TEACHERS))


def test_beside_a_reward_it_has_a_weight():
    share, gradient = loss(loss_mode="k2", distillation_loss_coef=0.1)
    assert float(share.loss) == pytest.approx(float(share.shares["pg_loss"] + 0.1 * share.shares["distillation/loss"]))
    assert gradient.tolist() == pytest.approx([(-1 - 0.05) / 3, (1 + 0.15) / 3, -0.3 / 3])


def test_as_a_cost_it_is_the_advantage_of_the_token():
    share, gradient = loss(loss_mode="k1", use_policy_gradient=True, use_task_rewards=False)
    gradient = gradient.tolist()
    assert gradient == pytest.approx([(o - t) / 3 for o, t in zip(OURS, TEACHERS, strict=True)])
    assert float(share.loss) == pytest.approx((sum(OURS) - sum(TEACHERS)) / 3)
    # Importance weights are those of a policy loss.
    weighed = loss(loss_mode="k1", use_policy_gradient=True, use_task_rewards=False, weights=torch.tensor([2.0, 1, 1]))
    assert weighed[1].tolist() == pytest.approx([2 * gradient[0], *gradient[1:]])
    plain, weighed = (loss(loss_mode="k2", use_task_rewards=False, weights=w)[1] for w in (None, torch.full((3,), 2.0)))
    assert torch.equal(plain, weighed)


def test_limits_hold_distances_and_log_probs():
    share, gradient = loss(loss_mode="k2", use_task_rewards=False, loss_max_clamp=2.0)
    assert float(share.loss) == pytest.approx((0.125 + 1.125 + 2.0) / 3)
    assert gradient[2] == 0
    share, gradient = loss(loss_mode="k2", use_task_rewards=False, log_prob_min_clamp=-1.5)
    assert float(share.loss) == pytest.approx((0.125 + 0.5 + 0.125) / 3)
    assert gradient[2] == 0
    assert float(share.token_sums["distillation/kl"]) == pytest.approx(sum(OURS) - sum(TEACHERS))


def test_an_exact_distance_is_differentiated_itself():
    distance = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    share, _ = loss(distance, loss_mode="reverse_kl", distillation_loss_coef=2.0, mask=(1.0, 0.0, 1.0))
    assert distance.grad.tolist() == [1.0, 0.0, 1.0]
    assert float(share.token_sums["distillation/kl"]) == 4.0
    # Another divergence must not be called a KL of the policy.
    assert "distillation/kl" not in loss(distance.detach().requires_grad_(), loss_mode="jsd")[0].token_sums
