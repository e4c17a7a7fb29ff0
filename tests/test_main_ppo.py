"""The command line."""

import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq

from rltrain import __version__
from rltrain.main_ppo import main
from tests.config.commands import words

COMMAND = words(
    "algorithm.adv_estimator=grpo data.train_files=/data/train.parquet data.train_batch_size=128 "
    "model.path=/no/model data.filter_overlong_prompts=True "
    "actor.ppo_mini_batch_size=32 rollout.n=16 trainer.n_gpus_per_node=8 trainer.nnodes=8"
)


def test_a_run_that_does_not_fit_is_refused_at_the_start(capsys):
    assert main(COMMAND) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "/data/train.parquet does not exist" in error


def test_a_dry_run_counts_the_rows_that_a_run_would_take(tmp_path, capsys):
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": [str(row) for row in range(700)]}), file)
    here = [*COMMAND, f"data.train_files=['{file}','{file}']", "--dry-run"]
    assert main(here) == 2
    text = capsys.readouterr().out
    assert "10 per epoch of 1,400 prompts, 120 prompts of each left out" in text
    assert "counted before filter_overlong_prompts" in text
    assert main([*here, "data.train_max_samples=300"]) == 2
    assert "2 per epoch of 300 prompts" in capsys.readouterr().out


def test_the_exit_code_is_kept_where_nothing_can_be_written():
    process = subprocess.run(f"{sys.executable} -m rltrain.main_ppo --no-flag >/dev/full 2>&1", shell=True, check=False)
    assert process.returncode == 2


def test_a_thread_of_a_callback_does_not_keep_a_finished_run():
    words = "import threading; threading.Thread(target=threading.Event().wait).start(); main_ppo.leave(3)"
    code = f"from rltrain import main_ppo; main_ppo._LEAVE_S = 0.1; {words}"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 3


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


def test_bytes_that_are_no_text_are_refused_by_name(capsys):
    assert main(["trainer.experiment_name=\udcc3\udcbc", "trainer.total_epochs=0", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "trainer.experiment_name=\ufffd\ufffd: the marks in it are bytes that are no text" in said
    assert "PYTHONUTF8=1" in said
    assert "total_epochs" in said
