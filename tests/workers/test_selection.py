"""Tokens that are selected over the whole mini-batch, for any layout over the ranks."""

import math

import pytest
import torch

from rltrain.algorithms.aggregation import Denominators
from rltrain.algorithms.entropy import ENTROPY_ROUNDING, certainty
from rltrain.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs, Selection
from rltrain.common.columns.ragged import Ragged
from rltrain.config.schema import ActorConfig
from rltrain.workers.updates.selection import select, smallest_share, weigh
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


# Entropies of seven tokens, of which the last does not count; those among the top 30 % are 1.8 of 6: one, and what is
# as high to within the rounding of a pass.
ENTROPIES, UNCERTAIN = [0.7, 0.2, 0.70003, 0.1, 0.69, 0.0, 9.0], [1, 0, 1, 0, 0, 0, 0]
# Six answers of one token: their log ratios, advantages and groups; the last has no token that counts.
ANSWERS = [0.1, -0.2, 0.3, 0.4, 0.0, 0.2, 9.0], [1.0, -1.0, 2.0, 0.0, 1.0, -1.0, 1.0], [4, 4, 4, 1, 1, 1, 1]


def uncertain(copies=1, rows=slice(None)):
    keys = certainty(torch.tensor(ENTROPIES)[rows], torch.tensor(COUNTS)[rows])
    return smallest_share(keys, 0.3, int(sum(COUNTS)), copies, rounding=ENTROPY_ROUNDING).tolist()


def weights(copies=1, rows=slice(None)):
    moved, advantages, groups = (torch.tensor(column)[rows] for column in ANSWERS)
    mask = Ragged(torch.tensor(COUNTS)[rows], torch.ones(len(moved), dtype=torch.long))
    inputs = PolicyLossInputs(moved, torch.zeros(len(moved)), advantages, mask)
    cfg = ActorConfig(ulysses_sequence_parallel_size=copies)
    return weigh(inputs, groups, POLICY_LOSSES["real"].group_weights, Denominators(6, 6, 8, 2), cfg).tolist()


def expected_weights():
    """Return 1 / tau * 6 responses / 2 groups * e^x / (1 + sum of e^x in the same class), x = -y s / tau."""
    good, bad, other_good, other_bad = ([math.exp(-y * s / 0.5) for s, y in rows] for rows in (
        [(0.1, 1), (0.3, 1)], [(-0.2, -1)], [(0.0, 1)], [(0.2, -1)],
    ))  # fmt: skip
    shares = {name: [x / (1 + sum(side)) * 2 * 3 for x in side] for name, side in (
        ("good", good), ("bad", bad), ("other good", other_good), ("other bad", other_bad),
    )}  # fmt: skip
    return [shares["good"][0], *shares["bad"], shares["good"][1], 0.0, *shares["other good"], *shares["other bad"], 0.0]


@pytest.mark.usefixtures("process_group")
def test_what_is_uncertain_and_how_answers_weigh_by_hand():
    assert uncertain() == UNCERTAIN
    assert weights() == pytest.approx(expected_weights())


def on_a_rank(rank: int, world: int, copies: int) -> None:
    """The first rank, or the first two that share sequences, have five tokens, and the others the rest."""
    part = slice(0, 5) if rank < world // 2 else slice(5, None)
    for values, *both in CASES.values():
        for selection, expected in zip((BY_SHARE, POLICY_LOSSES["m2po"].selection), both, strict=True):
            assert chosen(values, selection, copies, part) == expected[part]
    assert uncertain(copies, part) == UNCERTAIN[part]
    assert weights(copies, part) == pytest.approx(expected_weights()[part])


@pytest.mark.parametrize(("ranks", "copies"), [(2, 1), (4, 2)])
def test_ranks_select_what_one_process_does(ranks, copies):
    run_on_ranks(on_a_rank, ranks, copies)
