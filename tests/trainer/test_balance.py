import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.trainer.balance import lay_out, rank_tokens, spread
from rltrain.trainer.plan import PassBudget

budgets = st.one_of(
    st.builds(PassBudget, max_tokens=st.integers(50, 400), max_samples=st.none()),
    st.builds(PassBudget, max_tokens=st.none(), max_samples=st.integers(1, 5)),
)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5), budgets)
def test_every_sample_once_equal_counts_and_no_budget_broken(lengths, num_ranks, budget):
    lengths = np.array(lengths)
    ranks = spread(np.arange(len(lengths)), lengths, num_ranks, budget)
    assert sorted(np.concatenate([micro for rank in ranks for micro in rank]).tolist()) == list(range(len(lengths)))
    assert len({len(rank) for rank in ranks}) == 1
    for micro in (micro for rank in ranks for micro in rank):
        assert budget.max_tokens is None or lengths[micro].sum() <= budget.max_tokens
        assert budget.max_samples is None or len(micro) <= budget.max_samples


def test_a_mini_batch_keeps_its_samples_whatever_the_number_of_ranks():
    lengths = np.arange(1, 17)
    minis = [np.arange(8), np.arange(8, 16)]
    for num_ranks in (1, 2, 3):
        layout = lay_out(minis, lengths, num_ranks, PassBudget(max_tokens=40, max_samples=None))
        first = [layout.ids[rank][: sum(layout.micro_sizes[rank][0])] for rank in range(num_ranks)]
        assert sorted(np.concatenate(first).tolist()) == list(range(8))


def test_ranks_get_about_the_same_number_of_tokens():
    lengths = np.random.default_rng(0).lognormal(6, 1, 256).astype(int) + 1
    layout = lay_out([np.arange(256)], lengths, 8, PassBudget(max_tokens=20_000, max_samples=None))
    tokens = rank_tokens(layout, lengths)
    assert max(tokens) / min(tokens) < 1.1


def test_as_few_micro_batches_as_the_budget_allows():
    ranks = spread(np.arange(8), np.full(8, 10), 2, PassBudget(max_tokens=20, max_samples=None))
    assert [len(rank) for rank in ranks] == [2, 2]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fewer_samples_than_ranks_leaves_idle_passes(num_ranks):
    layout = lay_out([np.array([0])], np.array([5]), num_ranks, PassBudget(max_tokens=10, max_samples=None))
    assert sorted(len(ids) for ids in layout.ids) == [0] * (num_ranks - 1) + [1]
    assert all(len(sizes[0]) == 1 for sizes in layout.micro_sizes)
