"""Experts and latent attention in vLLM: after every sync it has the trainer's weights, or reports the missing ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from rltrain.common.errors import SyncError
from rltrain.data.images import EncodedPrompt
from rltrain.models.routing import Routing
from rltrain.models.weights.names import CheckpointNames, gathered_weights
from rltrain.workers.rollout.contract import Sampling
from rltrain.workers.rollout.conversations import Conversations, routed_experts_of
from rltrain.workers.rollout.vllm.weights import derived_weights
from tests.tiny import CHARACTERS, SPECIALS, save_tiny_tokenizer
from tests.workers.engines import generate, jobs_of, queue_of, rollout_of, running_engine, settings_of
from tests.workers.test_engine_contract import log_probs_of

SIZES = {
    "vocab_size": len(CHARACTERS) + len(SPECIALS), "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "eos_token_id": 1, "pad_token_id": 0,
    "bos_token_id": None, "initializer_range": 0.2, "tie_word_embeddings": False, "num_experts_per_tok": 2,
}  # fmt: skip
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        moe_intermediate_size=64, num_experts=4, num_key_value_heads=2, head_dim=32, norm_topk_prob=True, **SIZES
    ),
    # vLLM's CPU kernel has this size of latent attention alone.
    "deepseek_v3": DeepseekV3Config(
        moe_intermediate_size=64, num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=512, qk_rope_head_dim=64, q_lora_rank=32, qk_nope_head_dim=32, v_head_dim=32,
        topk_method="noaux_tc", scoring_func="sigmoid", **SIZES,
    ),
}  # fmt: skip
TEXT = np.array([2, 5, 6, 3, 8, 1, 7, 9, 4, 4, 12, 13], dtype=np.int32)
pytestmark = pytest.mark.filterwarnings("ignore")


class Policy(nn.Module):
    def __init__(self, model) -> None:
        super().__init__()
        self.model = model


@pytest.fixture(scope="module", params=["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.long)])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    path = tmp_path_factory.mktemp(family)
    save_tiny_tokenizer(path)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[family]).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(folder):
    # Long prompts are computed in parts, and where their tokens went is told all the same.
    rollout = rollout_of(name="vllm", max_num_seqs=8, enable_prefix_caching=False, max_num_batched_tokens=16)
    with running_engine(replace(settings_of(str(folder), rollout), with_experts=True)) as engine:
        yield engine


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def gap(engine, model) -> float:
    return float((engine.log_probs(EncodedPrompt(TEXT)) - log_probs_of(model, TEXT[:1], TEXT[1:].tolist())).abs().max())


def bring(engine, model, keep=lambda weight: True) -> None:
    engine.wake_weights()
    weights = gathered_weights(Policy(model), torch.float32, 1 << 14, CheckpointNames(model))
    engine.load_weights(weight for weight in weights if keep(weight))
    engine.wake_cache()


def test_vllm_answers_with_the_experts_of_every_sync(engine, model):
    for update in range(3):
        bring(engine, model)
        assert gap(engine, model) < 1e-4
        answers = generate(engine, Sampling(16, ignore_eos=True), [TEXT[:4]], 4, step=update)
        for answer, said in zip(answers.tokens.rows(), answers.log_probs.rows(), strict=True):
            expected = log_probs_of(model, TEXT[:4], answer.tolist())
            assert float((said - expected).abs().max()) < 1e-4
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                torch.manual_seed(number)
                parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.mark.parametrize("sampling", [Sampling(12), Sampling(12, greedy=True)], ids=["drawn", "greedy"])
def test_vllm_tells_where_its_tokens_went(engine, model, sampling):
    bring(engine, model)
    # Lengths that differ, and more answers than run at once.
    queue = queue_of(jobs_of([TEXT[:3], np.tile(TEXT, 3), TEXT], 4))
    source = Conversations(queue, 1 << 30)
    engine.generate(source, sampling)
    routed = routed_experts_of(source.all).rows()
    routing = Routing(model, model.config)
    for answer, found in zip(source.all, routed, strict=True):
        routing.record()
        with torch.no_grad():
            model(torch.tensor([[*answer.prompt.tolist(), *answer.tokens.tolist()[:-1]]]), use_cache=False)
        assert torch.equal(found.sort(-1)[0], routing.recorded().sort(-1)[0])
    assert sampling.greedy or len({len(answer.tokens) for answer in source.all}) > 1


def test_weights_that_vllm_did_not_get_are_named(engine, model):
    with pytest.raises(SyncError, match=r"did not get 1 of its weights from the trainer: .*layers.1.*o_proj.weight"):
        bring(engine, model, lambda weight: "layers.1.self_attn.o_proj" not in weight.name)
    with pytest.raises(SyncError, match=r"did not get \d of its weights .*experts"):
        bring(engine, model, lambda weight: ".experts." not in weight.name)
    bring(engine, model)
    assert gap(engine, model) < 1e-4


def test_models_with_derived_weights_are_known(family):
    assert derived_weights(CONFIGS[family])
    assert not derived_weights(Qwen3MoeConfig(num_experts=0))
