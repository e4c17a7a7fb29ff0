import itertools
from dataclasses import asdict, dataclass

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from rltrain.common.device import Device, get_device
from rltrain.common.errors import ConfigError, DataError
from rltrain.workers.rollout.contract import Sampling
from rltrain.workers.rollout.embedded.engine import HFRollout
from rltrain.workers.rollout.embedded.kv import ROOM
from tests.distance import distance
from tests.models.kinds import KINDS
from tests.models.kinds import plain_model as plain_kind
from tests.workers.engines import EOS, jobs_of, queue_of, rollout_of, serve, settings_of
from tests.workers.engines import generate as generate_with
from tests.workers.test_engine_contract import answers, log_probs_of, weights_of

VOCABULARY = 40
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": EOS,
    "pad_token_id": 0, "bos_token_id": None,
    "initializer_range": 0.3,
}  # fmt: skip
FAMILIES = {
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES),
    "mistral, a window of 5": MistralConfig(**SIZES, sliding_window=5),
    "qwen2, a window of 7 in one layer": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
}
# Lengths 4, 3, 11, 1, 2, 23.
PROMPTS = [
    np.random.default_rng(number).integers(2, VOCABULARY, length).astype(np.int32)
    for number, length in enumerate((4, 3, 11, 1, 2, 23))
]
LONG = Sampling(80, ignore_eos=True)


def plain_model(family="qwen3", dtype=torch.float32):
    if family in KINDS:
        return plain_kind(family)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[family].__class__(**FAMILIES[family].to_dict())).to(dtype).eval()


@pytest.fixture(scope="module")
def plain():
    return plain_model()


@dataclass(frozen=True)
class Card(Device):
    """A CPU with memory for this many rows of `SIZES` of 128 tokens and one more block."""

    rows: float = 1e6

    def free_memory_bytes(self) -> int:
        return int(self.rows * (128 + self.cache_columns) * 2 * 2 * 2 * 16 * 4 * ROOM)


def make_engine(plain, *, block=64, ends=(EOS,), rows=1e6, dtype=torch.float32, max_model_len=128, **keys):
    """block: columns of a block of the cache. rows: number of rows that fit into memory."""
    device = Card(**asdict(get_device("cpu")) | {"cache_columns": block, "rows": rows})
    rollout = rollout_of(**{"max_num_seqs": 64, **keys})
    config = plain.config.__class__(**plain.config.to_dict())
    engine = HFRollout(settings_of(config, rollout, dtype=dtype, device=device, max_model_len=max_model_len, ends=ends))
    engine.load_weights(weights_of(plain))
    engine.wake_cache()
    return engine


