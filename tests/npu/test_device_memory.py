"""On the stand-in: every phase needs what was foretold, and a device that is full says what to type."""

import pytest

from bench.device_memory import CASES, arguments, measured, prepare
from rltrain.config.load import load_config
from rltrain.trainer.memory import forecast
from rltrain.trainer.plan import make_plan

pytestmark = pytest.mark.timeout(600)
CASE = "grpo, all offloaded"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    prepare(folder)
    return folder


def foretold(folder, case):
    cfg = load_config(arguments(folder, case)).config
    return forecast(cfg, make_plan(cfg, 8), 4 << 30)


@pytest.mark.parametrize(
    "case", [each if each == CASE else pytest.param(each, marks=pytest.mark.long) for each in CASES]
)
def test_every_phase_needs_what_was_foretold(made, case):
    told = foretold(made, case)
    # Just above what the largest phase needs, and it runs.
    found = measured(made, case, cap=round(1.1 * max(row.total() for row in told.values())), steps=1)
    for phase, row in told.items():
        assert row.total() == pytest.approx(found[phase][0], rel=0.1), phase
        for owner in ("weights", "gradients", "optimizer", "engine weights"):
            assert row[owner] == pytest.approx(found[phase][1][owner], rel=0.1, abs=1e5), (phase, owner)
    assert found["moving"][0] == 0, "what leaves is gone before anything comes"
    bucket, mask = 4 << 20, 2048**2
    owned = told["sync"]["weights"] + told["sync"]["optimizer"] + told["gen"]["engine weights"]
    assert found["sync"][0] < owned + 2 * bucket + mask, "no second full copy"


def test_a_full_device_says_what_to_type(made):
    need = foretold(made, CASE)["update_actor"].total()
    with pytest.raises(RuntimeError) as caught:
        measured(made, CASE, cap=round(0.9 * need), steps=1)
    said = str(caught.value)
    assert "rank 0, update_actor: the device (" in said
    assert "optimizer 0.0" in said
    assert "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=272" in said
