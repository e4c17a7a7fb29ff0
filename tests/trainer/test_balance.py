from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.data.images import PromptImages
from rltrain.models.attention.packing import pack
from rltrain.trainer.batching.balance import Layout, Workload, cost_of, lay_out, rank_tokens, spread
from rltrain.trainer.plan import PassBudget


def apart(lengths) -> Workload:
    """Return samples that share nothing."""
    lengths = np.array(lengths)
    return Workload(lengths, 0 * lengths, np.arange(len(lengths)))


def groups_of(prompt, answers, pair_cost=0.0) -> Workload:
    """answers[group][i]: lengths of the responses to prompts of one length."""
    counts = [len(answer) for answer in answers]
    flat = np.concatenate(answers)
    return Workload.of_groups(np.full(len(flat), prompt), flat, np.repeat(np.arange(len(counts)), counts), pair_cost)


def with_images(work: Workload, groups, rows_of_group, cost=10.0) -> Workload:
    rows = np.asarray(rows_of_group)[groups]
    return work.with_images(groups, rows, cost * rows)


def images_of(rows: int) -> PromptImages | None:
    """Return the tower's inputs for a prompt: blank images, for one token at the start."""
    one, place = np.array([1]), np.array([0])
    return PromptImages(np.zeros((rows, 3), dtype=np.float32), None, one * rows, one, place, None) if rows else None


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.integers(0, 50), min_size=1, max_size=6)), min_size=1, max_size=6
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(40, 200),
    st.integers(9, 20),
)
def test_the_tower_takes_what_the_driver_counts(groups, prompt, num_ranks, max_tokens, max_rows):
    """This includes responses that are too long to share their prompt's tokens but share its images, and responses with
    their own images."""
    rows, answers = [each for each, _ in groups], [each for _, each in groups]
    work = groups_of(prompt, answers, 0.01)
    owners = np.repeat(np.arange(len(groups)), [len(answer) for answer in answers])
    own_rows = np.where(work.answers > 1, np.arange(len(owners)) % 3 * 2, 0)
    work = replace(with_images(work, owners, rows), own_rows=own_rows, own_cost=10.0 * own_rows)
    ranks = spread(np.arange(len(owners)), work, num_ranks, PassBudget(max_tokens, None, None, max_rows))
    assert len({len(rank) for rank in ranks}) == 1
    flat = [micro for rank in ranks for micro in rank]
    assert sorted(np.concatenate(flat).tolist()) == list(range(len(owners)))
    for micro in (micro for micro in flat if len(micro)):
        # A sample that alone is over the budget is computed alone.
        assert work.rows(micro) <= max_rows or len(micro) == 1
        assert work.tokens(micro) <= max_tokens or len(micro) == 1
        index = torch.from_numpy(owners[micro])
        prompts = Ragged.from_rows([torch.zeros(prompt, dtype=torch.int32) for _ in groups])
        response = Ragged.from_rows([torch.zeros(int(work.answers[i]), dtype=torch.int32) for i in micro])
        batch = Batch({
            "prompt": DictionaryColumn(prompts, index),
            "images": DictionaryColumn([images_of(row) for row in rows], index),
            "own_images": [images_of(int(own_rows[i])) for i in micro],
            "response": response,
            "response_mask": response.like(torch.ones(len(response.values), dtype=torch.bool)),
        })  # fmt: skip
        packed = pack(batch, torch.device("cpu"))
        assert work.rows(micro) == (len(packed.images.pixel_values) if packed.images else 0)
        assert work.tokens(micro) - len(micro) <= len(packed.tokens) <= work.tokens(micro)


def test_a_prompts_images_cost_once_a_micro_batch():
    groups = np.array([0, 0, 0, 1])
    work = with_images(groups_of(20, [[30, 30, 400], [30]]), groups, [8, 0])
    assert work.cost(np.arange(4)) == 20 + 30 + 30 + (20 + 400) + 80 + (20 + 30)
    assert work.cost(np.array([0, 1])) == 20 + 60 + 80
    assert work.cost(np.array([2, 3])) == 420 + 80 + 50
    assert [work.rows(np.array(ids)) for ids in ([0, 2], [3], [0, 1, 2, 3])] == [8, 0, 8]


@pytest.mark.parametrize("answer", [60, 400], ids=["shared tokens", "images alone"])
def test_answers_to_a_picture_stay_together(answer):
    """Splitting the groups would balance the ranks too, but then every image would be encoded on both."""
    groups = np.repeat(np.arange(8), 4)
    work = groups_of(20, [[answer] * 4] * 8)
    seeing = with_images(work, groups, [50] * 8)
    layout = lay_out([np.arange(32)], seeing, 2, PassBudget(4 * (4 * 420), None))
    assert cost_of(layout, seeing).images_share == 1 / 4
    assert "perf/balance/images_share" not in cost_of(layout, work).metrics()


