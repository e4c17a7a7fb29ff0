"""Ring attention: log-probs and gradients equal transformers in float64 on one process."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from rltrain.common.columns.batch import Batch
from rltrain.common.device import get_device
from rltrain.config.schema.model import OptimConfig
from rltrain.models.attention.packing import AttentionPlan, Segment, pack
from rltrain.models.attention.ring import Rounds, parts_of
from rltrain.models.attention.scores import Kind
from rltrain.models.attention.ulysses import heads_problem
from rltrain.models.forward import PolicyModel, ScalarModel
from rltrain.models.optim import clip_gradients, make_optimizer
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from rltrain.run.preflight.model_check import trial_samples
from tests.distance import distance
from tests.models.kinds import KINDS, plain_model
from tests.ranks import run_on_ranks

WORLD = 4
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
THREE = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 6}
LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
TABLE = {
    "llama, three heads": ("LlamaConfig", THREE),
    "qwen2, biases and tied embeddings": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3, norms of queries and keys": ("Qwen3Config", {}),
    "phi3, fused weights": ("Phi3Config", {}),
    "mistral, sliding window": ("MistralConfig", {"sliding_window": 4}),
    "deepseek_v3, latent attention": ("DeepseekV3Config", {**LATENT, "moe_intermediate_size": 16}),
    "qwen3_moe, experts": ("Qwen3MoeConfig", {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
MODELS = {name: getattr(transformers, kind)(**SIZES | keys) for name, (kind, keys) in TABLE.items()} | {
    name: KINDS[name]
    for name in ("gemma2, capped", "gpt_oss, sinks", "llama4, chunks and temperature", "qwen3_5, gated delta net")
}
# (Ulysses, ring); three heads cannot be divided by two.
LAYOUTS = {"ring": (1, 2), "both": (2, 2), "long ring": (1, 4)}
CASES = [(name, "both") for name in MODELS if "three heads" not in name]
CASES += [(name, "ring") for name in MODELS if name.startswith(("llama,", "qwen3,", "mistral", "gpt_oss"))]
CASES += [("llama, three heads", "long ring"), ("mistral, sliding window", "long ring"), ("critic", "both")]
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
OPTIM = OptimConfig(lr=0.01, eps=0.01, clip_grad=0.5)
# A step moves weights by a hundredth of their size, so the rounding of float32 weights is 1e-5 of it.
BOUNDS = {"scores": 1e-5, "gradients": 1e-5, "step": 2e-5}


def plain_scores(model, samples: Batch, critic: bool) -> torch.Tensor:
    """Return log-probs or values of the response tokens, one sample at a time, without packing."""
    column, scores = samples.dictionary("prompt"), []
    for place, answer in zip(column.index, samples.ragged("response").rows(), strict=True):
        row, length = torch.cat([column.values[place], answer]).long(), len(answer)
        output = model(input_ids=row[None], use_cache=False, output_hidden_states=critic)
        if critic:
            scores.append(output.hidden_states[-1][0, -length - 1 : -1].sum(-1) / 10)
        else:
            logits = torch.log_softmax(output.logits[0, -length - 1 : -1], -1)
            scores.append(logits.gather(-1, row[-length:, None])[:, 0])
    return torch.cat(scores)


def loss_of(scores: torch.Tensor) -> torch.Tensor:
    return (scores * torch.linspace(-1, 1, len(scores), dtype=scores.dtype)).sum()


def after_step(parameters, step) -> dict[str, torch.Tensor]:
    before = [each.detach().clone() for each in parameters.values()]
    step()
    return {name: each.detach() - old for (name, each), old in zip(parameters.items(), before, strict=True)}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def expected_of(folder: Path, critic: bool) -> dict[str, dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **EAGER).eval()
    scores = plain_scores(model, trial_samples(), critic)
    loss_of(scores).backward()
    learning = {name: each for name, each in model.named_parameters() if each.grad is not None}
    gradients = {name: each.grad.clone() for name, each in learning.items()}
    torch.nn.utils.clip_grad_norm_(learning.values(), OPTIM.clip_grad)
    optimizer = torch.optim.AdamW(
        learning.values(), OPTIM.lr, betas=tuple(OPTIM.betas), eps=OPTIM.eps, weight_decay=OPTIM.weight_decay
    )
    return {"scores": {"": scores.detach()}, "gradients": gradients, "step": after_step(learning, optimizer.step)}


def found_of(folder: Path, layout: str, critic: bool) -> dict[str, dict[str, torch.Tensor]]:
    heads, ring = LAYOUTS[layout]
    spec = ModelSpec(str(folder), sequence_parallel_size=heads * ring, ring_size=ring, gradient_checkpointing=True)
    model = sharded_model(ScalarModel if critic else PolicyModel, spec, get_device("cpu")).train()
    if critic:
        model.score.requires_grad_(False).weight.to_local().fill_(0.1)
    samples = trial_samples()
    output = model(pack(samples, torch.device("cpu")))
    scores = output if critic else output.log_probs
    (loss_of(scores) * heads * ring).backward()  # FSDP takes the mean over all ranks
    learning = {f"{'model.' * critic}{name.removeprefix('model.')}": each for name, each in model.named_parameters()
                if each.grad is not None}  # fmt: skip
    gradients = {name: whole(each.grad).clone() for name, each in learning.items()}
    optimizer = make_optimizer(torch.nn.ParameterList(learning.values()), OPTIM, get_device("cpu"))
    clip_gradients(list(learning.values()), OPTIM.clip_grad)
    moved = after_step(learning, optimizer.step)
    moved = {name: whole(each).clone() for name, each in moved.items()}
    return {"scores": {"": scores.detach()}, "gradients": gradients, "step": moved}


def rank_main(rank: int, world: int, folder: Path) -> None:
    found = {}
    for name, layout in CASES:
        critic = name == "critic"
        path = folder / ("qwen3, norms of queries and keys" if critic else name)
        found[name, layout] = found_of(path, layout, critic)
    if rank in (0, world - 1):
        torch.save(found, folder / f"rank_{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of transformers by model, and the results of the first and the last rank."""
    folder = tmp_path_factory.mktemp("ring")
    expected = {}
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = plain_model(name) if name in KINDS else AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / name)
        expected[name] = expected_of(folder / name, critic=False)
    expected["critic"] = expected_of(folder / "qwen3, norms of queries and keys", critic=True)
    run_on_ranks(rank_main, WORLD, folder)
    return expected, [torch.load(folder / f"rank_{rank}.pt") for rank in (0, WORLD - 1)]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_ring_computes_scores_gradients_and_a_step_of_one_process(results, name, layout):
    expected, ranks = results
    for found in ranks:
        for part, bound in BOUNDS.items():
            # transformers computes gated delta nets in float32, also in the reference.
            bound = 5e-5 if "delta" in name and part != "scores" else bound
            one, other = found[name, layout][part], expected[name][part]
            other = {each: values for each, values in other.items() if each in one or values.any()}
            assert distance(one, other) < bound, part


