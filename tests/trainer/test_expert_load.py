"""The expert load of an update is measured, and dead experts are reported once."""

import logging

import numpy as np

from rltrain.trainer.metrics.experts import ExpertLoad
from tests.trainer.steps import EXPERTS
from tests.trainer.test_router_replay import MODE, A

NAMES = ("moe/max_vio/mean", "moe/max_vio/max", "moe/idle_experts", "moe/dead_experts")
EVEN = np.full((2, 4), 100)


def of_moe(metrics):
    return {name: value for name, value in metrics.items() if name.startswith("moe/")}


def test_the_metrics_by_hand():
    load = np.array([[6, 2, 0, 0], [2, 2, 2, 2]])
    # Mean 2: the busiest has three times the mean, so MaxVio is 2; an even layer has 0.
    assert ExpertLoad(4, compiled=False).measure(load) == dict(zip(NAMES, (1.0, 2.0, 2.0, 0.0), strict=True))
    assert ExpertLoad(4, compiled=False).measure(0 * load) == {}


def test_a_step_tells_of_its_experts_however_it_is_cut(process_group, tiny_trainer, moe):
    # One optimizer step, as the router has changed before a second.
    keys = {"actor_rollout_ref__model__path": moe, A + "ppo_mini_batch_size": 4}
    whole = of_moe(tiny_trainer(**keys, **{A + "ppo_max_token_len_per_gpu": 4000}).step(1).metrics)
    assert set(whole) == set(NAMES)
    assert 0 < whole["moe/max_vio/mean"] <= whole["moe/max_vio/max"] <= EXPERTS - 1
    cut = {A + "ppo_micro_batch_size_per_gpu": 1, A + "use_dynamic_bsz": False}
    assert of_moe(tiny_trainer(**keys, **cut).step(1).metrics) == whole
    # In float32 replay chooses what the router would.
    assert of_moe(tiny_trainer(**keys, **{MODE: "R3"}).step(1).metrics) == whole


def dying(steps: int, load: ExpertLoad) -> list[float]:
    """Expert 2 of layer 1 has no tokens any more."""
    loads = EVEN.copy()
    loads[1] = [133, 133, 0, 134]
    return [load.measure(loads)["moe/dead_experts"] for _ in range(steps)]


def test_an_expert_that_dies_is_told_of_once_and_counted(caplog):
    load = ExpertLoad(4, compiled=False)
    for _ in range(3):
        load.measure(EVEN)
    assert dying(4, load) == [0] * 4
    assert not caplog.records
    # A resumed run remembers.
    resumed = ExpertLoad(4, compiled=False)
    resumed.restore(load.state())
    assert dying(3, resumed) == [1] * 3
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert told.getMessage().startswith(
        "1 of the policy's experts got tokens before but none in the last 5 updates, such as expert 2 of MoE layer 1, "
    )
    assert "actor_rollout_ref.actor.router_replay.mode=R2 or R3" in told.getMessage()
    again = ExpertLoad(4, compiled=False)
    again.restore(resumed.state())
    assert dying(1, again) == [1]
    assert len(caplog.records) == 1
    assert again.measure(EVEN)["moe/dead_experts"] == 0


def test_a_load_that_grows_uneven_is_told_of_once(caplog):
    load, uneven = ExpertLoad(8, compiled=False), np.full((1, 8), 50)
    uneven[0, 3] = 450
    for _ in range(7):
        load.measure(np.full((1, 8), 100))
    for step in range(12):
        if step == 4:
            load.measure(np.full((1, 8), 100))  # not in a row
        load.measure(uneven)
        assert len(caplog.records) == (step >= 8)
    assert "moe/max_vio/mean is 3.5, and was 0 in the first updates" in caplog.text
    # One that was uneven from the beginning has not grown.
    caplog.clear()
    load = ExpertLoad(8, compiled=False)
    for _ in range(20):
        load.measure(uneven)
    assert not caplog.records
