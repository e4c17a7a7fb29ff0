from dataclasses import replace

import numpy as np
import pytest
import torch

from rltrain.common import device
from rltrain.common.seeds import sample_seeds
from rltrain.workers.rollout.contract import Sampling
from rltrain.workers.rollout.sampling import choose, penalised, random_numbers, restrict


def test_sampling_follows_the_distribution():
    torch.manual_seed(0)
    logits = torch.randn(1, 30).repeat(100_000, 1)
    expected = logits[0].softmax(-1)
    noise = torch.from_numpy(random_numbers(sample_seeds(3, 1, range(100_000), 1), np.zeros(100_000, dtype=np.int64)))
    tokens, _ = choose(logits, noise, Sampling(1))
    assert torch.allclose(torch.bincount(tokens, minlength=30) / 100_000, expected, atol=0.006)


def test_top_k_and_top_p_restrict():
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    assert restrict(probs, 2, 1.0).tolist() == [pytest.approx([0.4, 0.3, 0, 0])]
    assert restrict(probs, -1, 0.5).tolist() == [pytest.approx([0.4, 0.3, 0, 0])]
    assert restrict(probs, -1, 0.4).tolist() == [pytest.approx([0.4, 0, 0, 0])]
    assert restrict(probs, 1_000_000, 1.0) is probs


def test_min_p_compares_with_the_likeliest_token_that_may_be_drawn():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(64, 1)
    noise = torch.linspace(0, 0.999, 64)

    def drawn(**keys):
        return set(choose(logits.clone(), noise, Sampling(1, **keys.pop("sampling", {})), **keys)[0].tolist())

    assert drawn() == {0, 1, 2, 3}
    assert drawn(sampling={"min_p": 0.31}) == {0, 1}
    assert drawn(sampling={"min_p": 0.31}, never=torch.tensor([0])) == {1, 2}
    assert drawn(sampling={"min_p": 1.0}) == {0}


def test_a_penalty_moves_what_is_drawn_and_not_the_log_probs():
    logits = torch.tensor([[2.0, 1.5, -1.0]])
    seen = torch.tensor([[True, False, True]])
    assert penalised(logits, seen, 2.0).tolist() == [[1.0, 1.5, -2.0]]
    tokens, log_probs = choose(
        logits.clone(), torch.zeros(1), Sampling(1, greedy=True, repetition_penalty=2.0), seen=seen
    )
    assert tokens.tolist() == [1]
    assert log_probs.tolist() == pytest.approx(logits.log_softmax(-1)[:, 1].tolist())


@pytest.mark.parametrize("vocabulary", [3, 256, 1000, 151_936])
def test_the_two_level_search_finds_what_one_total_finds(vocabulary):
    torch.manual_seed(0)
    rows = 64
    logits = torch.randn(rows, vocabulary) * 3
    noise = torch.from_numpy(random_numbers(np.arange(rows, dtype=np.uint64), np.arange(rows)))
    mass = logits.double().softmax(-1).cumsum(-1)
    tokens, log_probs = choose(logits.clone(), noise, Sampling(1, temperature=1.0))
    before = torch.cat([torch.zeros(rows, 1), mass], -1).gather(-1, tokens[:, None])[:, 0]
    after = mass.gather(-1, tokens[:, None])[:, 0]
    assert bool((before - 1e-5 <= noise).all())
    assert bool((noise <= after + 1e-5).all())
    exact = torch.log_softmax(logits.double(), -1).gather(-1, tokens[:, None])[:, 0]
    assert torch.allclose(log_probs.double(), exact, atol=3e-6)


def test_a_choice_does_not_depend_on_the_chunk_of_rows(monkeypatch):
    logits = torch.randn(50, 1000)
    noise = torch.rand(50)
    together = choose(logits.clone(), noise, Sampling(1, temperature=0.7, top_p=0.9))
    monkeypatch.setitem(device.DEVICES, "cpu", replace(device.get_device("cpu"), sampling_elements=3000))
    apart = choose(logits.clone(), noise, Sampling(1, temperature=0.7, top_p=0.9))
    assert all(torch.equal(*pair) for pair in zip(together, apart, strict=True))


def test_a_nucleus_wider_than_the_first_guess_is_found():
    weights = torch.rand(2, 5000) + 0.5
    weights[1, 7] = 1e6
    allowed = restrict(weights, -1, 0.9)
    ordered = weights[0].sort(descending=True).values
    inside = int((ordered.cumsum(0) - ordered < 0.9 * ordered.sum()).sum())
    assert int((allowed[0] > 0).sum()) == inside > 1024
    assert allowed[1].nonzero()[:, 0].tolist() == [7]
