"""The expert-balance loss equals that of the papers and of transformers, with an exact gradient; so do the steps of a
bias."""

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rltrain.algorithms.expert_balance import balance_weights, bias_steps, load_of
from rltrain.common.columns.batch import Batch
from rltrain.models.attention import packed
from rltrain.models.attention.packing import pack
from rltrain.models.forward import PolicyModel
from tests.models.test_routing import FAMILIES, batch, model_of

CPU = torch.device("cpu")
# Families whose model gives the logits of its routers in transformers.
SOFTMAX = [name for name in FAMILIES if name.startswith(("qwen3_moe", "mixtral", "gpt_oss"))]


def test_the_steps_of_a_bias_by_hand():
    # Means 3 and 10/4: of 3, an expert that has 3 tokens keeps its bias.
    steps = bias_steps(torch.tensor([[5, 3, 0, 4], [1, 2, 3, 4]]), 0.5)
    assert steps.tolist() == [[-0.5, 0.0, 0.5, -0.5], [0.5, 0.5, -0.5, -0.5]]
    # A load beyond what float32 tells apart.
    assert bias_steps(torch.tensor([[2**25, 2**25 + 1, 2**25 - 1]]), 1.0).tolist() == [[0.0, -1.0, 1.0]]


def gradients(policy):
    found = {name: weight.grad.clone() for name, weight in policy.named_parameters() if weight.grad is not None}
    policy.zero_grad()
    return found


def balanced(policy, parts: list[Batch], weights):
    """Return loss and gradients of each part."""
    policy.balance(weights)
    total = 0.0
    for part in parts:
        outputs = policy(pack(part, CPU))
        # The log-probs keep every weight in the graph, as in a run.
        (outputs.balance_loss + 0.0 * outputs.log_probs.sum()).backward()
        total += float(outputs.balance_loss.detach())
    return total, gradients(policy)


def weights_of(policy, given: Batch):
    with torch.no_grad():
        choices = policy(pack(given, CPU), with_experts=True).experts
    return balance_weights(load_of(choices, 8), choices.shape[2]).double()


@pytest.mark.parametrize("name", SOFTMAX)
def test_the_loss_is_that_of_transformers_layer_by_layer(name):
    policy, given = PolicyModel(model_of(name)), batch().select([0])
    row = pack(given, CPU).tokens
    logits = policy.model(row[None], output_router_logits=True).router_logits
    expected = sum(load_balancing_loss_func((layer,), 8, 2) for layer in logits) / len(logits)
    expected.backward()
    plain = gradients(policy)
    loss, found = balanced(policy, [given], weights_of(policy, given))
    assert loss == pytest.approx(float(expected.detach()))
    assert sum(float(grad.abs().sum()) for grad in plain.values()) > 0
    for weight, grad in plain.items():
        torch.testing.assert_close(found[weight], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_neither_parts_nor_recomputed_activations_change_it(name):
    packed.register()
    policy, given = PolicyModel(model_of(name, packed.NAME)), batch()
    weights = weights_of(policy, given)
    loss, whole = balanced(policy, [given], weights)
    assert sum(float(grad.abs().sum()) for grad in whole.values()) > 0
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    again, parts = balanced(policy, [given.select([n]) for n in range(3)] + [Batch()], weights)
    assert again == pytest.approx(loss)
    for weight, grad in whole.items():
        torch.testing.assert_close(parts[weight], grad, rtol=1e-4, atol=1e-6)
