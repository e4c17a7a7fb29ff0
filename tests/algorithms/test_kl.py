from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from rltrain.algorithms.kl import KL_ESTIMATORS, adapted_kl_coef, kl_per_token
from rltrain.config.schema.algorithm import KLControlConfig, KLKind
from tests.algorithms import references as slow

settings.register_profile("quick", max_examples=60, deadline=None)
settings.load_profile("quick")
KINDS = [kind for kind in get_args(KLKind) if kind != "full"]


def test_tests_check_the_shapes_and_dtypes_that_signatures_state():
    with pytest.raises(TypeCheckError, match="ref_log_probs"):
        kl_per_token(torch.zeros(3), torch.zeros(4), "k1")
    with pytest.raises(TypeCheckError, match="log_probs"):
        kl_per_token(torch.zeros(3, dtype=torch.long), torch.zeros(3), "k1")


def test_the_names_in_the_config_are_the_implemented_ones():
    assert {kind.rstrip("+") for kind in KINDS} == set(KL_ESTIMATORS)


@pytest.mark.parametrize("kind", KINDS)
@given(deltas=st.lists(st.floats(-40, 40), min_size=1, max_size=8))
def test_an_estimate_equals_its_formula(kind, deltas):
    kl = kl_per_token(torch.tensor(deltas, dtype=torch.float64), torch.zeros(len(deltas), dtype=torch.float64), kind)
    assert kl.tolist() == pytest.approx([slow.kl_value(kind, delta) for delta in deltas], abs=1e-9, rel=1e-9)


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


@pytest.mark.parametrize(("kl", "error"), [(0.1, 0.0), (10.0, 0.2), (0.0, -0.2), (0.11, 0.1)])
def test_the_adaptive_weight_follows_the_kl(kl, error):
    cfg = KLControlConfig(type="adaptive", target_kl=0.1, horizon=1000)
    assert adapted_kl_coef(0.5, kl, 64, cfg) == pytest.approx(0.5 * (1 + error * 64 / 1000), rel=1e-6)
    assert adapted_kl_coef(0.5, kl, 64, KLControlConfig()) == 0.5
