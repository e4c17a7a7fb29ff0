"""Packed attention, compared with attention with a full mask."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention import varlen as torchs
from transformers import Qwen2Config

from rltrain.common.errors import ConfigError
from rltrain.models.attention import packed as attention
from rltrain.models.attention import varlen
from rltrain.models.attention.packed import attend
from rltrain.models.attention.packing import AttentionPlan, Segment
from rltrain.models.attention.scores import Kind

# A prompt of 5 with answers of 3 and 1; a segment of its own; a prompt of 2 with an answer of 6.
PLAN = AttentionPlan(
    (Segment(0, 5), Segment(5, 8, (0, 5)), Segment(8, 9, (0, 5)),
     Segment(9, 13), Segment(13, 15), Segment(15, 21, (13, 15)))
)  # fmt: skip
PLANS = {"prefixes": PLAN, "alone": AttentionPlan.of_lengths([4, 4, 1, 7, 7])}
# Longer than a block of queries.
LONG = AttentionPlan((Segment(0, 520), Segment(520, 524, (0, 520))))


def tensors(plan, heads=4, kv_heads=2, size=8):
    torch.manual_seed(0)
    shapes = [(1, count, plan.num_tokens, size) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def with_a_full_mask(query, key, value, plan, kind):
    """The definition: for every token, the keys that it sees and their distances."""
    scaling, window, chunk, softcap, sinks = kind
    mask = torch.zeros(plan.num_tokens, plan.num_tokens, dtype=torch.bool)
    for segment in plan.segments:
        keys = [*range(*segment.prefix), *range(segment.start, segment.stop)]
        for place, token in enumerate(range(segment.start, segment.stop)):
            seen = keys[: segment.prefix_length + place + 1]
            seen = seen[(len(seen) - 1) // chunk * chunk :] if chunk else seen
            mask[token, seen[-window:] if window else seen] = True
    repeats = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeats, 1).transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    exponentials = scores.masked_fill(~mask, -torch.inf).exp()
    sums = exponentials.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    return (exponentials / sums @ value.repeat_interleave(repeats, 1)).transpose(1, 2)


def kinds():
    """Return the kinds by name; sinks of 4 heads."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    found = {f"window {window}": Kind(0.3, window) for window in (None, 1, 3, 100)}
    found |= {f"chunk {chunk}": Kind(chunk=chunk) for chunk in (1, 3, 4, 100)}
    found |= {"capped": Kind(0.3, softcap=0.5), "sinks": Kind(sinks=sinks), "all": Kind(2.0, 3, 4, 0.7, sinks)}
    return found


@pytest.mark.parametrize("kind", kinds().values(), ids=kinds())
@pytest.mark.parametrize("plan", [*PLANS.values(), LONG], ids=[*PLANS, "long"])
def test_packed_attention_is_attention_with_a_full_mask(plan, kind):
    inputs = tensors(plan)
    found, expected = attend(*inputs, plan, kind), with_a_full_mask(*inputs, plan, kind)
    assert found.shape == (1, plan.num_tokens, 4, 8)
    assert torch.allclose(found, expected, atol=1e-12)
    same_gradients(found, expected, [*inputs, *([] if kind.sinks is None else [kind.sinks])])


def same_gradients(found, expected, inputs):
    weights = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True
    ):  # fmt: skip
        assert torch.allclose(one, other, atol=1e-12)


