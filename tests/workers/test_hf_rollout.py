import itertools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from rltrain.base.errors import ConfigError, DataError
from rltrain.data.images import EncodedPrompt
from rltrain.models.attention.recurrent import bytes_per_row
from rltrain.models.weights.names import Weight
from rltrain.workers.rollout.contract import Sampling
from rltrain.workers.rollout.embedded.engine import HFRollout, bytes_per_token
from rltrain.workers.rollout.embedded.kv import ROOM, KeyValues
from tests.distance import distance
from tests.models.kinds import KINDS
from tests.models.kinds import plain_model as plain_kind
from tests.workers.engines import EOS, jobs_of, queue_of, rollout_of, serve, settings_of
from tests.workers.engines import generate as generate_with

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


def weights_of(model):
    return (
        Weight(name, tensor.detach())
        for tensors in (model.named_parameters(), model.named_buffers())
        for name, tensor in tensors
    )


def make_engine(plain, max_num_seqs=64, block=None, dtype=torch.float32, **keys):
    config, max_model_len = plain.config.__class__(**plain.config.to_dict()), keys.pop("max_model_len", 128)
    rollout = rollout_of(max_num_seqs=max_num_seqs, **keys)
    engine = HFRollout(settings_of(config, rollout, dtype=dtype, max_model_len=max_model_len))
    engine._block = block or engine._block
    engine.load_weights(weights_of(plain))
    engine.wake_cache()
    return engine


def generate(engine, num_samples, sampling, prompts=PROMPTS, step=1):
    """Answers in the order of the prompts."""
    return generate_with(engine, sampling, prompts, num_samples, step)


def answers(generation):
    return [row.tolist() for row in generation.tokens.rows()]


