"""The packed forward against transformers, one sample at a time."""

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CohereConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from rltrain.batch import Batch
from rltrain.device import get_device
from rltrain.models import attention
from rltrain.models.forward import PolicyModel, ScalarModel, pack, pack_whole
from rltrain.models.load import load_config
from rltrain.models.shard import make_mesh, named_weights, sharded_model
from rltrain.ragged import Ragged

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
FAMILIES = {
    "qwen2_tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES),
    "mistral_sliding_window": MistralConfig(**SIZES, sliding_window=4),
    "granite_logits_scaling": GraniteConfig(**SIZES, logits_scaling=3.0),
    "cohere_logit_scale": CohereConfig(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=16),
}
# (prompt, answer) lengths; one answer is empty.
LENGTHS = [(5, 7), (3, 1), (9, 12), (4, 0)]
TEMPERATURE = 0.7


@pytest.fixture(scope="module", autouse=True)
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=FAMILIES)
def model_folder(request, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[request.param]).save_pretrained(tmp_path)
    return str(tmp_path)


def make_policy(folder: str, gradient_checkpointing: bool = False):
    device = get_device("cpu")
    return sharded_model(
        PolicyModel,
        folder, load_config(folder), make_mesh(device), device,
        master_dtype=torch.float32, compute_dtype=torch.float32, gradient_checkpointing=gradient_checkpointing,
    )  # fmt: skip


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(2, 128, (p + r,), generator=generator, dtype=torch.int32) for p, r in LENGTHS]
    return Batch(
        {
            "tokens": Ragged.from_rows(rows),
            "prompt_length": torch.tensor([p for p, _ in LENGTHS]),
            "response_length": torch.tensor([r for _, r in LENGTHS]),
        }
    )


def by_transformers(model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs, entropies = [], []
    for row, (prompt, response) in zip(batch.ragged("tokens").rows(), LENGTHS, strict=True):
        log_pi = torch.log_softmax(model(row.long()[None], use_cache=False).logits[0].float() / TEMPERATURE, -1)
        log_pi = log_pi[prompt - 1 : prompt + response - 1]
        log_probs.append(log_pi.gather(-1, row.long()[prompt:, None])[:, 0])
        entropies.append(-(log_pi.exp() * log_pi).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def test_packed_log_probs_entropy_and_gradient_equal_transformers(model_folder):
    policy, batch = make_policy(model_folder, gradient_checkpointing=True), make_batch()
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    policy.train()
    log_probs, entropy, _ = policy(pack(batch, torch.device("cpu")), TEMPERATURE, True)
    expected, expected_entropy = by_transformers(plain, batch)
    assert torch.allclose(log_probs, expected, atol=2e-6)
    assert torch.allclose(entropy, expected_entropy, atol=5e-6)
    (log_probs.sum() + 0.3 * entropy.sum()).backward()
    (expected.sum() + 0.3 * expected_entropy.sum()).backward()
    found = {
        name.removeprefix("model."): p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None
    }
    for name, parameter in plain.named_parameters():
        scale = parameter.grad.abs().max().clamp(min=1e-3)
        assert torch.allclose(found[name] / scale, parameter.grad / scale, atol=2e-5), name


def test_an_idle_pass_has_zero_gradient(tiny_model):
    policy = make_policy(str(tiny_model))
    log_probs, *_ = policy(pack(Batch(), torch.device("cpu")), 1.0, False)
    assert log_probs.shape == (0,)
    log_probs.sum().backward()
    assert all(not p.grad.full_tensor().any() for p in policy.parameters() if p.grad is not None)


def test_samples_do_not_see_each_other(tiny_model):
    policy = make_policy(str(tiny_model)).eval()
    first, second = torch.tensor([2, 5, 6, 7], dtype=torch.int32), torch.tensor([2, 9, 9, 9, 9], dtype=torch.int32)

    def log_probs(rows):
        count = len(rows)
        batch = Batch(
            {
                "tokens": Ragged.from_rows(rows),
                "prompt_length": torch.full((count,), 2),
                "response_length": torch.zeros(count),
            }
        )
        with torch.no_grad():
            return policy(pack(batch, torch.device("cpu")), 1.0, False)[0]

    assert torch.allclose(log_probs([first, second])[2:], log_probs([second]), atol=1e-6)


def test_a_model_that_drops_keyword_arguments_is_refused(tiny_model):
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="packed sequences cannot be trained"):
        attention.packed_attention(torch.nn.Identity(), q, q, q, None)


def test_weights_come_out_as_they_went_in(model_folder):
    plain = dict(AutoModelForCausalLM.from_pretrained(model_folder).named_parameters())
    found = dict(named_weights(make_policy(model_folder)))
    for name, parameter in plain.items():
        assert torch.equal(found[name], parameter), name


def test_values_are_the_classifiers_head_at_every_place_before_an_answer_token(model_folder):
    config = load_config(model_folder)
    device = get_device("cpu")
    critic = sharded_model(
        ScalarModel, model_folder, config, make_mesh(device), device,
        master_dtype=torch.float32, compute_dtype=torch.float32, gradient_checkpointing=True,
    )  # fmt: skip
    batch = make_batch()
    # A head that is not in the checkpoint starts at 0.
    assert not critic(pack(batch, torch.device("cpu"))).detach().any()
    torch.manual_seed(0)
    head = torch.randn(1, 64)
    with torch.no_grad():
        critic.score.weight.to_local().copy_(head)
    plain = AutoModel.from_pretrained(model_folder, attn_implementation="eager").eval()
    expected = []
    for row, (prompt, answer) in zip(batch.ragged("tokens").rows(), LENGTHS, strict=True):
        with torch.no_grad():
            states = plain(row.long()[None], use_cache=False).last_hidden_state[0, prompt - 1 : prompt - 1 + answer]
        expected.append((states @ head.T)[:, 0])
    found = critic(pack(batch, torch.device("cpu"))).detach()
    assert torch.allclose(found, torch.cat(expected), atol=1e-5)
    whole = critic(pack_whole([row.tolist() for row in batch.ragged("tokens").rows()], torch.device("cpu")))
    last = [
        plain(row.long()[None], use_cache=False).last_hidden_state[0, -1] @ head[0]
        for row in batch.ragged("tokens").rows()
    ]
    assert torch.allclose(whole, torch.stack(last), atol=1e-5)