def test_memory_of_plain_products_does_not_grow_with_the_square():
    """Autograd saves inputs, outputs and a mask that all layers share. The scores alone would take 46 MB."""
    kept = {}
    plan = AttentionPlan.of_lengths([1200])
    inputs = tensors(plan)

    def keep(each):
        kept[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        return each

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        attend(*inputs, plan, Kind(softcap=5.0))
    assert sum(kept.values()) < 46e6 / 4


@pytest.mark.parametrize("length", [520, 1100])
def test_halves_are_rounded_only_before_and_after_attention(length):
    """Segments of more than 1,024 keys are computed in half precision."""
    plan = AttentionPlan.of_lengths([length])
    halves = [tensor.detach().bfloat16() for tensor in tensors(plan)]
    found, expected = attend(*halves, plan), with_a_full_mask(*(half.double() for half in halves), plan, Kind())
    assert float((found - expected).abs().max()) < 0.02


def by_sequence(query, key, value, query_ends, key_ends, scale, left, sinks=None):
    """Attention [tokens, heads, d] as the kernels of accelerators define it, with the log of the softmax's sums."""
    outputs, totals, places = [], [], zip((0, *query_ends[:-1]), query_ends, (0, *key_ends[:-1]), key_ends, strict=True)
    for q0, q1, k0, k1 in places:
        distance = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)
        mask = (distance >= 0) & (distance <= left)
        q, k, v = (each.transpose(0, 1) for each in (query[q0:q1], key[k0:k1], value[k0:k1]))
        k, v = (each.repeat_interleave(len(q) // len(k), 0) for each in (k, v))
        scores = (q @ k.mT * (scale or q.shape[-1] ** -0.5)).masked_fill(~mask, -torch.inf)
        total = scores.logsumexp(-1)
        totals.append(total if sinks is None else torch.logaddexp(total, sinks[:, None]))
        outputs.append(((scores - totals[-1][..., None]).exp() @ v).transpose(0, 1))
    return torch.cat(outputs), torch.cat(totals, 1)


def fusion(q, k, v, head_num, input_layout, *, atten_mask, scale, actual_seq_qlen, actual_seq_kvlen, sparse_mode,
           pre_tockens=2147483647, next_tockens=2147483647, sink=None):  # fmt: skip
    assert (head_num, input_layout, atten_mask.shape) == (4, "TND", (2048, 2048))
    assert torch.equal(atten_mask[:2, :2], torch.tensor([[False, True], [False, False]]))
    assert (sparse_mode, next_tockens) in ((3, 2147483647), (4, 0))
    assert sink is None or sink.dtype == torch.float32
    return (by_sequence(q, k, v, actual_seq_qlen, actual_seq_kvlen, scale, pre_tockens, sink)[0],)


def varlen_attn(q, k, v, starts_q, starts_k, longest_q, longest_k, *, scale, window_size, enable_gqa=True):
    assert (longest_q, longest_k) == (int(starts_q.diff().max()), int(starts_k.diff().max()))
    assert enable_gqa
    assert (starts_q is starts_k) == torch.equal(starts_q, starts_k)
    assert starts_q.dtype == torch.int32
    left, right = window_size
    assert right == 0
    ends = starts_q[1:].tolist(), starts_k[1:].tolist()
    return by_sequence(q, k, v, *ends, scale, 10**6 if left < 0 else left)[0]


def flash_forward(q, k, v, starts_q, starts_k, longest_q, longest_k, dropout, causal, *, return_debug_mask, scale,
                  window_size_left, window_size_right):  # fmt: skip
    assert (dropout, causal, return_debug_mask, window_size_right) == (0.0, window_size_left < 0, False, 0)
    ends = starts_q[1:].tolist(), starts_k[1:].tolist()
    left = 10**6 if window_size_left < 0 else window_size_left
    return *by_sequence(q, k, v, *ends, scale, left), torch.zeros(2), torch.zeros(0), None


def flash_backward(gradient, q, k, v, output, totals, starts_q, starts_k, longest_q, longest_k, dropout, causal, state,
                   unused, *, scale, window_size_left, window_size_right):  # fmt: skip
    """Flash attention's backward pass: from the given totals, and with the given <gradient, output>."""
    found, repeats = [torch.zeros_like(each) for each in (q, k, v)], q.shape[1] // k.shape[1]
    starts_q, starts_k = starts_q.tolist(), starts_k.tolist()
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        for head in range(q.shape[1]):
            mine = head // repeats
            own, seen, seen_values = q[q0:q1, head], k[k0:k1, mine], v[k0:k1, mine]
            distance = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)
            hidden = (distance < 0) | ((distance > window_size_left) & (window_size_left >= 0))
            share = (own @ seen.mT * scale - totals[head, q0:q1, None]).masked_fill(hidden, -torch.inf).exp()
            coming = gradient[q0:q1, head]
            inner = (coming * output[q0:q1, head]).sum(-1, keepdim=True)
            of_scores = share * (coming @ seen_values.mT - inner) * scale
            found[0][q0:q1, head] = of_scores @ seen
            found[1][k0:k1, mine] += of_scores.mT @ own
            found[2][k0:k1, mine] += share.mT @ coming
    return found


ACCELERATED = {name: kind for name, kind in kinds().items() if name in ("window None", "window 3", "chunk 4", "sinks")}
ACCELERATED["all but a cap"] = kinds()["all"]._replace(softcap=None)


@pytest.mark.parametrize("public", [varlen_attn, None])
@pytest.mark.parametrize("kind", ACCELERATED.values(), ids=ACCELERATED)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_accelerator_kernels_are_given_the_same_attention(plan, kind, public, monkeypatch):
    """Kernels that follow the documented meaning of their arguments replace those that cannot run here."""
    query, key, value = tensors(plan)
    inputs = (query, key, value[..., :6])  # values narrower than keys, as in multi-head latent attention
    monkeypatch.setattr(torchs, "varlen_attn", public or (lambda: None))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(varlen, "_operators", lambda: (flash_forward, flash_backward))
    monkeypatch.setattr(varlen, "_NPU_SEGMENTS", 2)
    monkeypatch.setattr(varlen, "torch_npu", lambda: SimpleNamespace(npu_fusion_attention=fusion))
    varlen._flash.cache_clear()
    for kernel in (varlen._cuda, varlen._npu):
        monkeypatch.setattr(attention, "kernel_for", lambda query, kind, kernel=kernel: kernel)
        found, expected = attend(*inputs, plan, kind), with_a_full_mask(*inputs, plan, kind)
        assert torch.allclose(found, expected, atol=1e-12)
        same_gradients(found, expected, [*inputs[:2], value, *([] if kind.sinks is None else [kind.sinks])])
    varlen._flash.cache_clear()


def test_layers_that_would_mix_samples_are_refused():
    attention.check_layers(Qwen2Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]))
    with pytest.raises(ConfigError, match="layers of kind conv"):
        attention.check_layers(Qwen2Config(num_hidden_layers=2, layer_types=["full_attention", "conv"]))


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
    with pytest.raises(NotImplementedError, match="a custom mask"):
        attention.packed_attention(
            nn.Module(), one, one, one, torch.zeros(1, 1, 3, 3), rltrain_plan=AttentionPlan.of_lengths([3])
        )
