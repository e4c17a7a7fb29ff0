"""Ranks that have run dry compute log-probs of their own answers, until the last answer has ended."""

import numpy as np
import pytest
import torch

from rltrain.algorithms.moments import Moments
from rltrain.base.columns import names as c
from rltrain.config.load import load_config
from rltrain.config.step_passes import make_step_passes
from rltrain.controller.samples import Samples, whole
from rltrain.trainer.balance import Workload, lay_out
from rltrain.trainer.overlap import Overlap, OverlappedPass
from rltrain.trainer.plan import PassBudget
from rltrain.trainer.roles import Pass, Policy
from rltrain.workers.results import GenerationNumbers, PassNumbers
from rltrain.workers.rollout.contract import Sampling
from rltrain.workers.tasks import GenerateTask

# Four ranks, engines of one rank each, weights within two: eight answers of ten tokens, 0 to 3 made by the first two.
ENGINES = np.array([0, 0, 1, 1, 2, 2, 3, 3])
LENGTHS = np.full(8, 10)


class FakeHandle:
    """A call on some ranks; the test says when a rank has returned."""

    def __init__(self, ranks):
        self.ranks, self.added, self.came, self.results = list(ranks), [], set(), {}

    @property
    def done(self):
        return self.came == set(self.ranks)

    def add(self, other):
        self.added.append(other)

    def collect(self):
        assert self.done, "it would wait"

    def of(self, rank):
        return self.results[rank]


