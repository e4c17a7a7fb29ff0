"""Stand-in NPU: measured memory of each phase equals the estimate; an out-of-memory error names the keys to change."""

import pytest

from bench.device_memory import CASES, PROMPTS, arguments, compare, estimated, measured, pinned_bytes, prepare
from rltrain.config.load import load_config
from rltrain.run.preflight.memory_room import host_forecast
from rltrain.trainer.plan import make_plan

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
CASE = "grpo, all offloaded"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    prepare(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_every_phase_needs_what_was_foretold(made, case):
    # AdamW has no state on the device until the first update ends.
    steps = 2 if case in ("grpo, nothing offloaded", "grpo, moments in bfloat16") else 1
    compared = compare(made, case, steps, room=1.02)  # a device of little more than that
    found = {phase: (told, owners, peak) for phase, told, owners, peak in compared}
    for phase, (told, owners, peak) in found.items():
        assert told.total() == pytest.approx(peak, rel=0.1), phase
        # The first step of AdamW makes its state within the update.
        for owner in ("weights", "gradients"):
            assert told[owner] == pytest.approx(owners[owner], rel=0.1, abs=1e5), (phase, owner)
    bucket, mask = 4 << 20, 2048**2
    owned = found["sync"][0]["weights"] + found["sync"][0]["optimizer"] + found["gen"][0]["engine weights"]
    assert found["sync"][2] < owned + 2 * bucket + mask, "no second full copy"
    cfg = load_config(arguments(made, case)).config
    host, pinned = host_forecast(cfg, make_plan(cfg, PROMPTS)), pinned_bytes(made, case)
    for owner in ("offloaded", "checkpoint copies"):
        assert host[owner] == pytest.approx(pinned[owner], rel=0.1), owner


@pytest.mark.fault("A device that is full says which keys to lower")
def test_a_device_of_a_little_less_says_what_to_type(made):
    need = estimated(made, CASE)[0]["update_actor"].total()
    with pytest.raises(RuntimeError) as caught:
        measured(made, CASE, cap=round(0.95 * need), steps=1)
    said = str(caught.value)
    assert "rank 0, update_actor: the device (" in said
    assert "gradients" in said
    assert "actor_rollout_ref.actor.ppo_max_token_len_per_gpu less than 544" in said
    assert "actor.fsdp_config" not in said, "the update needs what these would send away"
