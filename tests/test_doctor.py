"""The doctor's measurements and conclusions. Two hosts with Ray: tests/hosts/test_doctor.py."""

import numpy as np
import pytest
import torch

from rltrain.common.errors import WorkerError, WorkerLost
from rltrain.tools import doctor
from rltrain.workers.diagnostics.links import LinksWorker
from tests.ranks import run_on_ranks

NAMES = [f"rank {rank} on node-{'abc'[rank // 2]}" for rank in range(6)]
NODES = np.arange(6) // 2


def _measure(rank: int, world: int) -> None:
    worker = LinksWorker("cpu")
    assert worker.computes(64) > 0
    found = worker.collectives(2**12)
    assert set(found) == {"all-reduce", "all-gather"}
    assert min(found.values()) > 0
    speeds = np.fmax.reduce([worker.p2p_bandwidth(2**16, turn) for turn in range(world)])
    assert np.isnan(speeds[rank])
    assert (np.delete(speeds, rank) > 0).all()
    # One of the three sends other numbers than it should.
    worker._filled = lambda size, value: torch.full((size,), value + (rank == 2))
    speeds = np.fmax.reduce([worker.p2p_bandwidth(2**10, turn) for turn in range(world)])
    assert (speeds == 0).tolist() == [other == 2 != rank for other in range(world)]
    with pytest.raises(WorkerError, match=f"rank {rank}: a collective returned wrong values"):
        worker.collectives(2**10)


def test_pairs_and_collectives_are_timed_and_their_numbers_checked():
    run_on_ranks(_measure, 3)


def speeds(slow: list[tuple[int, int]], value: float) -> np.ndarray:
    """Return 20 GB/s within nodes and 10 between them, except for some pairs."""
    found = np.where(NODES[:, None] == NODES, 20.0, 10.0)
    np.fill_diagonal(found, np.nan)
    for one, other in slow:
        found[one, other] = value
    return found


def test_the_slowest_pair_and_the_rank_of_the_slow_ones_are_named():
    slow = [(5, 0), (1, 5), (2, 5)]  # as one of the two ends has it
    _, between = doctor.pairs(speeds(slow, 0.5), NAMES, NODES)
    assert between.found == "12 pairs: 10.00 GB/s (median), least 0.50: rank 0 on node-a and rank 5 on node-c"
    (note,) = between.notes
    assert "3 of 12 pairs are slow, 3 of them with rank 5 on node-c. Look at that node's cards" in note


def test_a_pair_that_changes_numbers_fails():
    within, _ = doctor.pairs(speeds([(2, 3)], 0.0), NAMES, NODES)
    assert within.problems == [
        "rank 2 on node-b and rank 3 on node-b: received data differed from sent data. 1 pair in all changed numbers, "
        "1 of them with rank 2 on node-b or rank 3 on node-b. Exclude that device and run the doctor again."
    ]


class Group:
    """`WorkerGroup` of three ranks, of which two do not return from their round."""

    names, nodes, world = ["a", "a", "b"], [0, 0, 1], 3

    def start(self, worker, kwargs):
        pass

    def call(self, method, size):
        return [1.0] * self.world

    def submit(self, calls):
        (call,) = calls
        self.call_under_way = call
        return self

    def collect(self, deadline_s):
        if self.call_under_way.name != "Links.p2p_bandwidth":
            return [{"all-reduce": 1.0}] * self.world
        turn = self.call_under_way.args[1]
        if turn == 1:
            raise WorkerLost(
                "doctor worker, rank 0 of 3 (pid 1 on a), rank 1 of 3 (pid 2 on a), in Links.p2p_bandwidth: not done"
            )
        return list(np.ones((self.world, self.world)))


def test_a_pair_that_hangs_is_a_failed_row_below_the_others():
    *_, last = checks = list(doctor.try_together(Group(), "cpu", is_cpu=True))
    assert [check.name for check in checks] == ["computing", "collectives", "together"]
    assert "rank 0 of 3 (pid 1 on a), rank 1 of 3" in last.problems[0]


def test_the_run_folder_is_left_as_it_was(tmp_path):
    with doctor.restored_folder(tmp_path / "runs/first") as folder:
        folder.mkdir(parents=True)
    assert list(tmp_path.iterdir()) == []
