"""The command: its output and its errors."""

import re

import pandas as pd
import pytest

from rltrain.main_ppo import main as train
from rltrain.tools.simulate import main

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


@pytest.fixture
def words(model):
    return [
        "algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={model}", "data.train_batch_size=8",
        "data.max_prompt_length=32", "data.max_response_length=64", f"{A}ppo_mini_batch_size=4", f"{R}n=4",
        f"{A}ppo_max_token_len_per_gpu=4096", "trainer.n_gpus_per_node=2",
    ]  # fmt: skip


@pytest.fixture
def simulate(words, capsys):
    def run(*more):
        code = main([*words, *more])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def phases(text):
    """Return the seconds by phase of a step."""
    found = re.findall(r"^ +(\w+) +([\d.,e-]+) s +\d+%", text, re.MULTILINE)
    return {name: float(value.replace(",", "")) for name, value in found}


def test_a_step_is_foretold_for_a_device_that_is_not_there(simulate):
    code, text, error = simulate("--device", "910B3", "--nodes", "2", "--lengths", "mean:20,max:64")
    assert code == 0, error
    assert "on 4 x Ascend910B3, 2 nodes (estimated, not measured on this device)" in text
    assert {"generate_sequences", "reshard", "gen", "old_log_prob", "update_actor", "step"} <= phases(text).keys()
    assert "step_ms=" in text
    assert "memory of a device in GiB" in text


def test_assumptions_are_printed_and_can_be_set(simulate):
    text = simulate("--device", "H100", "--lengths", "mean:20,max:64", "--assume", "step_ms=1000,reward_ms=500")[1]
    assert "step_ms=1000 " in text
    # 64 tokens of the longest answer; 32 samples.
    assert phases(text)["generate_sequences"] == pytest.approx(64, rel=0.02)
    assert phases(text)["reward"] == 16


def test_the_dry_run_with_a_device_is_the_same_command(words, simulate, capsys):
    flags = ("--device", "H100", "--lengths", "mean:20,max:64")
    assert train([*words, "--dry-run", *flags]) == 0
    assert capsys.readouterr().out == simulate(*flags)[1]
    assert train([*words, *flags]) == 2
    assert "--device is a flag of --dry-run" in capsys.readouterr().err


def test_hours_of_an_epoch_come_from_the_rows_of_the_data(simulate, tmp_path):
    pd.DataFrame({"prompt": ["?"] * 100}).to_parquet(tmp_path / "rows.parquet")
    flags = ("--device", "H100", "--lengths", "mean:20,max:64", "--assume", "reward_ms=1000000", f"{R}n=2")
    text = simulate(*flags, f"data.train_files={tmp_path / 'rows.parquet'}", "data.train_batch_size=8")[1]
    # 12 steps of 16 samples, which are scored for 1,000 s each.
    assert "epoch       53.3 hours for 12 steps" in text
    assert "epoch" not in simulate(*flags)[1]
    (tmp_path / "damaged.parquet").write_text("PAR1")
    code, _, error = simulate(*flags, f"data.train_files={tmp_path / 'damaged.parquet'}")
    assert code == 2
    assert "damaged.parquet' cannot be read as parquet" in error


def test_a_device_that_would_be_out_of_memory_is_refused(simulate):
    code, text, _ = simulate("--device", "H100", "trainer.device_memory_gb=0.001", f"{R}name=hf")
    assert code == 2
    assert "a run would run out of memory" in text


LENGTHS = ["--lengths", "mean:20,max:64"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--device", "H1000"], "--device H1000: the peaks of this chip are not known. Known are 910B1, "),
        (LENGTHS, "--device is not given"),
        (["--device", "H100", "--lengths", "mean:x,max:64"], "'x' is not a number"),
        (["--device", "H100", "--lengths", "mean:20,max:64,prompt:8,image:9"], "image: is part of prompt:"),
        (
            ["--device", "H100", "--lengths", "mean:20,max:64,image:9"],
            "is not a vision-language model. Leave image: out",
        ),
        (["--device", "H100", *LENGTHS, "--nodes", "0"], "trainer.nnodes"),
        (["--device", "H100", *LENGTHS, "--assume", "mfu=1"], "unknown key mfu. Known are"),
        (["--device", "H100", *LENGTHS, "--assume", "update_share=2"], "it must be over 0 and at most 1"),
        (["--device", "H100", *LENGTHS, "data.train_batch_size=7"], "ppo_mini_batch_size"),
        (["--device", "H100", *LENGTHS, "actor_rollout_ref.model.path=/none"], "path=/none: the folder does not exist"),
        (["--device"], "expected one argument"),
    ],
)
def test_what_is_wrong_is_told_with_the_way_out(simulate, flags, told):
    code, _, error = simulate("trainer.device=cpu", *flags)
    assert code == 2
    assert told in error
    assert "Traceback" not in error