def flash_double(backward: bool):
    """torch's flash operators by their documentation: masks are aligned with the last query and the last key."""

    def masked_scores(q, k, starts_q, starts_k, *_, scale, window_size_left, window_size_right, causal):
        assert causal == (window_size_right == 0)
        for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
            apart = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)
            hidden = (apart < 0) & causal | (apart > window_size_left) & (window_size_left >= 0)
            keys = k[k0:k1].repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1)
            scores = q[q0:q1].transpose(0, 1) @ keys.mT * scale
            yield slice(q0, q1), slice(k0, k1), scores.masked_fill(hidden, -torch.inf)

    def forward(q, k, v, starts_q, starts_k, *lengths, return_debug_mask, **options):
        causal, output, total = lengths[-1], torch.zeros(*q.shape[:2], v.shape[-1]), torch.zeros(q.shape[1], len(q))
        for rows, keys, scores in masked_scores(q, k, starts_q, starts_k, **options, causal=causal):
            values = v[keys].repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1)
            output[rows], total[:, rows] = (scores.softmax(-1) @ values).transpose(0, 1), scores.logsumexp(-1)
        return output, total, torch.zeros(2), torch.zeros(0), None

    def gradients(gradient, q, k, v, output, total, starts_q, starts_k, *lengths, **options):
        causal, repeats = lengths[3], q.shape[1] // k.shape[1]
        found = [torch.zeros_like(each) for each in (q, k, v)]
        for rows, keys, scores in masked_scores(q, k, starts_q, starts_k, **options, causal=causal):
            heads = [each.repeat_interleave(repeats, 1).transpose(0, 1) for each in (k[keys], v[keys])]
            weights, coming = (scores - total[:, rows, None]).exp(), gradient[rows].transpose(0, 1)
            inner = (gradient[rows] * output[rows]).sum(-1).mT[..., None]
            of_scores = weights * (coming @ heads[1].mT - inner) * options["scale"]
            found[0][rows] = (of_scores @ heads[0]).transpose(0, 1)
            for to, each in zip(found[1:], (of_scores.mT @ q[rows].transpose(0, 1), weights.mT @ coming), strict=True):
                to[keys] += each.transpose(0, 1).unflatten(1, (-1, repeats)).sum(2)
        return found

    return gradients if backward else forward


