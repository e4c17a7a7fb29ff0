"""The packed forward, compared with transformers one sample at a time."""

import pytest
import torch
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

from rltrain.common.columns.batch import Batch
from rltrain.common.device import get_device
from rltrain.models.attention.packing import pack, pack_rows
from rltrain.models.forward import PolicyModel, ScalarModel
from rltrain.models.weights.shard import reshard, sharded_model
from rltrain.models.weights.spec import ModelSpec
from tests.batches import batch_of_rows, prompt_lengths, rows_of
from tests.distance import distance

pytestmark = pytest.mark.usefixtures("process_group")

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
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


@pytest.fixture(params=FAMILIES)
def model_folder(request, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[request.param]).save_pretrained(tmp_path)
    return str(tmp_path)


def make_policy(folder: str, gradient_checkpointing: bool = False):
    spec = ModelSpec(folder, gradient_checkpointing=gradient_checkpointing)
    return sharded_model(PolicyModel, spec, get_device("cpu"))


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(2, 128, (p + r,), generator=generator, dtype=torch.int32) for p, r in LENGTHS]
    return batch_of_rows(rows, [prompt for prompt, _ in LENGTHS])


def by_transformers(model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of the responses and entropies at TEMPERATURE, sample by sample."""
    log_probs, entropies = [], []
    for row, prompt in zip(rows_of(batch), prompt_lengths(batch), strict=True):
        logits = model(input_ids=row.long()[None], use_cache=False).logits[0, prompt - 1 : -1]
        log_pi = torch.log_softmax(logits.float() / TEMPERATURE, -1)
        log_probs.append(log_pi.gather(-1, row.long()[prompt:, None])[:, 0])
        entropies.append(-(log_pi.exp() * log_pi).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def gradients_of(policy) -> dict[str, torch.Tensor]:
    """Return the gradients by transformers' names, and clear them."""
    found = {
        name.removeprefix("model."): each.grad.full_tensor().clone()
        for name, each in policy.named_parameters()
        if each.grad is not None
    }
    policy.zero_grad()
    return found


def test_packed_values_and_gradients_equal_transformers(model_folder):
    policy, batch = make_policy(model_folder, gradient_checkpointing=True), make_batch()
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    policy.train()
    log_probs, entropy, *_ = policy(pack(batch, torch.device("cpu")), TEMPERATURE, True)
    expected, expected_entropy = by_transformers(plain, batch)
    assert distance(log_probs, expected) < 5e-6
    assert distance(entropy, expected_entropy) < 5e-6
    (log_probs.sum() + 0.3 * entropy.sum()).backward()
    (expected.sum() + 0.3 * expected_entropy.sum()).backward()
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert distance(gradients_of(policy), theirs) < 1e-5


# (prompt, answers): a group, an empty answer in a group, an answer too long to share, one answer alone, a group again.
GROUPS = [(9, [7, 1, 12]), (20, [3, 0, 5]), (1, [4, 17, 2]), (6, [5]), (9, [2, 2])]


def make_groups() -> Batch:
    generator = torch.Generator().manual_seed(2)
    rows, prompts = [], []
    for length, answers in GROUPS:
        prompt = torch.randint(2, 20, (length,), generator=generator, dtype=torch.int32)
        for answer in answers:
            rows.append(torch.cat([prompt, torch.randint(2, 20, (answer,), generator=generator, dtype=torch.int32)]))
            prompts.append(length)
    return batch_of_rows(rows, prompts)


def both_ways(model, scores):
    """Return the scores of the groups and the gradients of every weight, with shared prompts and without."""
    found = []
    for share in (True, False):
        inputs = pack(make_groups(), torch.device("cpu"), share=share)
        each = scores(model(inputs, 0.7, True) if isinstance(model, PolicyModel) else model(inputs))
        (each * torch.linspace(-1, 1, each.numel()).view_as(each)).sum().backward()
        found.append((each.detach(), list(gradients_of(model).values())))
    return found


def test_a_shared_prompt_changes_no_log_prob_and_no_gradient(model_folder):
    policy = make_policy(model_folder, gradient_checkpointing=True).train()
    (found, gradient), (expected, expected_gradient) = both_ways(policy, lambda each: torch.stack(each[:2]))
    assert distance(found, expected) < 5e-6
    assert distance(gradient, expected_gradient) < 1e-5


def test_sharing_the_prompt_changes_no_value(tiny_model):
    critic = sharded_model(ScalarModel, ModelSpec(str(tiny_model)), get_device("cpu"))
    with torch.no_grad():
        critic.score.weight.to_local().normal_()
    (found, gradient), (expected, expected_gradient) = both_ways(critic, lambda each: each)
    assert float(expected.abs().max()) > 0.1
    assert distance(found, expected) < 5e-6
    assert distance(gradient, expected_gradient) < 1e-5


def test_a_shared_prompt_is_computed_once():
    inputs = pack(make_groups(), torch.device("cpu"))
    # Prompt once; answers without their last token; what does not share brings its own prompt.
    shared = [9 + 6 + 0 + 11, 20 + 2 + 4, 1 + 3 + 1, 1 + 16, 6 + 4, 9 + 1 + 1]
    assert len(inputs.tokens) == inputs.plan.num_tokens == sum(shared)
    assert len(pack(make_groups(), torch.device("cpu"), share=False).tokens) > len(inputs.tokens) + 40
    # Order of samples: predictors and labels stay in it.
    assert torch.equal(inputs.labels, make_groups().ragged("response").values.long())


def test_an_idle_pass_has_zero_gradient(tiny_model):
    policy = make_policy(str(tiny_model))
    log_probs, *_ = policy(pack(Batch(), torch.device("cpu")), 1.0, False)
    assert log_probs.shape == (0,)
    log_probs.sum().backward()
    assert all(not p.grad.full_tensor().any() for p in policy.parameters() if p.grad is not None)


def test_values_are_the_head_before_every_answer_token(model_folder):
    critic = sharded_model(ScalarModel, ModelSpec(model_folder, gradient_checkpointing=True), get_device("cpu"))
    batch = make_batch()
    # A head that is not in the checkpoint starts at 0.
    assert not critic(pack(batch, torch.device("cpu"))).detach().any()
    reshard(critic)
    torch.manual_seed(0)
    head = torch.randn(1, 64)
    with torch.no_grad():
        critic.score.weight.to_local().copy_(head)
    plain = AutoModel.from_pretrained(model_folder, attn_implementation="eager").eval()
    expected = []
    for row, (prompt, answer) in zip(rows_of(batch), LENGTHS, strict=True):
        with torch.no_grad():
            states = plain(row.long()[None], use_cache=False).last_hidden_state[0, prompt - 1 : prompt - 1 + answer]
        expected.append((states @ head.T)[:, 0])
    found = critic(pack(batch, torch.device("cpu"))).detach()
    assert distance(found, torch.cat(expected)) < 1e-5
    whole = critic(pack_rows([row.tolist() for row in rows_of(batch)], torch.device("cpu")))
    last = [plain(row.long()[None], use_cache=False).last_hidden_state[0, -1] @ head[0] for row in rows_of(batch)]
    assert distance(whole, torch.stack(last)) < 1e-5


def test_layers_recomputed_from_the_host_have_the_gradients_of_others(tmp_path, monkeypatch):
    """The gradients are equal bit for bit, and only the inputs of the layers are moved to the host."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES["llama"]).save_pretrained(tmp_path)
    shapes, gradients = [], []

    def save_elsewhere(**_):
        def pack(tensor):
            shapes.append(tuple(tensor.shape))
            return tensor.clone()

        return torch.autograd.graph.saved_tensors_hooks(pack, torch.clone)

    # On a CPU what is to go to the host is there already.
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", save_elsewhere)
    for offload in (False, True):
        spec = ModelSpec(str(tmp_path), gradient_checkpointing=True, activation_offload=offload)
        policy = sharded_model(PolicyModel, spec, get_device("cpu")).train()
        policy(pack(make_batch(), torch.device("cpu")), TEMPERATURE).log_probs.sum().backward()
        gradients.append(list(gradients_of(policy).values()))
        assert bool(shapes) == offload
    tokens, config = len(pack(make_batch(), torch.device("cpu")).tokens), policy.model.config
    assert shapes == [(1, tokens, config.hidden_size)] * config.num_hidden_layers
    assert all(map(torch.equal, *gradients))
