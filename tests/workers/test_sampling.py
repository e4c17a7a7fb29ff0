from dataclasses import replace

import numpy as np
import pytest
import torch

from rltrain.base import device
from rltrain.base.seeds import sample_seeds
from rltrain.workers.rollout.contract import Sampling
from rltrain.workers.rollout.sampling import choose, penalised, random_numbers, restrict


def test_sampling_follows_the_distribution():
    torch.manual_seed(0)
    logits = torch.randn(1, 30).repeat(100_000, 1)
    expected = logits[0].softmax(-1)
    noise = torch.from_numpy(random_numbers(sample_seeds(3, 1, range(100_000), 1), np.zeros(100_000, dtype=np.int64)))
    tokens, _ = choose(logits, noise, Sampling(1))
    assert torch.allclose(torch.bincount(tokens, minlength=30) / 100_000, expected, atol=0.006)


def test_a_token_without_mass_is_never_chosen():
    logits = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")]])
    edge = torch.tensor([0.0, 0.25, 0.5, 1 - 2**-23])
    tokens, _ = choose(logits.repeat(4, 1), edge, Sampling(1))
    assert set(tokens.tolist()) <= {0, 2}


def test_the_largest_random_number_stays_below_any_total():
    totals = torch.rand(100_000) * 2 + 1e-3
    assert bool((totals * np.float32(1 - 2**-23) < totals).all())
    assert random_numbers(np.arange(100_000, dtype=np.uint64), np.arange(100_000)).max() <= np.float32(1 - 2**-23)


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
    many = logits.repeat(20_000, 1)
    noise = torch.linspace(0, 0.9999, 20_000)
    sampling = Sampling(1, temperature=0.5, repetition_penalty=2.0)
    tokens, log_probs = choose(many.clone(), noise, sampling, seen=seen.repeat(20_000, 1))
    law = (torch.tensor([1.0, 1.5, -2.0]) / 0.5).softmax(-1)
    assert torch.allclose(torch.bincount(tokens, minlength=3) / 20_000, law, atol=1e-3)
    assert torch.allclose(log_probs, (logits / 0.5).log_softmax(-1)[0][tokens], atol=1e-5)


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


def test_counting_totals_finds_what_a_search_finds(monkeypatch):
    """Where a device has no kernel that searches."""
    logits = torch.randn(64, 20_000) * 3
    logits[:, ::3] = -torch.inf
    noise = torch.from_numpy(random_numbers(np.arange(64, dtype=np.uint64), np.arange(64)))
    noise[:3] = torch.tensor([0.0, 0.5, 1 - 2**-23])
    searched = choose(logits.clone(), noise, Sampling(1, top_k=50))
    monkeypatch.setitem(device.DEVICES, "cpu", replace(device.get_device("cpu"), searches=False))
    monkeypatch.delattr(torch, "searchsorted")
    counted = choose(logits.clone(), noise, Sampling(1, top_k=50))
    assert all(torch.equal(*pair) for pair in zip(searched, counted, strict=True))


def test_a_nucleus_wider_than_the_first_guess_is_found():
    weights = torch.rand(2, 5000) + 0.5
    weights[1, 7] = 1e6
    allowed = restrict(weights, -1, 0.9)
    ordered = weights[0].sort(descending=True).values
    inside = int((ordered.cumsum(0) - ordered < 0.9 * ordered.sum()).sum())
    assert int((allowed[0] > 0).sum()) == inside > 1024
    assert allowed[1].nonzero()[:, 0].tolist() == [7]


def test_equally_likely_tokens_are_inside_together():
    """bf16 logits tie all the time; who is inside must not depend on how a sort happened to order them."""
    weights = torch.tensor([[0.4, 0.2, 0.2, 0.2]])
    assert restrict(weights, 2, 1.0).gt(0).tolist() == [[True] * 4]
    assert restrict(weights, -1, 0.5).gt(0).tolist() == [[True] * 4]
    assert restrict(weights, 1, 1.0).gt(0).tolist() == [[True, False, False, False]]


def test_no_accelerator_waits_for_a_nucleus(monkeypatch):
    weights = torch.rand(4, 5000) ** 4
    expected = restrict(weights, -1, 0.9), restrict(weights, 50, 0.9)
    monkeypatch.setitem(device.DEVICES, "cpu", replace(device.get_device("cpu"), kind="npu"))
    monkeypatch.setattr(torch.Tensor, "__bool__", None)
    found = restrict(weights, -1, 0.9), restrict(weights, 50, 0.9)
    monkeypatch.undo()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
