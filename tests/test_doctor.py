"""What the doctor measures, and what it makes of it. Two hosts with Ray: tests/hosts/test_doctor.py."""

from itertools import combinations

import numpy as np
import pytest
import torch

from rltrain.base.errors import WorkerError, WorkerLost
from rltrain.run.preflight.health import Check
from rltrain.tools import doctor
from rltrain.workers import links
from rltrain.workers.links import LinksWorker
from tests.ranks import run_on_ranks

NAMES = [f"rank {rank} on node-{'abc'[rank // 2]}" for rank in range(6)]
NODES = np.arange(6) // 2


@pytest.mark.parametrize("players", [2, 4, 6, 16])
def test_each_rank_meets_each_other_once(players):
    met = set()
    for turn in range(players - 1):
        peers = [links._partner(rank, turn, players) for rank in range(players)]
        assert [peers[peer] for peer in peers] == list(range(players))
        met |= {frozenset((rank, peer)) for rank, peer in enumerate(peers)}
    assert met == {frozenset(pair) for pair in combinations(range(players), 2)}


def _measure(rank: int, world: int) -> None:
    worker = LinksWorker("cpu")
    assert worker.computes(64) > 0
    found = worker.collectives(2**12)
    assert set(found) == {"all-reduce", "all-gather"}
    assert min(found.values()) > 0
    speeds = np.fmax.reduce([worker.meets(2**16, turn) for turn in range(world)])
    assert np.isnan(speeds[rank])
    assert (np.delete(speeds, rank) > 0).all()
    # One of the three sends other numbers than it should.
    worker._filled = lambda size, value: torch.full((size,), value + (rank == 2))
    speeds = np.fmax.reduce([worker.meets(2**10, turn) for turn in range(world)])
    assert (speeds == 0).tolist() == [other == 2 != rank for other in range(world)]
    with pytest.raises(WorkerError, match=f"rank {rank}: a collective has returned wrong numbers"):
        worker.collectives(2**10)


def test_pairs_and_collectives_are_timed_and_their_numbers_checked():
    run_on_ranks(_measure, 3)


def speeds(slow: list[tuple[int, int]], value: float) -> np.ndarray:
    """20 GB/s within nodes and 10 between them, but for some pairs."""
    found = np.where(NODES[:, None] == NODES, 20.0, 10.0)
    np.fill_diagonal(found, np.nan)
    for one, other in slow:
        found[one, other] = value
    return found


def test_pairs_of_equal_speed_have_nothing_to_say():
    within, between = doctor.pairs(speeds([], 0), NAMES, NODES)
    assert within.found.startswith("3 pairs: 20.00 GB/s (median), least 20.00: ")
    assert between.found.startswith("12 pairs: 10.00 GB/s (median), least 10.00: ")
    assert not within.notes + between.notes + within.problems + between.problems


def test_the_slowest_pair_and_the_rank_of_the_slow_ones_are_named():
    slow = [(5, 0), (1, 5), (2, 5)]  # as one of the two ends has it
    _, between = doctor.pairs(speeds(slow, 0.5), NAMES, NODES)
    assert between.found == "12 pairs: 10.00 GB/s (median), least 0.50: rank 0 on node-a and rank 5 on node-c"
    (note,) = between.notes
    assert "3 of 12 pairs are slow, 3 of them with rank 5 on node-c. Look at that node's cards" in note


def test_a_pair_that_changes_numbers_fails():
    within, _ = doctor.pairs(speeds([(2, 3)], 0.0), NAMES, NODES)
    assert within.problems == [
        "rank 2 on node-b and rank 3 on node-b: what arrived was not what was sent. 1 pair in all changed numbers, 1 "
        "of them with rank 2 on node-b or rank 3 on node-b. Take that device out of use, and look again."
    ]


def test_the_device_that_wrong_pairs_share_is_named():
    for check in doctor.pairs(speeds([(0, 3), (3, 2), (5, 3)], 0.0), NAMES, NODES):
        (problem,) = check.problems
        assert "3 pairs in all changed numbers, 3 of them with rank 3 on node-b. Take that device out" in problem


class Group:
    """`WorkerGroup` of three ranks, of which two do not come back from their round."""

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
        if self.call_under_way.name != "Links.meets":
            return [{"all-reduce": 1.0}] * self.world
        turn = self.call_under_way.args[1]
        if turn == 1:
            raise WorkerLost(
                "doctor worker, rank 0 of 3 (pid 1 on a), rank 1 of 3 (pid 2 on a), in Links.meets: not done"
            )
        return list(np.ones((self.world, self.world)))


def test_a_pair_that_hangs_is_a_failed_row_below_the_others():
    *_, last = checks = list(doctor.try_together(Group(), "cpu", is_cpu=True))
    assert [check.name for check in checks] == ["computing", "collectives", "together"]
    assert "rank 0 of 3 (pid 1 on a), rank 1 of 3" in last.problems[0]


def test_a_slow_device_is_noted_and_a_wrong_one_refused():
    check = doctor._computing([100.0, 110.0, 10.0, 0.0, 90.0, 105.0], NAMES)
    assert check.problems == ["rank 3 on node-b: a product of matrices was wrong. Take the device out of use."]
    assert check.notes[0].startswith("rank 2 on node-b computes 10 TFLOP/s, and the one in the middle 95.")


def test_the_table_ends_with_what_failed():
    checks = [
        Check("network", "2 nodes"),
        Check("models", "readable", ["b: none", "c: none"]),
        Check("clocks", "9 s", notes=["late"]),
    ]
    assert doctor.table(checks) == (
        "network  ok      2 nodes\nmodels   FAILED  readable\nclocks   note    9 s\n"
        "\nfailed\n  b: none\n  c: none\n\nworth a look\n  late\n"
    )


def test_the_exit_code_says_whether_anything_failed(monkeypatch, capsys):
    for check, code in ((Check("models", "readable", notes=["slow"]), 0), (Check("models", "readable", ["none"]), 2)):
        monkeypatch.setattr(doctor, "_checks", lambda *_, check=check: [check])
        assert doctor.main([]) == code
        assert capsys.readouterr().out.endswith(doctor.table([check]))


def test_the_run_folder_is_left_as_it_was(tmp_path):
    with doctor._folder(tmp_path / "runs/first") as folder:
        folder.mkdir(parents=True)
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_cannot_be_is_left_to_the_check(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file/runs", tmp_path / ("long" * 99)):
        with doctor._folder(path) as folder:
            assert folder == path
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_words_of_the_doctor_are_those_of_training(capsys):
    assert doctor.main(["trainer.nodes=2", "--fast"]) == 2
    told = capsys.readouterr().err
    assert "unknown key 'trainer.nodes': " in told
    assert "Did you mean trainer.nnodes?" in told
    assert "unknown flag --fast" in told
    assert doctor.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m rltrain.doctor ")
