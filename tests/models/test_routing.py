"""The experts that one pass has selected are replayed in another, in every family, with the gradient of that
selection."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch
from rltrain.common.errors import ConfigError
from rltrain.models.attention import packed
from rltrain.models.attention.packing import pack, per_computed_token
from rltrain.models.forward import PolicyModel
from rltrain.models.routing import Routing
from tests.batches import batch_of_rows
from tests.models.kinds import SIZES

MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, **MOE}
FAMILIES = {
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 8, **MOE}),
    "qwen3_moe, weights that add up to 1": ("Qwen3MoeConfig", {"num_experts": 8, "norm_topk_prob": True, **MOE}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt_oss, softmax of the chosen": ("GptOssConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "llama4, one expert": ("Llama4TextConfig", {
        "num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 48,
    }),
    "glm4_moe, groups of experts": ("Glm4MoeConfig", {"n_shared_experts": 1, **GROUPS}),
    "deepseek_v3, groups of experts": ("DeepseekV3Config", {**GROUPS, **MLA, "num_key_value_heads": 4}),
    "deepseek_v2, groups of experts": ("DeepseekV2Config", {
        **GROUPS, **MLA, "num_key_value_heads": 4, "topk_method": "group_limited_greedy",
    }),
    "ernie4_5_moe, a bias": ("Ernie4_5_MoeConfig", {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0}),
}  # fmt: skip


def model_of(name, attention="eager"):
    kind, keys = FAMILIES[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**SIZES | keys), experts_implementation="eager", attn_implementation=attention
    ).double()


def batch(answers=(6, 3, 5)) -> Batch:
    """Return two responses that share a prompt, and one to another prompt."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 128, (n,), generator=generator, dtype=torch.int32) for n in (7, 4)]
    rows = [
        torch.cat([prompts[which], torch.randint(2, 128, (length,), generator=generator, dtype=torch.int32)])
        for which, length in zip((0, 0, 1), answers, strict=True)
    ]
    return batch_of_rows(rows, [7, 7, 4])


def outputs(policy, given: Batch, **asked):
    policy.zero_grad()
    found = policy(pack(given, torch.device("cpu")), **asked)
    found.log_probs.sum().backward()
    gradients = torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])
    return found, gradients


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_chosen_is_replayed_with_its_gradient(name):
    policy, given = PolicyModel(model_of(name)), batch()
    plain, gradients = outputs(policy, given, with_experts=True)
    routed = per_computed_token(plain.experts, given)
    assert routed.lengths.tolist() == [7 + 5, 7 + 2, 4 + 4]
    layers = 1 if "first_k_dense_replace" in FAMILIES[name][1] else 2
    assert routed.values.shape[1:] == (layers, FAMILIES[name][1].get("num_experts_per_tok", 2))
    # A shared prompt is computed once, and every sample is told of it.
    assert torch.equal(routed[0][:7], routed[1][:7])
    given.update({c.ROUTED_EXPERTS: routed})
    again, same = outputs(policy, given)
    torch.testing.assert_close(again.log_probs, plain.log_probs)
    torch.testing.assert_close(same, gradients)


@pytest.mark.parametrize("name", FAMILIES)
def test_another_models_choice_is_gone_to(name):
    policy, given = PolicyModel(model_of(name)), batch()
    plain = outputs(policy, given, with_experts=True)[0]
    # Any other model's choice: that of one with other routers.
    other = PolicyModel(model_of(name))
    with torch.no_grad():
        for path, weight in other.named_parameters():
            if ".gate.weight" in path or "router" in path:
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    chosen = outputs(other, given, with_experts=True)[0].experts
    assert not torch.equal(chosen.sort(-1)[0], plain.experts.sort(-1)[0])
    given.update({c.ROUTED_EXPERTS: per_computed_token(chosen, given)})
    replayed, gradients = outputs(policy, given, with_experts=True)
    assert torch.equal(replayed.experts, chosen)
    assert not torch.allclose(replayed.log_probs, plain.log_probs, atol=1e-3)
    assert gradients.isfinite().all()


def counts(experts, given, num_experts):
    """Return the tokens of each expert by layer, over all samples, counted plainly."""
    rows = per_computed_token(experts, given).values
    return torch.stack([rows[:, layer].flatten().bincount(minlength=num_experts) for layer in range(rows.shape[1])])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_load_is_a_plain_count_over_the_samples(name):
    packed.register()
    policy, given = PolicyModel(model_of(name, packed.NAME)), batch()
    with torch.no_grad():
        chosen = policy(pack(given, torch.device("cpu")), with_experts=True).experts
    expected = counts(chosen, given, 8)
    policy.measure_load()
    outputs(policy, given)
    assert torch.equal(policy.load(), expected)
    # One sample at a time, so that no prompt is shared, and a rank that has none; with activations computed again.
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    policy.measure_load()
    for sample in range(3):
        outputs(policy, given.select([sample]))
    outputs(policy, Batch())
    assert torch.equal(policy.load(), expected)


def test_a_router_that_chooses_otherwise_is_refused():
    config = transformers.PhimoeConfig(**SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2})
    model = AutoModelForCausalLM.from_config(config)
    routing = Routing(model, config)
    routing.record()
    model(torch.tensor([[3, 4, 5]]))
    with pytest.raises(ConfigError, match="router_replay"):
        routing.recorded()
