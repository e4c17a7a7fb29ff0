"""The real command on tiny models with experts: replay, expert load, learning."""

import pytest
from safetensors.torch import load_file

from rltrain.main_ppo import main
from rltrain.run.report.table import read_metrics
from tests.distance import distance
from tests.tiny import small_run
from tests.trainer.test_router_replay import save_moe

pytestmark = pytest.mark.usefixtures("joined")

R = "actor_rollout_ref__rollout__"
REPLAY = {"actor_rollout_ref__actor__router_replay__mode": "R3"}
SIZE = "actor_rollout_ref__actor__fsdp_config__expert_parallel_size"
LOAD = ("moe/max_vio/mean", "moe/max_vio/max", "moe/idle_experts", "moe/dead_experts")
# Only the text of the response decides, and a random model can write it.
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count("7") / 8
"""


@pytest.mark.parametrize("expert_parallel_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_two_ranks_count_and_balance_the_load_as_one_does(arithmetic_files, tmp_path, expert_parallel_size):
    model, found = save_moe(tmp_path / "model"), []
    shared = {"trainer__n_gpus_per_node": 2, SIZE: expert_parallel_size}
    for name, ranks in (("one", {}), ("two", shared)):
        changes = {**REPLAY, "actor_rollout_ref__actor__router_aux_loss_coef": 0.1, **ranks}
        folder = tmp_path / name
        assert main(small_run(model, arithmetic_files, folder, **changes)) == 0
        found.append([line for line in read_metrics(folder) if line["step"]])
    for one, two in zip(*found, strict=True):
        assert 0 < one["moe/max_vio/mean"] <= one["moe/max_vio/max"]
        # The kernels of another machine may sample another token.
        assert [two[name] for name in LOAD] == pytest.approx([one[name] for name in LOAD], rel=0.05, abs=1)
        assert one["rollout/log_prob_gap/mean"] < 1e-4
        for name in ("actor/pg_loss", "moe/aux_loss", "actor/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-2, abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_four_ranks_learn_the_same_weights_wherever_their_experts_are(arithmetic_files, tmp_path, size):
    model, found = save_moe(tmp_path / "model"), []
    for experts in (1, size):
        folder = tmp_path / f"{experts}"
        assert (
            main(small_run(model, arithmetic_files, folder, trainer__n_gpus_per_node=4, **REPLAY, **{SIZE: experts}))
            == 0
        )
        found.append(load_file(folder / "global_step_2/huggingface/model.safetensors"))
    start = load_file(model / "model.safetensors")
    # Rounding of the sums over ranks, relative to the movement in two steps.
    moved = [{name: whole[name] - values for name, values in start.items()} for whole in found]
    assert distance(moved[1], moved[0]) < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("mode", ["disabled", "R2", "R3"])
def test_a_mixture_of_experts_learns(arithmetic_files, tmp_path, mode):
    (tmp_path / "reward.py").write_text(SCORER)
    changes = {
        "actor_rollout_ref__actor__router_replay__mode": mode,
        "custom_reward_function__path": tmp_path / "reward.py",
        "trainer__total_training_steps": 24,
        R + "n": 8,
    }
    assert main(small_run(save_moe(tmp_path / "model"), arithmetic_files, tmp_path / "run", **changes)) == 0
    steps = [line for line in read_metrics(tmp_path / "run") if line["step"]]
    rewards = [line["critic/score/mean"] for line in steps]
    assert sum(rewards[-4:]) / 4 > 0.3 > 3 * sum(rewards[:4]) / 4
    assert all(line["moe/max_vio/mean"] > 0 for line in steps)
