"""Actor, reference, critic and reward model by the command: Ray, two processes, stop and resume."""

import shutil

import pytest

from rltrain.main_ppo import main
from rltrain.run.report.table import read_metrics
from tests.e2e.test_train import largest_difference, weights
from tests.tiny import save_tiny_reward_model, small_run

pytestmark = pytest.mark.usefixtures("joined")

CHANGES = {
    "algorithm__adv_estimator": "gae", "algorithm__lam": 0.95, "algorithm__use_kl_in_reward": True,
    "algorithm__kl_ctrl__type": "adaptive", "algorithm__filter_groups__enable": True,
    "algorithm__filter_groups__metric": "seq_reward", "algorithm__rollout_correction__rollout_is": "token",
    "critic__optim__lr": 1e-3, "critic__ppo_epochs": 2, "reward_model__enable": True, "reward_model__rule_weight": 1,
    "trainer__n_gpus_per_node": 2,
    "trainer__total_training_steps": 3, "trainer__save_freq": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return save_tiny_reward_model(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture(scope="module")
def straight_run(tiny_model, arithmetic_files, reward_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("roles")
    assert main(small_run(tiny_model, arithmetic_files, folder, reward_model__model__path=reward_model, **CHANGES)) == 0
    return folder


def test_every_role_has_its_timer_and_its_metrics(straight_run):
    lines = read_metrics(straight_run)
    assert len(lines) == 3
    for name in ("values", "update_critic", "ref", "adv", "update_actor"):
        assert all(line[f"timing_s/{name}"] > 0 for line in lines)
    for name in (
        "critic/vf_loss", "critic/vf_explained_var", "critic/values/mean", "actor/reward_kl_penalty",
        "reward/model/mean", "reward/rule/mean", "filter_groups/rounds", "rollout_corr/rollout_is_mean",
    ):  # fmt: skip
        assert all(name in line for line in lines)
    assert (straight_run / "global_step_3" / "critic").is_dir()


# With a critic, adaptive KL and filtered groups, after every step: tests/trainer/test_resume.py.
@pytest.mark.long
def test_a_run_with_all_roles_resumes_bit_for_bit(straight_run, tiny_model, arithmetic_files, reward_model, tmp_path):
    folder = tmp_path / "stopped"
    shutil.copytree(straight_run, folder)
    shutil.rmtree(folder / "global_step_3")
    assert main(small_run(tiny_model, arithmetic_files, folder, reward_model__model__path=reward_model, **CHANGES)) == 0
    assert largest_difference(weights(straight_run, 3), weights(folder, 3)) == 0
    one, other = (read_metrics(each)[-1] for each in (straight_run, folder))
    same = (
        "actor/loss",
        "critic/vf_loss",
        "actor/reward_kl_penalty_coeff",
        "filter_groups/rounds",
        "critic/score/mean",
    )
    assert [one[name] for name in same] == [other[name] for name in same]