def test_a_budget_of_longest_sequences_holds_their_images():
    budget = PassBudget(1000, None, num_longest=2).with_images(30)
    assert budget == PassBudget(1000, None, 2, max_rows=60)
    assert PassBudget(1000, None).with_images(30) == PassBudget(1000, None)
    assert PassBudget(None, 4).with_images(30) == PassBudget(None, 4)
    work = with_images(groups_of(20, [[10, 10]] * 6), np.repeat(np.arange(6), 2), [30] * 6)
    (micros,) = spread(np.arange(12), work, 1, budget)
    assert [work.rows(micro) for micro in micros] == [60] * 3


def test_ranks_get_about_the_same_number_of_tokens():
    lengths = np.random.default_rng(0).lognormal(6, 1, 256).astype(int) + 1
    layout = lay_out([np.arange(256)], apart(lengths), 8, PassBudget(max_tokens=20_000, max_samples=None))
    tokens = rank_tokens(layout, lengths)
    assert max(tokens) / min(tokens) < 1.1


def test_a_group_is_cut_where_ranks_would_otherwise_idle():
    work = groups_of(100, [[400] * 8])
    ranks = spread(np.arange(8), work, 4, PassBudget(max_tokens=5000, max_samples=None))
    assert [len(rank[0]) for rank in ranks] == [2] * 4


def test_cost_grows_with_the_pairs_of_query_and_key():
    """Four long samples on one rank have the same tokens as sixteen short ones, but another cost."""
    lengths = np.array([400] * 4 + [100] * 16)
    work = Workload(lengths, 0 * lengths, np.arange(20), pair_cost=0.01)
    assert work.cost(np.arange(4)) == pytest.approx(4 * (400 + 0.01 * 400**2 / 2))
    layout = lay_out([np.arange(20)], work, 2, PassBudget(max_tokens=10_000, max_samples=None))
    assert cost_of(layout, work).ranks < 1.05
    shared, alone = groups_of(100, [[50, 50]], 0.01), groups_of(100, [[50], [50]], 0.01)
    saved = alone.cost(np.arange(2)) - shared.cost(np.arange(2))
    assert saved == pytest.approx(100 + 0.01 * 100**2 / 2)


def test_slack_counts_what_ranks_wait_for():
    work = apart([30, 10, 10, 10])
    layout = lay_out([np.arange(4)], work, 2, PassBudget(max_tokens=None, max_samples=1))
    # Turns of (30, 10) and (10, 10): ranks have 40 and 20, and in step 30 + 10.
    assert cost_of(layout, work).metrics() == pytest.approx(
        {
            "perf/balance/ranks": 40 / 30,
            "perf/balance/micro_batches": 40 / 30,
            "perf/balance/cost": 60,
            "perf/balance/tokens": 60,
            "perf/balance/tokens_share": 1,
        }
    )


def long_tail(num_nodes: int, minis: int) -> tuple[Workload, list]:
    """Return 256 prompts of 8 responses, each generated by the node that was free first, and their mini-batches."""
    generator = np.random.default_rng(0)
    answers = np.minimum(generator.lognormal(8.5, 0.9, 2048).astype(np.int64), 16_000)
    busy, home = np.zeros(num_nodes), np.zeros(256, dtype=np.int64)
    for group in generator.permutation(256).tolist():
        home[group] = busy.argmin()
        busy[home[group]] += answers[8 * group : 8 * group + 8].sum()
    groups = np.arange(256).repeat(8)
    work = Workload.of_groups(np.full(2048, 200), answers, groups, 5e-5)
    return replace(work, nodes=home[groups]), np.split(np.arange(2048), minis)


def seconds(layout: Layout, work: Workload) -> float:
    """Return the time by the cost model: the ranks synchronise at every micro-batch."""
    turns = zip(*(layout.micro_batches(rank) for rank in range(len(layout.ids))), strict=True)
    return sum(max(map(work.cost, turn)) for turn in turns)


@pytest.mark.parametrize("minis", [1, 4])
@pytest.mark.parametrize(("num_nodes", "stay"), [(2, 0.6), (8, 0.35)])
def test_answers_stay_on_their_node_where_that_costs_nothing(num_nodes, stay, minis):
    """By chance only half of them would, or an eighth."""
    (work, mini_batches), budget = long_tail(num_nodes, minis), PassBudget(32_768, None)
    nodes = np.arange(num_nodes).repeat(4)
    layout = lay_out(mini_batches, work, len(nodes), budget, nodes.tolist())
    here = sum(
        int(work.answers[ids][work.nodes[ids] == node].sum()) for node, ids in zip(nodes, layout.ids, strict=True)
    )
    assert here > stay * work.answers.sum()
    anywhere = lay_out(mini_batches, work, len(nodes), budget)
    assert seconds(layout, work) < 1.003 * seconds(anywhere, work)
    assert sorted(np.concatenate(layout.ids).tolist()) == list(range(2048))
    # On one node nothing is preferred.
    assert str(lay_out(mini_batches, replace(work, nodes=None), len(nodes), budget)) == str(anywhere)
    assert str(lay_out(mini_batches, work, len(nodes), budget, [3] * len(nodes))) == str(anywhere)