@pytest.mark.parametrize("window", [None, 3])
def test_flash_kernels_compute_the_products_of_a_slice(window):
    """Tested with a double of the operators, because there is no device."""
    plan = AttentionPlan((Segment(0, 3), Segment(3, 6, (0, 3)), Segment(6, 12, (0, 3)), Segment(12, 14)))
    generator = torch.Generator().manual_seed(0)
    query, keys, values, gradient = (torch.randn(7, heads, 8, generator=generator) for heads in (4, 2, 2, 4))
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    products = [Rounds(query, plan, Kind(window=window), group) for _ in range(2)]
    products[1].operators = flash_double(False), flash_double(True)
    for number in (0, 1):
        (output, sums), (by_kernel, sums_of_kernel) = (each.forward(query, keys, values, number) for each in products)
        assert torch.allclose(output, by_kernel, atol=1e-6)
        assert torch.allclose(sums, sums_of_kernel, atol=1e-6)
        saved = gradient, output, sums.clamp(min=0), (gradient * output).sum(-1)
        found = [[torch.zeros_like(each) for each in (query, keys, values)] for _ in products]
        for each, sums_to in zip(products, found, strict=True):
            each.backward(query, keys, values, number, saved, *sums_to)
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*found, strict=True))


def test_parts_of_a_plan_by_hand():
    # A prompt of 3, and two responses that continue it, in two slices of 4.
    plan = AttentionPlan((Segment(0, 3), Segment(3, 5, (0, 3)), Segment(5, 8, (0, 3))))
    first, *others = parts_of(plan, 4, 1, 0)
    assert [(first.queries, first.keys, first.before)] == [(slice(0, 1), (slice(0, 3), slice(3, 4)), 4)]
    assert [(part.queries, part.keys, part.before) for part in others] == [(slice(1, 4), (slice(0, 3),), 3)]
    assert [(part.queries, part.keys, part.before) for part in parts_of(plan, 4, 1, 1)] == [
        (slice(0, 1), (slice(0, 1),), 0), (slice(1, 4), (slice(1, 4),), 0),
    ]  # fmt: skip


def test_heads_of_recurrent_layers_are_divided_among_all_ranks():
    config = KINDS["qwen3_5, gated delta net"]
    key = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    assert heads_problem(config, 2, key, 2) is None
    assert heads_problem(config, 1, key, 8) == (
        f"actor_rollout_ref.actor.ring_attention_size=8 times {key}=1 does not divide the 4 recurrent heads. Use a "
        "product of 1, 2, 4."
    )
    assert "share sequences further by ring_attention_size" in str(heads_problem(config, 3, key))
