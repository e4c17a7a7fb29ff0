"""Log-probs, entropy and exact KL without logits, compared with automatic differentiation of their definition."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bench.memory import plain_log_probs
from rltrain.algorithms.distillation import JSD, ForwardKL, ReverseKL
from rltrain.common import device
from rltrain.models.head import ReferenceStates, Scaling, token_log_probs
from tests.distance import distance

SCALINGS = {
    "plain": Scaling(),
    "temperature": Scaling(temperature=0.7),
    "multiplied": Scaling(0.3, None, 1.5),
    "capped": Scaling(2.0, 3.0, 0.7),
}
ASKED = {"log-probs": (1, 0, 0), "entropy": (0, 1, 0), "log-probs and entropy": (1, 0.3, 0), "kl": (1, 0, 0.2),
         "all": (1, 0.3, 0.2)}  # fmt: skip


def make(dtype=torch.float32, bias=False):
    torch.manual_seed(0)
    linear = nn.Linear(16, 50, bias=bias).bfloat16().to(dtype)
    hidden = (3 * torch.randn(23, 16)).bfloat16().to(dtype).requires_grad_()
    theirs, states = nn.Linear(16, 50, bias=False), torch.randn(23, 16)
    reference = ReferenceStates(states, lambda part, temperature: theirs(part).detach().float() / temperature)
    return linear, hidden, torch.randint(0, 50, (23,)), reference


def gradients(function, weights, scaling, **settings):
    """Return scores, and the gradients of hidden states and head of a sum with a different weight for every token."""
    linear, hidden, labels, reference = make(**settings)
    scores = function(linear, hidden, labels, scaling, weights[1] != 0, reference if weights[2] else None)
    each = torch.linspace(-1, 1, 23)
    loss = sum((w * each * part).sum() for w, part in zip(weights, scores[:3], strict=True) if w)
    loss.backward()
    return scores, [hidden.grad, *(parameter.grad for parameter in linear.parameters())]


def set_chunk(monkeypatch, elements: int) -> None:
    monkeypatch.setitem(device.DEVICES, "cpu", replace(device.get_device("cpu"), logits_elements=elements))


@pytest.mark.parametrize("chunk", [1, 170, 10**6])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("weights", ASKED.values(), ids=ASKED)
def test_scores_and_gradients_are_those_of_the_definition(weights, scaling, chunk, monkeypatch):
    set_chunk(monkeypatch, chunk)
    found, found_gradients = gradients(token_log_probs, weights, scaling, bias=True)
    expected, expected_gradients = gradients(plain_log_probs, weights, scaling, bias=True)
    for one, other in zip(found[:3], expected[:3], strict=True):
        assert (one is None) == (other is None)
        assert one is None or distance(one, other) < 2e-5
    for one, other in zip(found_gradients, expected_gradients, strict=True):
        assert float(other.abs().max()) > 1e-3
        assert distance(one, other) < 2e-5


@pytest.mark.parametrize("chunk", [1, 170, 10**6])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_sum_of_squares_is_that_of_the_definition_and_moves_no_gradient(with_entropy, scaling, chunk, monkeypatch):
    set_chunk(monkeypatch, chunk)
    linear, hidden, labels, _ = make()
    found = {
        asked: token_log_probs(linear, hidden, labels, scaling, with_entropy, with_squares=asked)
        for asked in (False, True)
    }
    expected = torch.softmax(scaling.apply(linear(hidden)), -1).square().sum(-1)
    assert distance(found[True].sum_pi_squared, expected) < 2e-5
    assert found[False].sum_pi_squared is None
    assert not found[True].sum_pi_squared.requires_grad
    asked, unasked = (torch.autograd.grad(each.log_probs.sum(), hidden)[0] for each in found.values())
    assert torch.equal(asked, unasked)


def plain_divergence(divergence, log_p, log_q):
    """The definitions of Agarwal et al. 2024."""

    def kl(log_a, log_b):
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    if not isinstance(divergence, JSD):
        return kl(log_q, log_p) if isinstance(divergence, ForwardKL) else kl(log_p, log_q)
    log_m = (divergence.beta * log_q.exp() + (1 - divergence.beta) * log_p.exp()).log()
    return divergence.beta * kl(log_q, log_m) + (1 - divergence.beta) * kl(log_p, log_m)


@pytest.mark.parametrize("chunk", [1, 170, 10**6])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("divergence", [ReverseKL(), ForwardKL(), JSD(0.5), JSD(0.1)], ids=range(4))
def test_a_divergence_and_its_gradient_are_those_of_float64(divergence, scaling, chunk, monkeypatch):
    """The other head has more rows, as larger models of a family have; the additional rows are ignored."""
    set_chunk(monkeypatch, chunk)
    linear, hidden, labels, _ = make(bias=True)
    head, states = nn.Linear(24, 57, bias=False), torch.randn(23, 24)
    other = ReferenceStates(states, lambda part, temperature: head(part).detach() / temperature, divergence)
    found = token_log_probs(linear, hidden, labels, scaling, True, other)
    each = torch.linspace(-1, 1, 23)
    (each * (found.kl + 0.3 * found.entropy)).sum().backward()
    leaves = [each.detach().double().requires_grad_() for each in (hidden, linear.weight, linear.bias)]
    logits = nn.functional.linear(*leaves) * (scaling.multiplier if not scaling.cap else 1)
    if scaling.cap:
        logits = scaling.cap * torch.tanh(logits * scaling.multiplier / scaling.cap)
    log_p = torch.log_softmax(logits / scaling.temperature, -1)
    log_q = torch.log_softmax((states.double() @ head.weight.double().T)[:, :50] / scaling.temperature, -1)
    expected = plain_divergence(divergence, log_p, log_q.detach())
    (each * (expected - 0.3 * (log_p.exp() * log_p).sum(-1))).sum().backward()
    assert distance(found.kl, expected) < 2e-5
    for one, leaf in zip((hidden, linear.weight, linear.bias), leaves, strict=True):
        assert float(leaf.grad.abs().max()) > 1e-3
        assert distance(one.grad, leaf.grad) < 2e-5


def test_a_token_that_the_policy_never_writes_has_a_finite_gradient():
    """KL(q || p) computed from q / p would be infinite there."""
    log_p, log_q = (torch.log_softmax(torch.tensor([row]), -1) for row in ([200.0, 0.0, 0.0], [0.0, 200.0, 0.0]))
    for divergence in (ReverseKL(), ForwardKL(), JSD(0.5)):
        value, kept = divergence.value(log_p, log_q)
        assert value.isfinite().all()
        assert divergence.gradient(log_p, log_q.clone(), kept).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_the_exact_kl_of_equal_models_is_nothing_to_the_last_bit(scaling, dtype):
    linear, hidden, labels, _ = make(dtype)
    own = ReferenceStates(hidden.detach(), lambda part, temperature: scaling.apply(linear(part)).detach())
    assert not token_log_probs(linear, hidden, labels, scaling, False, own).kl.any()


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_in_float32_rounds_no_logit(bias):
    """With bfloat16 weights and states, log-probs and entropy equal those in float64; without the float32 head they do
    not."""
    linear, hidden, labels, _ = make(torch.bfloat16, bias=bias)
    logits = nn.functional.linear(*(each.double() for each in (hidden, *linear.parameters())))
    exact = torch.log_softmax(logits, -1)
    expected = exact.gather(-1, labels[:, None])[:, 0], -(exact.exp() * exact).sum(-1)
    for in_fp32 in (True, False):
        found = token_log_probs(linear, hidden, labels, Scaling(), True, None, in_fp32)
        apart = [distance(one, other) for one, other in zip(found[:2], expected, strict=True)]
        assert max(apart) < 1e-6 if in_fp32 else min(apart) > 1e-4