def count_tokens(engine):
    """Record the sizes [rows, tokens] of all later forward passes."""
    sizes = []
    engine.model.base_model.register_forward_pre_hook(
        lambda _, args, given: sizes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    return sizes


def generate(engine, num_samples, sampling):
    """Return responses in the order of the prompts."""
    return generate_with(engine, sampling, PROMPTS, num_samples)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("family", "block"), [*itertools.product(FAMILIES, (4, 64)), *((family, 4) for family in KINDS)]
)
def test_greedy_takes_the_likeliest_token_of_every_family(family, block):
    plain = plain_model(family)
    limits = {"max_num_seqs": 2, "block": block, "max_model_len": 60, "max_num_batched_tokens": 8}
    generated = generate(make_engine(plain, **limits), 1, Sampling(40, greedy=True, ignore_eos=True))
    assert generated.tokens.lengths.tolist() == [40, 40, 40, 40, 40, 37]
    for prompt, answer in zip(PROMPTS, generated.tokens.rows(), strict=True):
        whole = torch.cat([torch.from_numpy(prompt), answer]).long()[None]
        logits = plain(whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert answer.tolist() == logits.argmax(-1).tolist()


@pytest.mark.few(5)
@pytest.mark.parametrize("family", [*FAMILIES, *KINDS])
def test_log_probs_are_the_trainers_at_the_sampling_temperature(family):
    plain = plain_model(family)
    engine = make_engine(plain, max_num_seqs=7, block=8, max_num_batched_tokens=6)
    generated = generate(engine, 3, Sampling(40, temperature=0.7, top_p=0.9))
    for number, (answer, log_probs) in enumerate(zip(generated.tokens.rows(), generated.log_probs.rows(), strict=True)):
        assert distance(log_probs, log_probs_of(plain, PROMPTS[number // 3], answer.tolist(), 0.7)) < 2e-5


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 9, "block": 4},
        {"max_num_batched_tokens": 5, "enable_chunked_prefill": False},
        {"max_num_seqs": 5, "max_num_batched_tokens": 1, "block": 16},
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "mistral, a window of 5"])
def test_an_answer_depends_on_its_seed_alone(family, limits):
    """It does not depend on the number of concurrent responses, its start, the chunks of prompts, or the
    cache layout."""
    plain = plain_model(family)
    expected = generate(make_engine(plain), 4, Sampling(40))
    generated = generate(make_engine(plain, **limits), 4, Sampling(40))
    assert generated.tokens == expected.tokens
    assert distance(generated.log_probs.values, expected.log_probs.values) < 2e-5


def test_prompt_and_answer_together_stay_within_max_model_len(plain):
    engine = make_engine(plain, max_model_len=24)
    generated = generate(engine, 1, LONG)
    assert generated.tokens.lengths.tolist() == [24 - len(prompt) for prompt in PROMPTS]
    assert generated.truncated.all()
    with pytest.raises(DataError, match=r"prompt of 23 tokens leaves no space .*max_model_len=23"):
        generate(make_engine(plain, max_model_len=23), 1, LONG)


def test_a_prompt_is_computed_once_for_all_its_answers(plain):
    engine = make_engine(plain, max_num_seqs=48, max_num_batched_tokens=10)
    sizes = count_tokens(engine)
    generate(engine, 8, Sampling(5, ignore_eos=True))
    prefills = [tokens for rows, tokens in sizes if rows == 1]
    assert sum(prefills) == sum(len(prompt) for prompt in PROMPTS)
    assert max(prefills) == 10
    assert [rows for rows, _ in sizes if rows > 1] == [48] * 4


def test_a_waiting_job_enters_as_soon_as_another_has_left(plain):
    """Waves would each take as long as their longest response."""
    jobs = jobs_of(PROMPTS * 4, 1)
    engine = make_engine(plain, max_num_seqs=2)
    sizes = count_tokens(engine)
    found = serve(engine, queue_of(jobs), Sampling(60, temperature=1.2))
    lengths = found.tokens.lengths.tolist()
    steps = sum((rows == 1 and tokens == 1) or rows == 2 for rows, tokens in sizes)
    assert steps < sum(max(lengths[first : first + 2]) for first in range(0, 24, 2)) - 5
    assert max(rows for rows, _ in sizes) == 2


def test_bf16_is_repeatable_and_close_to_the_trainer():
    plain = plain_model(dtype=torch.bfloat16)
    engine = make_engine(plain, dtype=torch.bfloat16)
    generated = generate(engine, 3, Sampling(70, ignore_eos=True))
    assert generate(engine, 3, Sampling(70, ignore_eos=True)).tokens == generated.tokens
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    expected = [log_probs_of(plain, *each) for each in zip(prompts, answers(generated), strict=True)]
    assert (generated.log_probs.values - torch.cat(expected)).abs().mean() < 0.05


def test_the_training_weights_are_used_where_they_lie(plain):
    engine = make_engine(plain)
    theirs = dict(plain.named_parameters())
    for name, weight in engine.model.named_parameters():
        assert weight.data_ptr() == theirs[name].data_ptr()


def test_fewer_answers_run_at_once_where_memory_is_short(plain):
    engine = make_engine(plain, rows=14.5, gpu_memory_utilization=0.5)
    sizes = count_tokens(engine)
    generated = generate(engine, 4, Sampling(20))
    assert max(rows for rows, _ in sizes) == 7
    assert generated.tokens == generate(make_engine(plain), 4, Sampling(20)).tokens
    with pytest.raises(ConfigError, match=r"holds 7 responses of up to 128 tokens .* 8 responses .*max_num_seqs=7,"):
        generate(engine, 8, Sampling(20))


def test_an_engine_without_weights_refuses(plain):
    engine = make_engine(plain)
    engine.sleep()
    some = [piece for piece in weights_of(plain) if "layers.1" not in piece.name]
    with pytest.raises(RuntimeError, match=r"left .* weights of the rollout engine empty"):
        engine.load_weights(iter(some))
