"""Gated delta nets against transformers' own, segment by segment."""

import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, MiniMaxConfig, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from rltrain.base.errors import ConfigError
from rltrain.models.attention import delta_rule, recurrent
from rltrain.models.attention import packed as attention
from rltrain.models.attention.packing import AttentionPlan, Segment
from rltrain.models.forward import PolicyModel, model_numbers
from rltrain.models.load import empty_model
from tests.distance import distance
from tests.models.kinds import KINDS, plain_model

# One token, whole chunks, one more than a chunk, many.
LENGTHS = (65, 1, 64, 200, 3)


def parts(lengths, heads=3, keys=8, values=6, dtype=torch.float32):
    """query, key, value, log decay, step and memory."""
    torch.manual_seed(0)
    shapes = [(heads, keys), (heads, keys), (heads, values), (heads,), (heads,)]
    query, key, value, decay, step = (torch.randn(sum(lengths), *shape, dtype=dtype) for shape in shapes)
    memory = torch.randn(len(lengths), heads, keys, values)
    made = [query, key, value, -decay.exp() / 5, step.sigmoid(), memory]
    return [each.requires_grad_() for each in made]


def by_transformers(query, key, value, decay, step, lengths, before):
    outputs, memories, first = [], [], 0
    for number, length in enumerate(lengths):
        some = (each[None, first : first + length] for each in (query, key, value, decay, step))
        output, memory = torch_chunk_gated_delta_rule(
            *some, initial_state=None if before is None else before[number : number + 1], output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        outputs.append(output[0])
        memories.append(memory)
        first += length
    return torch.cat(outputs), torch.cat(memories)


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("lengths", [LENGTHS, (1, 1, 1), (130,)])
def test_the_delta_rule_over_segments_is_transformers(lengths, starts):
    *made, memory = parts(lengths)
    before = memory if starts else None
    found, expected = (
        torch.cat([each.flatten() for each in rule(*made, lengths, before)])
        for rule in (delta_rule.delta_rule, by_transformers)
    )
    assert distance(found, expected) < 1e-5
    weights = torch.randn_like(found)
    inputs = [*made, memory] if starts else made
    one, other = (torch.autograd.grad((each * weights).sum(), inputs) for each in (found, expected))
    assert distance(one, other) < 1e-5


def net_of(plain):
    """A layer's gated delta net, adopted, with the weights of ``plain``."""
    config = plain.config.__class__(**plain.config.to_dict())
    model = empty_model(config, "sdpa", torch.float32)
    model.load_state_dict(plain.state_dict(), assign=True)
    return model.model.layers[0].linear_attn


def run(net, hidden, plan):
    vars(net)["rltrain_arguments"] = [plan, None, None]
    return net(hidden[None])[0]


@pytest.mark.parametrize("name", [name for name in KINDS if "delta" in name])
def test_long_segments_and_shared_prompts_are_transformers(name):
    plain = plain_model(name)
    net, own = net_of(plain), plain.model.layers[0].linear_attn
    torch.manual_seed(1)
    prompt, others = torch.randn(70, 32), [torch.randn(length, 32) for length in (2, 131, 1)]
    alone = torch.randn(66, 32)
    plan = AttentionPlan(
        (
            Segment(0, 70),
            Segment(70, 72, (0, 70)),
            Segment(72, 138),
            Segment(138, 269, (0, 70)),
            Segment(269, 270, (0, 70)),
        )
    )
    hidden = torch.cat([prompt, others[0], alone, *others[1:]])
    expected = [own(torch.cat([prompt, other])[None])[0] for other in others]
    expected = torch.cat([expected[0], own(alone[None])[0], *(each[70:] for each in expected[1:])])
    found = run(net, hidden, plan)
    assert distance(found, expected) < 1e-5
    weights = torch.randn_like(expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = [{path: weight.grad for path, weight in each.named_parameters()} for each in (net, own)]
    assert distance(*gradients) < 1e-5


def test_a_row_that_was_first_decoded_can_be_trained():
    net = net_of(plain_model("qwen3_5, gated delta net"))
    plan = AttentionPlan((Segment(0, 5), Segment(5, 82, (0, 5))))
    for cached in (recurrent._rounds, recurrent._laid, delta_rule._chunks):
        cached.cache_clear()
    with torch.inference_mode():
        run(net, torch.randn(82, 32), plan)
    run(net, torch.randn(82, 32), plan).sum().backward()
    assert net.A_log.grad.any()


def test_kernels_of_cuda_are_given_the_same_layer(monkeypatch):
    """Kernels that follow the documented meaning of their arguments stand for those that cannot be run here."""

    def chunk_gated_delta_rule(
        q, k, v, *, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    ):
        assert (output_final_state, use_qk_l2norm_in_kernel, len(q), cu_seqlens.dtype) == (True, True, 1, torch.int64)
        assert q.dtype == torch.bfloat16, "the kernel takes half precision"
        one = (each[0] for each in (q, k, v, g, beta))
        output, memory = by_transformers(*one, cu_seqlens.diff().tolist(), initial_state)
        return output[None], memory

    def causal_conv1d_fn(x, weight, bias, activation):
        assert activation == "silu"
        padded = torch.nn.functional.pad(x, (weight.shape[1] - 1, 0))
        return torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=len(weight)))

    net = net_of(plain_model("qwen3_next, gated delta net").bfloat16())
    plan = AttentionPlan((Segment(0, 70), Segment(70, 172, (0, 70)), Segment(172, 175, (0, 70))))
    hidden = torch.randn(175, 32).bfloat16()
    expected = run(net, hidden, plan)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", SimpleNamespace(**locals()))
    monkeypatch.setitem(sys.modules, "causal_conv1d", SimpleNamespace(causal_conv1d_fn=causal_conv1d_fn))
    monkeypatch.setattr(recurrent, "_on_cuda", lambda tensor: True)
    for kernel in (delta_rule.fused_rule, recurrent._fused_convolution):
        kernel.cache_clear()
        assert kernel() is not None
    found = run(net, hidden, plan)
    for kernel in (delta_rule.fused_rule, recurrent._fused_convolution):
        kernel.cache_clear()
    assert distance(found, expected) < 0.01


def test_layers_without_keys_count_for_no_pairs_of_tokens():
    numbers = model_numbers(PolicyModel(plain_model("qwen3_5, gated delta net")))
    assert (numbers["attention_width"], numbers["cache_width"]) == (4 * 8, 2 * 2 * 8)  # of one layer in two


def test_other_recurrent_layers_are_refused():
    with pytest.raises(ConfigError, match="MiniMaxConfig has layers of kind linear_attention"):
        attention.check_layers(MiniMaxConfig(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"]))


def test_a_delta_net_that_is_built_otherwise_is_refused(monkeypatch):
    config = Qwen3NextConfig(**KINDS["qwen3_next, gated delta net"].to_dict())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    del model.model.layers[0].linear_attn.dt_bias
    with pytest.raises(ConfigError, match="0 of the 1 recurrent layers of Qwen3NextForCausalLM"):
        recurrent.adopt(model)


def test_a_forward_without_a_plan_is_refused():
    net = net_of(plain_model("qwen3_5, gated delta net"))
    with pytest.raises(NotImplementedError, match="no plan of its packed row"):
        net(torch.zeros(1, 3, 32))
