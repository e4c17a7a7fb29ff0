"""verl launch scripts, run for two steps: the recorded arguments, followed by smaller paths and sizes."""

import math

import pytest

from rltrain.main_ppo import main
from rltrain.run.report.table import read_metrics
from tests.config.test_launches import LAUNCHES, Launch
from tests.images import RED
from tests.tiny import save_tiny_reward_model, write_arithmetic
from tests.tiny_vision import save_tiny_vision_model

pytestmark = pytest.mark.usefixtures("joined")

# Launch -> metrics that show that its main feature was active.
RUNS = {
    "main examples/grpo_trainer/run_qwen3_8b_fsdp.sh": ("actor/kl_loss",),
    "main examples/ppo_trainer/run_qwen3_8b_fsdp.sh": ("critic/vf_loss", "critic/grad_norm"),
    "main examples/rloo_trainer/run_qwen3_8b_fsdp.sh": ("actor/reward_kl_penalty",),
    "main examples/remax_trainer/run_qwen3_8b_fsdp.sh": ("actor/reward_kl_penalty",),
    "0.7 recipe/dapo/run_dapo_qwen2.5_32b.sh": ("reward/overlong/mean",),
    "main examples/gspo_trainer/run_qwen3_8b_fsdp.sh": ("actor/pg_loss",),
    "main examples/tuning/lora/run_qwen3_8b_merge_fsdp.sh": ("actor/kl_loss",),
    "main examples/grpo_trainer/run_mistral_nemo_12b_skyworkrm_fsdp.sh": ("critic/score/mean",),
    "main examples/rollout_correction/run_qwen2_5_7b_fsdp_multi_rs.sh actor_rollout_ref.rollout.n=8": (
        "rollout_corr/rollout_rs_masked_fraction",
    ),
    "main examples/grpo_trainer/run_qwen3_vl_8b_fsdp.sh": ("actor/kl_loss", "perf/image_gb"),
    "0.5 tests/special_e2e/ppo_trainer/run_function_reward.sh MODEL_ID=Qwen/Qwen2-VL-2B-Instruct TRAIN_FILES=geo3k "
    "ADV_ESTIMATOR=gae USE_KL=True SP_SIZE=2": ("critic/vf_loss", "perf/image_gb"),
    "0.5 tests/special_e2e/ppo_trainer/run_function_reward.sh ADV_ESTIMATOR=remax USE_KL=True": ("actor/kl_loss",),
}
# This one uses its own engine, vLLM over two devices; the others generate with hf, which starts at once.
OVER_TWO_DEVICES = list(RUNS)[-1]
# Settings that are reduced if a launch sets them, under its spelling of the key.
A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
SIZES = {
    "data.train_batch_size": 4, "data.gen_batch_size": 4, "data.max_prompt_length": 16, "data.max_response_length": 8,
    A + "ppo_mini_batch_size": 2, A + "ppo_max_token_len_per_gpu": 64, A + "ulysses_sequence_parallel_size": 1,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 64, "critic.ppo_max_token_len_per_gpu": 64,
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": 1, R + "log_prob_max_token_len_per_gpu": 64,
    R + "max_num_batched_tokens": 64, R + "n": 4, "reward_model.overlong_buffer.len": 4, "reward.num_workers": 1,
    "actor_rollout_ref.model.lora_rank": 2,
}  # fmt: skip
MACHINE = {
    "trainer.device": "cpu", "trainer.n_gpus_per_node": 2, "trainer.nnodes": 1, "trainer.logger": "console",
    "trainer.total_training_steps": 2, "trainer.val_before_train": False, "trainer.test_freq": -1,
    "trainer.save_freq": -1,
}  # fmt: skip
# A tiny random model never gives right responses, and groups with equal scores teach nothing.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) % 3 / 2, "acc": len(solution_str) % 3 == 2}
"""


def smaller(launch: Launch, paths: dict[str, object]) -> list[str]:
    """Return the launch's arguments, followed by arguments that shrink it."""
    given = dict(word.lstrip("+").split("=", 1) for word in launch.words)
    ours = {key: value for key, value in (SIZES | paths).items() if given.get(key, "0") != "0"} | MACHINE
    if "reward.reward_model.enable" not in given:
        ours |= {"custom_reward_function.path": paths["custom_reward_function.path"],
                 "custom_reward_function.name": "compute_score"}  # fmt: skip
    ours |= {"trainer.default_local_dir": paths["trainer.default_local_dir"]}
    if f"{launch.version} {launch.name}" != OVER_TWO_DEVICES:
        ours |= {R + "name": "hf", R + "tensor_model_parallel_size": 1}
    return [*launch.words, *(f"{key}={value}" for key, value in ours.items())]


# Every run of the suite makes one with a critic, `make test-long` the others.
_ALWAYS = ("ppo_trainer/run_qwen3",)
_SEEING = {"qwen3_vl": "qwen3_vl", "Qwen2-VL": "qwen2_vl"}


def _always(name: str) -> bool:
    return any(each in name for each in _ALWAYS) and not any(each in name for each in _SEEING)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if _always(name) else pytest.mark.long) for name in RUNS])
def test_a_launch_of_verls_runs_two_steps(name, tiny_model, arithmetic_files, tmp_path):
    (launch,) = (each for each in LAUNCHES if f"{each.version} {each.name}" == name)
    if launch.kind == "images":
        family = next(family for part, family in _SEEING.items() if part in name)
        tiny_model = save_tiny_vision_model(tmp_path / "model", family, tied=True)
        file = write_arithmetic(tmp_path / "data.parquet", range(20), "hiyouga/geometry3k", image=RED)
        arithmetic_files = (file, file)
    paths = {
        "actor_rollout_ref.model.path": tiny_model,
        "critic.model.path": tiny_model,
        "reward.reward_model.model_path": tmp_path / "judge",
        "data.train_files": arithmetic_files[0],
        "data.val_files": arithmetic_files[1],
        "custom_reward_function.path": tmp_path / "reward.py",
        "trainer.default_local_dir": tmp_path / "run",
    }
    (tmp_path / "reward.py").write_text(REWARD)
    save_tiny_reward_model(tmp_path / "judge")
    assert main(smaller(launch, paths)) == 0
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    wanted = ("actor/grad_norm", "critic/score/mean", *RUNS[name])
    for row in rows:
        assert set(wanted) <= row.keys()
        assert all(math.isfinite(row[metric]) for metric in wanted)
