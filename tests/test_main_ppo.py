"""The command line."""

import shlex
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain import __version__
from rltrain.main_ppo import main

# The published 64-device command, entry point and paths changed.
BOBA = shlex.split("""
algorithm.adv_estimator=grpo data.train_files=/data/train.parquet data.val_files=/data/val.parquet \
data.train_batch_size=128
data.max_prompt_length=1024 data.max_response_length=27648 data.filter_overlong_prompts=True data.truncation=error
actor_rollout_ref.model.path=/models/DeepSeek-R1-Distill-Qwen-7B actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.ref.fsdp_config.param_offload=True
actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ulysses_sequence_parallel_size=4
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=30000 actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=30000 actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=30000 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl \
actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
actor_rollout_ref.rollout.n=16
actor_rollout_ref.rollout.temperature=0.6 actor_rollout_ref.rollout.top_k=1000000 actor_rollout_ref.rollout.top_p=1.0
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger='[console,tensorboard]' \
trainer.project_name=verl_grpo_boba
trainer.experiment_name=ds_7b_fsdp_sglang trainer.n_gpus_per_node=8 trainer.nnodes=8 trainer.val_before_train=False \
trainer.save_freq=50
trainer.test_freq=-1 trainer.total_epochs=15000
""")


def test_the_published_command_is_planned(capsys):
    assert main([*BOBA, "--dry-run"]) == 2
    text = capsys.readouterr().out
    for words in (
        "8 x 8 = 64", "data-parallel             16", "at most 128 samples each", "2,048 (16 answers",
        "32 (sglang, each on 2 devices, with about 64 samples)", "4 (mini-batches of 32 prompts", "28,672 tokens",
        "at most 120,000 tokens per data-parallel rank: old_log_prob, ref, update_actor",
    ):  # fmt: skip
        assert words in text
    no_effect, refused = text[text.index("no effect\n") :].split("a run would refuse: ")
    for key in ("actor.ppo", "ref.log_prob", "rollout.log_prob"):
        assert f"actor_rollout_ref.{key}_micro_batch_size_per_gpu" in no_effect
    for words in (
        "/data/train.parquet does not exist",
        "needs a running Ray cluster",
        "model.path=/models",
    ):
        assert words in refused


def test_a_run_that_does_not_fit_is_refused_at_the_start(capsys):
    assert main(BOBA) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "/data/train.parquet does not exist" in error


def test_a_dry_run_counts_the_rows_that_a_run_would_take(tmp_path, capsys):
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": [str(row) for row in range(700)]}), file)
    here = [*BOBA, f"data.train_files=['{file}','{file}']", "--dry-run"]
    assert main(here) == 2
    text = capsys.readouterr().out
    assert "10 per epoch of 1,400 prompts, 120 prompts of each left out" in text
    assert "counted before filter_overlong_prompts" in text
    assert main([*here, "data.train_max_samples=300"]) == 2
    assert "2 per epoch of 300 prompts" in capsys.readouterr().out


def test_help_into_a_closed_pipe_is_no_traceback():
    process = subprocess.run(
        f"{sys.executable} -m rltrain.main_ppo --help | true",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stderr == ""


def test_the_exit_code_is_kept_where_nothing_can_be_written():
    process = subprocess.run(f"{sys.executable} -m rltrain.main_ppo --no-flag >/dev/full 2>&1", shell=True, check=False)
    assert process.returncode == 2


def test_a_thread_of_a_callback_does_not_keep_a_finished_run():
    words = "import threading; threading.Thread(target=threading.Event().wait).start(); main_ppo.leave(3)"
    code = f"from rltrain import main_ppo; main_ppo._LEAVE_S = 0.1; {words}"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 3


def test_what_packages_do_at_the_end_is_done_and_modules_are_not_taken_apart():
    words = """
import atexit, runpy, sys, rltrain.config.help
class Module:
    def __del__(self):
        print("taken apart")
def help_text(section):  # stands for a run, which imports packages
    atexit.register(print, "a package ends")
    return "helped\\n"
rltrain.config.help.help_text, sys.argv, sys.modules["a_package"] = help_text, ["main_ppo", "--help"], Module()
runpy.run_module("rltrain.main_ppo", run_name="__main__")
"""
    process = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=False)
    assert (process.returncode, process.stdout) == (0, "helped\na package ends\n"), process.stderr


def test_version_help_and_printed_config(capsys):
    assert main(["--version"]) == 0
    version = capsys.readouterr().out
    assert version.startswith(f"rltrain {__version__}")
    assert "\n  torch  " in version
    assert len(version.splitlines()) < 24
    assert main(["--help", "actor_rollout_ref.rollout.val_kwargs"]) == 0
    text = capsys.readouterr().out
    assert "do_sample (bool | None) = null" in text
    assert "train_files" not in text
    assert main(["--print-config", "data.seed=7"]) == 0
    assert "seed: 7" in capsys.readouterr().out


def test_flags_of_other_tools_are_explained(capsys):
    assert main(["--config-name=ppo_megatron"]) == 2
    assert "--config FILE" in capsys.readouterr().err
    assert main(["--config"]) == 2
    assert "--config: expected one argument" in capsys.readouterr().err
    assert main(["--dryrun"]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--config-path {} --config-name mine", "-cp={} -cn=mine.yaml"])
def test_hydras_flags_name_a_file(tmp_path, capsys, flags):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {seed: 5, truncation: left}")
    assert main([*flags.format(tmp_path).split(), "--print-config", "data.seed=7"]) == 0
    text = capsys.readouterr().out
    assert "seed: 7" in text
    assert "truncation: left" in text
    assert main(["--config-name=ppo_megatron_trainer", "--print-config"]) == 0


def test_no_flag_hides_what_else_is_wrong(capsys):
    command = [
        "--config-path", "conf", "--config-name=mine", "-m", "--nosuch", "--config", "/no/such.yaml", "data.sed=1",
        "actor_rollout_ref.actor.megatron.param_offload=True", "data.train_batch_size=many",
    ]  # fmt: skip
    assert main(command) == 2
    lines = capsys.readouterr().err.splitlines()
    told = ("--config-path", "--config-name", "--multirun", "--nosuch", "/no/such.yaml", "data.sed", "megatron", "many")
    assert [sum(word in line for line in lines) for word in told] == [1] * len(told)


def test_a_config_file_that_is_not_there_is_named(capsys):
    assert main(["--config", "/no/such.yaml", "--dry-run"]) == 2
    assert "/no/such.yaml" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_refused_by_name(capsys):
    assert main(["trainer.experiment_name=\udcc3\udcbc", "trainer.total_epochs=0", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "trainer.experiment_name=\ufffd\ufffd: the marks in it are bytes that are no text" in said
    assert "PYTHONUTF8=1" in said
    assert "total_epochs" in said
