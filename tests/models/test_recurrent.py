"""Gated delta nets, compared with transformers' implementation segment by segment."""

import pytest
import torch
from transformers import MiniMaxConfig
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from rltrain.common.errors import ConfigError
from rltrain.models.attention import delta_rule
from rltrain.models.attention import packed as attention
from rltrain.models.attention.packing import AttentionPlan, Segment
from rltrain.models.load import empty_model
from tests.distance import distance
from tests.models.kinds import KINDS, plain_model

# One token, whole chunks, one more than a chunk, many.
LENGTHS = (65, 1, 64, 200, 3)


def parts(lengths, heads=3, keys=8, values=6, dtype=torch.float32):
    """Return query, key, value, log decay, step and memory."""
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
    """Return a layer's converted gated delta net with the weights of ``plain``."""
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
    shared = [Segment(start, stop, (0, 70)) for start, stop in ((70, 72), (138, 269), (269, 270))]
    plan = AttentionPlan((Segment(0, 70), shared[0], Segment(72, 138), *shared[1:]))
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


def test_other_recurrent_layers_are_refused():
    with pytest.raises(ConfigError, match="MiniMaxConfig has layers of kind linear_attention"):
        attention.check_layers(MiniMaxConfig(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"]))


def test_a_forward_without_a_plan_is_refused():
    net = net_of(plain_model("qwen3_5, gated delta net"))
    with pytest.raises(NotImplementedError, match="without a packing plan"):
        net(torch.zeros(1, 3, 32))
