"""Packed attention against attention with a full mask."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Qwen2Config

from rltrain.errors import ConfigError
from rltrain.models import attention
from rltrain.models.attention import attend
from rltrain.models.packing import AttentionPlan, Segment

# A prompt of 5 with answers of 3 and 1; a segment of its own; a prompt of 2 with an answer of 6.
PLAN = AttentionPlan(
    (Segment(0, 5), Segment(5, 8, (0, 5)), Segment(8, 9, (0, 5)),
     Segment(9, 13), Segment(13, 15), Segment(15, 21, (13, 15)))
)  # fmt: skip
PLANS = {"prefixes": PLAN, "alone": AttentionPlan.of_lengths([4, 4, 1, 7, 7])}


def tensors(plan, heads=4, kv_heads=2, size=8):
    torch.manual_seed(0)
    shapes = [(1, count, plan.num_tokens, size) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def with_a_full_mask(query, key, value, plan, scaling=None, window=None):
    """The definition: token by token, which keys it sees and how far they are."""
    mask = torch.zeros(plan.num_tokens, plan.num_tokens, dtype=torch.bool)
    for segment in plan.segments:
        keys = [*range(*segment.prefix), *range(segment.start, segment.stop)]
        for place, token in enumerate(range(segment.start, segment.stop)):
            seen = keys[: segment.prefix_length + place + 1]
            mask[token, seen[-window:] if window else seen] = True
    repeats = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeats, 1).transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value.repeat_interleave(repeats, 1)).transpose(1, 2)


@pytest.mark.parametrize("block", [2, 512])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_packed_attention_is_attention_with_a_full_mask(plan, window, block, monkeypatch):
    monkeypatch.setattr(attention, "_BLOCK", block)
    inputs = tensors(plan)
    found, expected = attend(*inputs, plan, 0.3, window), with_a_full_mask(*inputs, plan, 0.3, window)
    assert found.shape == (1, plan.num_tokens, 4, 8)
    assert torch.allclose(found, expected, atol=1e-12)
    weights = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True
    ):  # fmt: skip
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("prefix", [1023, 1100])
def test_prefixes_of_any_length_after_a_call_without_gradients(prefix):
    plan = AttentionPlan((Segment(0, prefix), Segment(prefix, prefix + 4, (0, prefix))))
    inputs = tensors(plan)
    expected = with_a_full_mask(*inputs, plan, 0.3, None)
    attention._template.cache_clear()
    with torch.inference_mode():
        assert torch.allclose(attend(*inputs, plan, 0.3), expected, atol=1e-12)
    attend(*inputs, plan, 0.3).sum().backward()
    assert all(each.grad is not None for each in inputs)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_halves_are_rounded_only_before_and_after_attention(plan):
    halves = [each.detach().bfloat16().requires_grad_() for each in tensors(plan)]
    whole = [each.detach().float().requires_grad_() for each in halves]
    found, expected = attend(*halves, plan), attend(*whole, plan)
    assert torch.equal(found, expected.bfloat16())
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), halves)
    for one, other in zip(gradients, torch.autograd.grad((expected * weights).sum(), whole), strict=True):
        assert torch.allclose(one.float(), other, rtol=0.02, atol=0.02)


def test_new_lengths_prepare_no_kernels_on_a_cpu(capfd):
    plan = AttentionPlan((Segment(0, 61), Segment(61, 178, (0, 61)), Segment(178, 215)))
    inputs = [each.detach().bfloat16().requires_grad_() for each in tensors(plan, size=64)]
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
        attend(*inputs, plan).float().sum().backward()
    assert "create" not in capfd.readouterr().out


@pytest.mark.parametrize("few", [0, 1024])
def test_long_segments_in_halves_are_the_same_attention(few, monkeypatch):
    monkeypatch.setattr(attention, "_FEW_KEYS", few)
    halves = [each.detach().bfloat16() for each in tensors(PLAN)]
    expected = with_a_full_mask(*(each.double() for each in halves), PLAN)
    assert torch.allclose(attend(*halves, PLAN).double(), expected, atol=0.02)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_accelerator_kernels_are_given_the_same_attention(plan, window, monkeypatch):
    """Kernels that follow the documented meaning of their arguments stand for those that cannot be run here."""

    def by_sequence(query, key, value, query_ends, key_ends, scale, left):
        outputs, places = [], zip((0, *query_ends[:-1]), query_ends, (0, *key_ends[:-1]), key_ends, strict=True)
        for q0, q1, k0, k1 in places:
            distance = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)
            mask = (distance >= 0) & (distance <= left)
            rows = (each.transpose(0, 1) for each in (query[q0:q1], key[k0:k1], value[k0:k1]))
            product = torch.nn.functional.scaled_dot_product_attention
            outputs.append(product(*rows, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1))
        return torch.cat(outputs)

    def varlen(q, k, v, starts_q, starts_k, longest_q, longest_k, *, scale, left, grouped):
        assert (longest_q, longest_k) == (int(starts_q.diff().max()), int(starts_k.diff().max()))
        assert grouped
        assert starts_q.dtype == torch.int32
        return by_sequence(q, k, v, starts_q[1:].tolist(), starts_k[1:].tolist(), scale, 10**6 if left < 0 else left)

    def fusion(q, k, v, head_num, input_layout, *, atten_mask, scale, actual_seq_qlen, actual_seq_kvlen, sparse_mode,
               pre_tockens=2147483647, next_tockens=2147483647):  # fmt: skip
        assert (head_num, input_layout, atten_mask.shape) == (4, "TND", (2048, 2048))
        assert torch.equal(atten_mask[:2, :2], torch.tensor([[False, True], [False, False]]))
        assert (sparse_mode, next_tockens) in ((3, 2147483647), (4, 0))
        return (by_sequence(q, k, v, actual_seq_qlen, actual_seq_kvlen, scale, pre_tockens),)

    query, key, value = tensors(plan)
    inputs = (query, key, value[..., :6])  # values narrower than keys, as in multi-head latent attention
    expected = attend(*inputs, plan, 0.3, window)
    monkeypatch.setattr(attention, "_NPU_SEGMENTS", 2)
    monkeypatch.setattr(attention, "_flash", lambda: varlen)
    monkeypatch.setattr(attention, "npu_fusion_attention", lambda: fusion)
    for kernel in (attention._cuda, attention._npu):
        assert torch.allclose(kernel(*inputs, plan, 0.3, window), expected, atol=1e-12)


def test_varlen_attention_of_torch_takes_our_arguments(monkeypatch):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    calls = []

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
        calls.append(SimpleNamespace(**locals()))

    real = varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    attention._flash.cache_clear()
    attention._flash()(*range(7), scale=0.5, left=-1, grouped=True)
    attention._flash.cache_clear()
    (call,) = calls
    assert (call.query, call.max_k, call.scale, call.window_size, call.enable_gqa) == (0, 6, 0.5, (-1, 0), True)
    parameters = inspect.signature(real).parameters
    assert list(parameters)[:7] == list(vars(call))[:7]
    assert {"scale", "window_size", "enable_gqa"} <= set(parameters)


def test_layers_that_would_mix_samples_are_refused():
    attention.check_layers(Qwen2Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]))
    with pytest.raises(ConfigError, match="layers of kind chunked_attention"):
        attention.check_layers(Qwen2Config(num_hidden_layers=2, layer_types=["full_attention", "chunked_attention"]))


@pytest.mark.parametrize(("longest", "fits"), [(128, True), (129, False), (None, False)])
def test_frequencies_of_the_longest_sequence_are_refused(longest, fits):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = Qwen2Config(num_hidden_layers=2, max_position_embeddings=128, rope_parameters=rope)
    if fits:
        attention.check_layers(config, longest)
        return
    with pytest.raises(ConfigError, match=r"rotary frequencies beyond 128 tokens .* within 128"):
        attention.check_layers(config, longest)


def test_a_mask_of_the_models_own_is_refused():
    one = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match="a mask of its own"):
        attention.packed_attention(
            nn.Module(), one, one, one, torch.zeros(1, 1, 3, 3), rltrain_plan=AttentionPlan.of_lengths([3])
        )