class Step:
    """One step. ``begun``: (pass, ranks, samples per data-parallel rank) of each micro-batch beside its generation."""

    def __init__(self, covered=None, num_ranks=4):
        self.samples, self.generation, self.begun = Samples(8), FakeHandle(range(4)), []
        covered = np.ones(8, dtype=bool) if covered is None else covered
        budget = PassBudget(max_tokens=15, max_samples=None)
        self.overlap = Overlap(
            [
                OverlappedPass(self._begin("old"), covered, budget, num_ranks),
                OverlappedPass(self._begin("ref"), np.ones(8, dtype=bool), budget, num_ranks),
            ],
            block=2,
            world=4,
            workload=lambda samples: Workload(np.full(8, 5), LENGTHS, -1 - np.arange(8)),
        )

    def _begin(self, name):
        def begin(samples, layout, ranks):
            self.begun.append((name, ranks, [ids.tolist() for ids in layout.ids]))
            speakers = ranks[:: len(ranks) // len(layout.ids)]
            handle = FakeHandle(ranks)
            handle.results = {
                rank: (f"{name} of {ids}", PassNumbers({name: 1.0 + ids}))
                for rank, ids in zip(speakers, layout.ids, strict=True)
            }
            return Pass(handle, samples, layout, [name], speakers, [0] * len(speakers))

        return begin

    def ends(self, rank, handle=None):
        handle = handle or self.generation
        handle.came.add(rank)
        if handle is self.generation:
            ids = np.flatnonzero(rank == ENGINES)
            self.samples.put(ids, {c.SERVED: np.ones(len(ids), dtype=bool), c.ENGINE: np.full(len(ids), rank)})
            self.samples.attach([whole(f"answers of {rank}", c.GENERATED, ids)])
        self.overlap.rank_returned(self.samples, self.generation, handle, rank)

    def both_end(self, handle):
        for rank in handle.ranks:
            self.ends(rank, handle)


def test_ranks_begin_once_all_that_hold_weights_are_dry():
    step = Step()
    step.ends(1)
    step.ends(3)
    assert not step.begun, "no two neighbours are done"
    step.ends(0)
    assert step.begun == [("old", range(2), [[0], [1]])], "one micro-batch each, of their own answers"


def test_a_micro_batch_follows_the_other_and_every_pass_has_its_turn():
    step = Step()
    for rank in (3, 0, 1):  # the answers of rank 3 are left to it and its neighbour
        step.ends(rank)
    for _ in range(3):
        step.both_end(step.generation.added[-1])
    assert [(name, ids) for name, _, ids in step.begun] == [
        ("old", [[0], [1]]), ("old", [[3], [2]]), ("ref", [[0], [1]]), ("ref", [[3], [2]]),
    ]  # fmt: skip
    assert np.flatnonzero(step.samples.without("old")).tolist() == [4, 5, 6, 7]
    assert step.samples["old"].tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert step.overlap.share == 0.5


def test_nothing_begins_after_the_last_answer():
    step = Step()
    for rank in (0, 1, 2):
        step.ends(rank)
    (chunk,) = step.generation.added
    step.ends(3)
    step.both_end(chunk)
    assert len(step.begun) == 1
    assert np.flatnonzero(step.samples.without("old")).tolist() == [2, 3, 4, 5, 6, 7], "what was begun is kept"


def test_samples_of_the_first_mini_batch_wait_for_the_update():
    step = Step(covered=np.arange(8) % 2 == 1)
    step.ends(2), step.ends(3)
    step.both_end(step.generation.added[-1])
    assert [(name, ids) for name, _, ids in step.begun] == [("old", [[5], [7]]), ("ref", [[4], [5]])]


def test_ranks_that_share_sequences_get_the_same():
    step = Step(num_ranks=2)
    step.ends(2), step.ends(3)
    assert step.begun == [("old", range(2, 4), [[4]])]
    step.both_end(step.generation.added[-1])
    assert not step.samples.without("old")[4]


class FakeGroup:
    """Four ranks. ``answers``: the samples that each has generated; ranks return in the order of the dictionary."""

    world, nodes = 4, (0, 0, 0, 0)

    def __init__(self, answers):
        self.answers, self.begun = answers, []

    def submit(self, calls, ranks=None):
        handle = FakeHandle(ranks or range(4))
        if calls[0].name == "Rollout.generate":
            found = {rank: (f"answers of {rank}", f"texts of {rank}", each) for rank, each in self._found()}
            handle.of, handle.results = found.__getitem__, list(found.values())
            handle.arrivals = lambda stream: self._arrivals(handle)
        else:
            self.begun.append((calls[0].name, handle.ranks, [call.args[0].num_samples for call in calls]))
            copies = len(handle.ranks) // len(calls)
            handle.came = set(handle.ranks) if len(handle.ranks) == self.world else set()
            found = PassNumbers(moments={"entropy": Moments.of(torch.ones(1))})
            handle.results = {
                rank: (f"made {len(self.begun)} {at // copies}", found) for at, rank in enumerate(handle.ranks)
            }
        return handle

    def _found(self):
        for rank, ids in self.answers.items():
            numbers = {c.SLOT: np.array(ids), c.ABORTED: np.zeros(len(ids), dtype=bool)}
            numbers |= {c.RESPONSE_LENGTH: LENGTHS[ids], c.PROMPT_LENGTH: np.full(len(ids), 5)}
            yield rank, GenerationNumbers(seconds={"reshard": 0.0}, per_sample=numbers if ids else {})

    def _arrivals(self, generation):
        for rank in self.answers:
            generation.came.add(rank)
            yield generation, rank
            while generation.added and not generation.added[-1].done:
                early = generation.added[-1]
                for each in early.ranks:
                    early.came.add(each)
                    yield early, each


LATE = {0: [], 1: [], 2: [4, 5, 6], 3: [0, 1, 2, 3, 7]}


@pytest.mark.parametrize("answers", [LATE, dict(sorted(LATE.items(), reverse=True))], ids=["first", "last"])
@pytest.mark.parametrize("key", ["actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"])
def test_a_block_may_have_taken_no_answer(key, answers):
    """Ranks 0 and 1 found the queue empty. Where they end last, nothing is left to be computed after generation."""
    group, block = FakeGroup(answers), 2
    policy = Policy(group, make_step_passes(load_config([f"{key}=True"]).config))
    budget, every = PassBudget(max_tokens=15, max_samples=None), np.ones(8, dtype=bool)
    work = Workload(np.full(8, 5), LENGTHS, -1 - np.arange(8))
    early = [OverlappedPass(begin, every, budget, 4) for begin in (policy.log_probs, policy.ref_log_probs)]
    overlap = Overlap(early, block, group.world, lambda samples: work)
    task = GenerateTask("train", np.arange(4, dtype=np.int32), 2, Sampling(10, 1.0), seed=1, step=1)
    samples, _ = policy.generate(task, rank_listener=overlap)
    assert samples[c.SERVED].all()
    all_of_them = answers is not LATE
    assert overlap.share == all_of_them
    assert {(name, *ranks) for name, ranks, _ in group.begun} == (
        {("Actor.log_probs", 2, 3), ("Actor.ref_log_probs", 2, 3)} if all_of_them else set()
    )
    for begin, made in ((policy.log_probs, c.OLD_LOG_PROBS), (policy.ref_log_probs, policy.ref_column)):
        left = np.flatnonzero(samples.without(made))
        assert len(left) == (0 if all_of_them else 8)
        begin(samples, lay_out([left], work, 4, budget)).collect()
        assert not samples.without(made).any()
    assert [sum(sizes) for _, ranks, sizes in group.begun if len(ranks) == 4] == ([0, 0] if all_of_them else [8, 8])
