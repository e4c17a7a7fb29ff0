"""Tokens that are chosen over the whole mini-batch, however it lies on the ranks."""

import pytest
import torch

from rltrain.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs, Selection
from rltrain.base.columns.ragged import Ragged
from rltrain.config.schema import ActorConfig
from rltrain.workers.selection import select
from tests.ranks import run_on_ranks

COUNTS = [1.0] * 6 + [0.0]
BY_SHARE = Selection(lambda inputs, noise, means, cfg: noise.masked_fill(inputs.mask.values == 0, torch.inf),
                     lambda cfg: 0.5)  # fmt: skip
# Keys, what a share of one half takes, and what m2po takes: squares up to a mean of 0.04.
CASES = {
    "by size": ([0.5, 0.1, 0.3, 0.2, 0.0, 0.4, 0.0], [0, 1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0, 0]),
    "ties at the border": ([0.3, 0.0, 0.3, 0.0, 0.3, 0.3, 0.0], [1] * 6 + [0], [0, 1, 0, 1, 0, 0, 0]),
    "nothing has moved": ([0.0] * 7, [1] * 6 + [0], [1] * 6 + [0]),
    "all have moved": ([1.0] * 7, [1] * 6 + [0], [0] * 7),
}


def chosen(values, selection, copies=1, rows=slice(None)):
    moved = torch.tensor(values)[rows]
    mask = Ragged(torch.tensor(COUNTS)[rows], torch.tensor([len(moved)]))
    inputs = PolicyLossInputs(moved, torch.zeros(len(moved)), torch.zeros(len(moved)), mask)
    cfg = ActorConfig(ulysses_sequence_parallel_size=copies)
    return select(inputs, moved.double(), selection, int(sum(COUNTS)), cfg).tolist()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", CASES)
def test_what_is_selected_by_hand(name):
    values, by_share, by_mean = CASES[name]
    assert chosen(values, BY_SHARE) == by_share
    assert chosen(values, POLICY_LOSSES["m2po"].selection) == by_mean


def on_a_rank(rank: int, world: int, copies: int) -> None:
    """The first rank, or the first two that share sequences, have five tokens, and the others the rest."""
    part = slice(0, 5) if rank < world // 2 else slice(5, None)
    for values, *both in CASES.values():
        for selection, expected in zip((BY_SHARE, POLICY_LOSSES["m2po"].selection), both, strict=True):
            assert chosen(values, selection, copies, part) == expected[part]


@pytest.mark.parametrize(("ranks", "copies"), [(2, 1), (4, 2)])
def test_ranks_select_what_one_process_does(ranks, copies):
    run_on_ranks(on_a_rank, ranks, copies)
