"""Workers that share sequences: which samples each gets, and whose result is used."""

import numpy as np

from rltrain.config.load import load_config
from rltrain.config.step_passes import make_step_passes
from rltrain.runtime.samples import Samples, whole
from rltrain.trainer.batching.balance import Layout
from rltrain.trainer.roles import Critic
from rltrain.workers.interface.results import PassNumbers, UpdateNumbers


class FakeGroup:
    """Four workers that record their calls and return their rank."""

    world = 4
    nodes = (0, 0, 1, 1)

    def submit(self, calls, ranks=None):
        self.asked = [call for call in calls for _ in range(self.world // len(calls))]
        return self

    def collect(self):
        return [self.of(rank) for rank in range(self.world)]

    def of(self, rank):
        call = self.asked[rank]
        seen = np.full(len(call.args[0].parts[0].rows), rank)
        if call.num_objects:
            return f"made by {rank}", PassNumbers({"seen": seen})
        return UpdateNumbers(np.zeros(1), np.zeros(1), shares={"loss": np.array([rank])}, maxima={"peak": rank})


def critic_and_samples() -> tuple[Critic, Samples, FakeGroup]:
    group, samples = FakeGroup(), Samples(5)
    columns = ("prompt", "response", "response_mask", "values", "returns")
    samples.attach([whole("generated", columns[:3], np.arange(5))])
    samples.attach([whole("scored", columns[3:], np.arange(5))])
    return Critic(group, make_step_passes(load_config([]).config)), samples, group


def test_neighbours_share_samples_and_the_first_one_counts():
    critic, samples, group = critic_and_samples()
    layout = Layout([np.array([4, 0]), np.array([1, 2, 3])], [[(2,)], [(3,)]])
    critic.values(samples, layout)
    assert [call.args[0].parts[0].rows.tolist() for call in group.asked] == [[4, 0], [4, 0], [1, 2, 3], [1, 2, 3]]
    assert [call.args[1] for call in group.asked] == [[2], [2], [3], [3]]
    assert [part.ref for part in samples.parts_with("values")][1:] == ["made by 0", "made by 2"]
    assert samples["seen"].tolist() == [0, 2, 2, 2, 0]


def test_an_update_counts_samples_once_and_memory_per_device():
    critic, samples, group = critic_and_samples()
    layout = Layout([np.array([4, 0]), np.array([1, 2, 3])], [[(2,)], [(3,)]])
    results = critic.update(samples, layout, [["first"], ["second"]], 0.1)
    assert [call.args[1] for call in group.asked] == [["first"], ["first"], ["second"], ["second"]]
    assert [result.shares["loss"].tolist() for result in results] == [[0], [2]]
    assert [result.maxima["peak"] for result in results] == [1, 3]
