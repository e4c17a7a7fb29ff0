import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.algorithms.kl import KL_ESTIMATORS, adapted_kl_coef, kl_per_token
from rltrain.config.schema.algorithm import KLControlConfig, KLKind
from tests.algorithms import references as slow

settings.register_profile("quick", max_examples=60, deadline=None)
settings.load_profile("quick")
KINDS = [kind for kind in get_args(KLKind) if kind != "full"]


def test_the_names_in_the_config_are_the_implemented_ones():
    assert {kind.rstrip("+") for kind in KINDS} == set(KL_ESTIMATORS)


@pytest.mark.parametrize("kind", KINDS)
@given(deltas=st.lists(st.floats(-40, 40), min_size=1, max_size=8))
def test_an_estimate_equals_its_formula(kind, deltas):
    kl = kl_per_token(torch.tensor(deltas, dtype=torch.float64), torch.zeros(len(deltas), dtype=torch.float64), kind)
    assert kl.tolist() == pytest.approx([slow.kl_value(kind, delta) for delta in deltas], abs=1e-9, rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "value"), [("kl", 0.5), ("abs", 0.5), ("mse", 0.125), ("low_var_kl", math.exp(-0.5) - 1 + 0.5)]
)
def test_estimates_by_hand(kind, value):
    assert float(kl_per_token(torch.tensor([-1.0]), torch.tensor([-1.5]), kind)) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("+")])
def test_a_plus_has_the_gradient_of_k2(kind):
    log_probs = torch.tensor([-1.0, -2.0, -0.3], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -0.2], dtype=torch.float64)
    kl_per_token(log_probs, reference, kind).sum().backward()
    assert torch.allclose(log_probs.grad, (log_probs - reference).detach())


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
def test_the_gradient_is_that_of_finite_differences(kind):
    log_probs = torch.tensor([-1.0, -2.0, -0.3], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -0.2], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_per_token(x, reference, kind), (log_probs,))


@pytest.mark.parametrize("kind", ["k2", "k3", "k1+", "k3+", "abs+", "full"])
def test_a_step_on_the_kl_loss_lowers_the_kl(kind):
    torch.manual_seed(0)
    logits, reference = torch.randn(8, dtype=torch.float64, requires_grad=True), torch.randn(8, dtype=torch.float64)

    def exact() -> torch.Tensor:
        log_pi, log_ref = torch.log_softmax(logits, -1), torch.log_softmax(reference, -1)
        return (log_pi.exp() * (log_pi - log_ref)).sum()

    before = float(exact().detach())
    if kind == "full":
        exact().backward()
    else:
        log_pi, log_ref = torch.log_softmax(logits, -1), torch.log_softmax(reference, -1)
        # Expectation over pi of the per-token estimate, differentiated as in training: through the log-prob only.
        (log_pi.exp().detach() * kl_per_token(log_pi, log_ref, kind)).sum().backward()
    with torch.no_grad():
        logits -= 0.05 * logits.grad
    assert float(exact().detach()) < before


def test_the_expected_gradient_of_k1_is_nothing():
    """Why k1 alone is no KL loss, and k1+ is."""
    logits = torch.randn(8, dtype=torch.float64, requires_grad=True)
    log_pi = torch.log_softmax(logits, -1)
    (log_pi.exp().detach() * kl_per_token(log_pi, torch.randn(8, dtype=torch.float64), "k1")).sum().backward()
    assert float(logits.grad.abs().max()) < 1e-12


@pytest.mark.parametrize(("kl", "error"), [(0.1, 0.0), (10.0, 0.2), (0.0, -0.2), (0.11, 0.1)])
def test_the_adaptive_weight_follows_the_kl(kl, error):
    cfg = KLControlConfig(type="adaptive", target_kl=0.1, horizon=1000)
    assert adapted_kl_coef(0.5, kl, 64, cfg) == pytest.approx(0.5 * (1 + error * 64 / 1000), rel=1e-6)
    assert adapted_kl_coef(0.5, kl, 64, KLControlConfig()) == 0.5
