"""The loss on the balance of experts is that of the papers and of transformers, and its gradient is exact; so are the
steps of a bias."""

import pytest
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rltrain.algorithms.expert_balance import balance_weights, bias_steps, load_of
from rltrain.base.columns.batch import Batch
from rltrain.models.attention import packed
from rltrain.models.attention.packing import pack
from rltrain.models.forward import PolicyModel
from tests.models.test_routing import FAMILIES, batch, model_of

CPU = torch.device("cpu")
# Families whose model gives the logits of its routers in transformers.
SOFTMAX = [name for name in FAMILIES if name.startswith(("qwen3_moe", "mixtral", "gpt_oss"))]


def test_the_weights_by_hand():
    choices = torch.tensor([[[0, 1]], [[0, 2]], [[0, 1]]], dtype=torch.uint8)
    load = load_of(choices, 4)
    assert load.tolist() == [[3, 2, 1, 0]]
    weights = balance_weights(load, 2)
    # Three tokens: f = 1, 2/3, 1/3, 0; the loss is 4 sum_e f_e (sum_t p_te) / 3.
    assert weights[0].tolist() == pytest.approx([4 / 3, 8 / 9, 4 / 9, 0.0])
    shares = torch.rand(3, 4).softmax(1)
    expected = load_balancing_loss_func((shares.log(),), 4, 1)
    alone = balance_weights(load_of(shares.argmax(1)[:, None, None], 4), 1)
    assert float(shares.sum(0) @ alone[0]) == pytest.approx(float(expected.detach()))
    # An even load costs as much as there are experts to a token, whatever the shares are.
    even = balance_weights(torch.full((3, 4), 6), 2)
    assert float(sum(torch.rand(12, 4).softmax(1).sum(0) @ even[layer] for layer in range(3))) == pytest.approx(2)
    assert balance_weights(torch.zeros(1, 4), 0).tolist() == [[0.0] * 4]


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
    """Loss and gradients, part by part."""
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


def test_nothing_is_computed_that_nobody_asks_for():
    policy = PolicyModel(model_of("qwen3_moe"))
    assert policy(pack(batch(), CPU)).balance_loss is None
    policy.balance(torch.ones(2, 8))
    with torch.no_grad():
        assert policy(pack(batch(), CPU)).balance_loss is None
    policy.balance(None)
    assert policy(pack(batch(), CPU)).balance_loss is None


def test_sigmoids_count_as_their_share_of_all():
    policy, given = PolicyModel(model_of("deepseek_v3, groups of experts")), batch().select([0])
    seen = []
    router = next(part for part in policy.modules() if isinstance(part, transformers.models.deepseek_v3
                  .modeling_deepseek_v3.DeepseekV3TopkRouter))  # fmt: skip
    router.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs[0].detach()))
    weights = torch.rand(1, 8).double()
    loss, _ = balanced(policy, [given], weights)
    scores = seen[0].double().sigmoid()
    assert loss == pytest.approx(float((scores / scores.sum(1, keepdim=True)).sum(0) @ weights[0]), rel=1e-5)
