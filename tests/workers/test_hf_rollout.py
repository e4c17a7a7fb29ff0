import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rltrain.device import get_device
from rltrain.models.load import load_config
from rltrain.workers.rollout.base import Sampling, WeightPiece, sample_seeds, uniforms
from rltrain.workers.rollout.hf import HFRollout, choose, random_block, restrict
from tests.workers.engines import generate as serve
from tests.workers.engines import jobs_of, queue_of

EOS = 1
PROMPTS = [np.array(ids, dtype=np.int32) for ids in ([2, 5, 6, 3], [2, 7, 3], [2, 8, 9, 10, 11, 3], [4])]


@pytest.fixture(scope="module")
def plain(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


def make_engine(tiny_model, plain, max_num_seqs=64, eos=(EOS,)):
    engine = HFRollout(
        load_config(str(tiny_model)),
        dtype=torch.float32,
        device=get_device("cpu"),
        eos_token_ids=eos,
        max_num_seqs=max_num_seqs,
    )
    engine.load_weights(
        WeightPiece(name, tuple(tensor.shape), 0, tensor.detach(), lasting=True)
        for tensors in (plain.named_parameters(), plain.named_buffers())
        for name, tensor in tensors
    )
    return engine


def generate(engine, num_samples, sampling, prompts=PROMPTS, step=1):
    return serve(engine, sampling, prompts, num_samples, step)


def test_greedy_equals_transformers(tiny_model, plain):
    found = generate(make_engine(tiny_model, plain), 1, Sampling(12, greedy=True))
    for prompt, answer in zip(PROMPTS, found.tokens.rows(), strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        expected = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert answer.tolist() == expected[0, len(prompt) :].tolist()


def test_log_probs_are_those_of_the_sampling_temperature(tiny_model, plain):
    found = generate(make_engine(tiny_model, plain), 3, Sampling(12, temperature=0.7, top_p=0.9))
    for number, (answer, log_probs) in enumerate(zip(found.tokens.rows(), found.log_probs.rows(), strict=True)):
        prompt = torch.from_numpy(PROMPTS[number // 3].astype(np.int64))
        logits = plain(torch.cat([prompt, answer.long()])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / 0.7, -1).gather(-1, answer.long()[:, None])[:, 0]
        assert torch.allclose(log_probs, expected, atol=2e-6)


def test_an_answer_depends_on_its_seed_alone(tiny_model, plain):
    """Not on the wave it was generated in, on its neighbours, or on finished rows having left the batch."""
    together = generate(make_engine(tiny_model, plain), 4, Sampling(20))
    waves = generate(make_engine(tiny_model, plain, max_num_seqs=4), 4, Sampling(20))
    assert together.tokens == waves.tokens
    alone = make_engine(tiny_model, plain).generate(queue_of(jobs_of(PROMPTS, 4)[2:3]), Sampling(20))
    assert [row.tolist() for row in alone.tokens.rows()] == [row.tolist() for row in together.tokens.rows()[8:12]]


def test_samples_of_a_prompt_and_of_another_step_differ(tiny_model, plain):
    engine = make_engine(tiny_model, plain)
    first, later = generate(engine, 6, Sampling(16)), generate(engine, 6, Sampling(16), step=2)
    answers = {tuple(row.tolist()) for row in first.tokens.rows()[:6]}
    assert len(answers) > 3
    assert first.tokens != later.tokens


def test_finish_reasons_and_lengths(tiny_model, plain):
    found = generate(make_engine(tiny_model, plain), 8, Sampling(10))
    for answer, truncated in zip(found.tokens.rows(), found.truncated.tolist(), strict=True):
        assert EOS not in answer[:-1].tolist()
        assert truncated == (answer[-1] != EOS)
        assert not truncated or len(answer) == 10


def test_ignore_eos_and_a_limit_of_one_token(tiny_model, plain):
    engine = make_engine(tiny_model, plain)
    assert generate(engine, 2, Sampling(9, ignore_eos=True)).tokens.lengths.tolist() == [9] * 8
    assert generate(engine, 2, Sampling(1)).tokens.lengths.tolist() == [1] * 8


def test_an_engine_without_weights_refuses(tiny_model, plain):
    engine = make_engine(tiny_model, plain)
    engine.sleep()
    some = [
        WeightPiece(name, tuple(tensor.shape), 0, tensor, lasting=True)
        for name, tensor in plain.named_parameters()
        if "layers.1" not in name
    ]
    with pytest.raises(RuntimeError, match=r"left .* weights of the rollout engine empty"):
        engine.load_weights(iter(some))


def test_sampling_follows_the_distribution():
    torch.manual_seed(0)
    logits = torch.randn(1, 30).expand(100_000, 30)
    noise = torch.from_numpy(random_block(sample_seeds(3, 1, range(100_000), 1), 0)[:, 0])
    tokens, _ = choose(logits, noise, Sampling(1))
    assert torch.allclose(torch.bincount(tokens, minlength=30) / 100_000, logits[0].softmax(-1), atol=0.006)


def test_a_token_without_mass_is_never_chosen():
    logits = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")]])
    edge = torch.tensor([0.0, 0.25, 0.5, 1 - 2**-23])
    tokens, _ = choose(logits.expand(4, 4), edge, Sampling(1))
    assert set(tokens.tolist()) <= {0, 2}


def test_the_largest_random_number_stays_below_any_total():
    totals = torch.rand(100_000) * 2 + 1e-3
    assert bool((totals * np.float32(1 - 2**-23) < totals).all())
    assert random_block(np.arange(1000, dtype=np.uint64), 0).max() <= np.float32(1 - 2**-23)


def test_top_k_and_top_p_restrict():
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    assert restrict(probs, 2, 1.0).tolist() == [pytest.approx([0.4, 0.3, 0, 0])]
    assert restrict(probs, -1, 0.5).tolist() == [pytest.approx([0.4, 0.3, 0, 0])]
    assert restrict(probs, -1, 0.4).tolist() == [pytest.approx([0.4, 0, 0, 0])]
    assert restrict(probs, 1_000_000, 1.0) is probs


def test_random_numbers_are_a_function_of_seed_and_position():
    seeds = sample_seeds(5, 2, [3, 8], 2)
    assert np.array_equal(uniforms(seeds, 0, 10)[:, 4:], uniforms(seeds, 4, 6))
    assert np.array_equal(sample_seeds(5, 2, [8], 2), seeds[2:])
    many = sample_seeds(0, 0, range(2000), 4)
    assert len(set(many.tolist())) == 8000
    numbers = uniforms(many, 0, 50)
    assert abs(numbers.mean() - 0.5) < 0.002
    assert numbers.min() >= 0
    assert numbers.max() < 1