def trainer_log_probs(model, prompt, answer, temperature=1.0):
    whole = torch.cat([torch.from_numpy(prompt.astype(np.int64)), answer.long()])
    logits = model(whole[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(-1, answer.long()[:, None])[:, 0]


def test_greedy_equals_transformers_while_rows_leave_and_enter(plain):
    generated = generate(make_engine(plain, max_num_seqs=2, block=4, max_model_len=28), 1, Sampling(30, greedy=True))
    for prompt, answer in zip(PROMPTS, answers(generated), strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        expected = plain.generate(ids, attention_mask=torch.ones_like(ids), max_length=28, do_sample=False)
        assert answer == expected[0, len(prompt) :].tolist()


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
        assert distance(log_probs, trainer_log_probs(plain, PROMPTS[number // 3], answer, 0.7)) < 2e-5


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"max_num_seqs": 4}, marks=pytest.mark.long),
        pytest.param({"max_num_seqs": 9, "block": 4}, marks=pytest.mark.long),
        pytest.param({"max_num_batched_tokens": 5}, marks=pytest.mark.long),
        {"max_num_batched_tokens": 5, "enable_chunked_prefill": False},
        {"max_num_seqs": 5, "max_num_batched_tokens": 1, "block": 16},
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "mistral, a window of 5"])
def test_an_answer_depends_on_its_seed_alone(family, limits):
    """Not on how many are generated at once, when it entered, how prompts were cut, or how the cache is laid out."""
    plain = plain_model(family)
    expected = generate(make_engine(plain), 4, Sampling(40))
    generated = generate(make_engine(plain, **limits), 4, Sampling(40))
    assert generated.tokens == expected.tokens
    assert distance(generated.log_probs.values, expected.log_probs.values) < 2e-5


def test_an_answer_depends_on_neither_order_nor_neighbours(plain):
    engine = make_engine(plain, max_num_seqs=8)
    expected = answers(generate(engine, 4, Sampling(40)))
    jobs = jobs_of(PROMPTS, 4)
    backwards = answers(serve(engine, queue_of(jobs[::-1]), Sampling(40)))
    assert [row for start in range(20, -1, -4) for row in backwards[start : start + 4]] == expected
    assert answers(serve(engine, queue_of(jobs[2:3]), Sampling(40))) == expected[8:12]


# At every run: test_greedy_equals_transformers_while_rows_leave_and_enter.
@pytest.mark.long
def test_rows_of_very_different_age_share_the_batch(plain):
    """Blocks of columns are dropped, holes are filled, prompts leave and longer ones come."""
    jobs = jobs_of(PROMPTS * 4, 3, seed=5)  # no draw comes within 1e-5 of the border between two tokens
    expected = serve(make_engine(plain), queue_of(jobs), Sampling(90))
    found = serve(make_engine(plain, max_num_seqs=6, block=4), queue_of(jobs), Sampling(90))
    assert found.tokens == expected.tokens
    assert expected.tokens.lengths.max() > 30 > 5 > expected.tokens.lengths.min()


def test_samples_of_a_prompt_and_of_another_step_differ(plain):
    engine = make_engine(plain)
    first, later = generate(engine, 6, Sampling(16)), generate(engine, 6, Sampling(16), step=2)
    assert len({tuple(row) for row in answers(first)[:6]}) > 3
    assert first.tokens != later.tokens


def test_finish_reasons_and_lengths(plain):
    generated = generate(make_engine(plain), 8, Sampling(10))
    assert len(set(generated.truncated.tolist())) == 2
    assert not generated.aborted.any()
    for answer, truncated in zip(answers(generated), generated.truncated.tolist(), strict=True):
        assert EOS not in answer[:-1]
        assert truncated == (answer[-1] != EOS)
        assert not truncated or len(answer) == 10


def test_ignore_eos_and_a_limit_of_one_token(plain):
    engine = make_engine(plain)
    everything = generate(engine, 2, Sampling(9, ignore_eos=True))
    assert everything.tokens.lengths.tolist() == [9] * 12
    assert everything.truncated.tolist() == [row[-1] != EOS for row in answers(everything)]
    assert generate(engine, 2, Sampling(1)).tokens.lengths.tolist() == [1] * 12


def test_prompt_and_answer_together_stay_within_max_model_len(plain):
    engine = make_engine(plain, max_model_len=24)
    generated = generate(engine, 1, LONG)
    assert generated.tokens.lengths.tolist() == [24 - len(prompt) for prompt in PROMPTS]
    assert generated.truncated.all()
    with pytest.raises(DataError, match=r"prompt of 23 tokens leaves no room .*max_model_len=23"):
        generate(make_engine(plain, max_model_len=23), 1, LONG)


def count_tokens(engine):
    """Sizes [rows, tokens] of the forward passes from now on."""
    sizes = []
    forward = engine._forward
    engine._forward = lambda tokens, *rest, **more: sizes.append(tuple(tokens.shape)) or forward(tokens, *rest, **more)
    return sizes


def test_a_prompt_is_computed_once_for_all_its_answers(plain):
    engine = make_engine(plain, max_num_seqs=48, max_num_batched_tokens=10)
    sizes = count_tokens(engine)
    generate(engine, 8, Sampling(5, ignore_eos=True))
    prefills = [tokens for rows, tokens in sizes if rows == 1]
    assert sum(prefills) == sum(len(prompt) for prompt in PROMPTS)
    assert max(prefills) == 10
    assert [rows for rows, _ in sizes if rows > 1] == [48] * 4


def test_a_waiting_job_enters_as_soon_as_another_has_left(plain):
    """Waves would take as long as the longest of each."""
    jobs = jobs_of(PROMPTS * 4, 1)
    engine = make_engine(plain, max_num_seqs=2)
    sizes = count_tokens(engine)
    found = serve(engine, queue_of(jobs), Sampling(60, temperature=1.2))
    lengths = found.tokens.lengths.tolist()
    steps = sum((rows == 1 and tokens == 1) or rows == 2 for rows, tokens in sizes)
    assert steps < sum(max(lengths[first : first + 2]) for first in range(0, 24, 2)) - 5
    assert max(rows for rows, _ in sizes) == 2


def test_a_job_is_told_of_when_its_last_answer_ends(plain):
    told = []
    jobs = jobs_of(PROMPTS, 3)
    found = serve(make_engine(plain), queue_of(jobs), Sampling(50), lambda job, texts: told.append((job.place, texts)))
    lengths = found.tokens.lengths.view(-1, 3).amax(1)
    assert sorted(place for place, _ in told) == list(range(6))
    assert all(lengths[a] <= lengths[b] for (a, _), (b, _) in itertools.pairwise(told))
    for place, texts in told:
        assert texts == answers(found)[3 * place : 3 * place + 3]
    ended = found.seconds.view(-1, 3).amax(1)
    assert all(ended[a] <= ended[b] for (a, _), (b, _) in itertools.pairwise(told))


class Stopping:
    """A queue that is stopped after some tokens."""

    def __init__(self, jobs, tokens):
        self._queue, self._tokens = queue_of(jobs), tokens

    def take(self, most):
        return self._queue.take(most) if self._tokens else []

    def ended(self, job):
        self._queue.ended(job)

    def stopped(self):
        self._tokens -= 1
        return not self._tokens


def test_what_is_running_when_the_source_stops_is_given_up(plain):
    expected = generate(make_engine(plain), 4, Sampling(40))
    told = []
    stopping = Stopping(jobs_of(PROMPTS, 4), 12)
    found = serve(make_engine(plain), stopping, Sampling(40), lambda job, texts: told.append(job.place))
    assert found.tokens.lengths.tolist() == expected.tokens.lengths.clamp(max=12).tolist()
    assert found.aborted.tolist() == (expected.tokens.lengths > 12).tolist()
    assert 0 < found.aborted.sum() < len(found.aborted)
    assert not (found.aborted & found.truncated).any()
    whole = [place for place in range(6) if not found.aborted[4 * place : 4 * place + 4].any()]
    assert sorted(told) == whole
    assert [a == b[:12] for a, b in zip(answers(found), answers(expected), strict=True)] == [True] * 24


def test_no_work_gives_no_answers(plain):
    found = serve(make_engine(plain), queue_of([]), Sampling(4))
    assert len(found.tokens) == len(found.seconds) == 0


def test_bf16_is_repeatable_and_close_to_the_trainer():
    plain = plain_model(dtype=torch.bfloat16)
    engine = make_engine(plain, dtype=torch.bfloat16)
    generated = generate(engine, 3, Sampling(70, ignore_eos=True))
    assert generate(engine, 3, Sampling(70, ignore_eos=True)).tokens == generated.tokens
    gaps = [
        log_probs - trainer_log_probs(plain, PROMPTS[number // 3], answer)
        for number, (answer, log_probs) in enumerate(
            zip(generated.tokens.rows(), generated.log_probs.rows(), strict=True)
        )
    ]
    assert torch.cat(gaps).abs().mean() < 0.05


def test_it_answers_as_before_after_it_slept(plain):
    engine = make_engine(plain)
    before = generate(engine, 2, Sampling(20))
    engine.sleep()
    assert all(parameter.is_meta for parameter in engine._model.parameters())
    engine.wake_weights()
    engine.load_weights(weights_of(plain))
    engine.wake_cache()
    assert generate(engine, 2, Sampling(20)).tokens == before.tokens


def test_the_training_weights_are_used_where_they_lie(plain):
    engine = make_engine(plain)
    theirs = dict(plain.named_parameters())
    for name, weight in engine._model.named_parameters():
        assert weight.data_ptr() == theirs[name].data_ptr()


def test_scores_are_the_trainers(plain):
    text = [3, 9, 27, 11, 5, 8]
    expected = trainer_log_probs(plain, np.array(text[:1]), torch.tensor(text[1:]))
    assert distance(make_engine(plain).log_probs(EncodedPrompt(np.array(text, dtype=np.int32))), expected) < 1e-5


def test_fewer_answers_run_at_once_where_memory_is_short(plain, monkeypatch):
    one = (128 + 64) * 2 * 2 * 2 * 16 * 4
    monkeypatch.setattr("rltrain.base.device.Device.free_memory_bytes", lambda self: int(one * 14.5 * ROOM))
    engine = make_engine(plain, gpu_memory_utilization=0.5)
    sizes = count_tokens(engine)
    generated = generate(engine, 4, Sampling(20))
    assert max(rows for rows, _ in sizes) == 7
    assert generated.tokens == generate(make_engine(plain), 4, Sampling(20)).tokens
    with pytest.raises(ConfigError, match=r"holds 7 answers of up to 128 tokens .* 8 answers .*max_num_seqs=7,"):
        generate(engine, 8, Sampling(20))


@pytest.mark.parametrize("family", [name for name in KINDS if "delta" in name])
def test_memory_is_planned_for_the_states_of_a_row(family):
    plain = plain_model(family)
    engine, cache = make_engine(plain), KeyValues(torch.device("cpu"), 4)
    engine._prefill(jobs_of(PROMPTS, 2), cache)
    cache.drop_dead_rows(np.ones(12, dtype=bool))
    taken = sum(each.nbytes for state in cache._states._rows.values() for each in state)
    assert taken == 12 * bytes_per_row(plain.config, torch.float32)
    (layer,) = cache._layers.values()  # the other one keeps no keys
    assert bytes_per_token(plain.config, torch.float32) == sum(tensor[0, :, 0].nbytes for tensor in layer.prompts)


def test_an_engine_without_weights_refuses(plain):
    engine = make_engine(plain)
    engine.sleep()
    some = [piece for piece in weights_of(plain) if "layers.1" not in piece.name]
    with pytest.raises(RuntimeError, match=r"left .* weights of the rollout engine empty"):
        engine.load_weights(iter(some))


def test_a_layer_that_keeps_its_own_state_is_refused(plain):
    engine = make_engine(plain)
    engine._model.config.num_hidden_layers = 3
    with pytest.raises(ConfigError, match="2 of the 3 layers of Qwen3ForCausalLM"):
        generate(engine, 1, LONG)
