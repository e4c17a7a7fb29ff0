"""Stops within a notice, and saves on demand, by real signals to the command."""

import os
import signal

import pytest

from rltrain.run.report.table import read_metrics
from tests.clock import eventually
from tests.faults.plug import over, wait_for_step
from tests.tiny import small_run

SLOW_ON_DEMAND = """
import pathlib, signal
def compute_score(data_source, solution_str, ground_truth, extra_info, folder):
    if (pathlib.Path(folder) / "slow").exists():
        (pathlib.Path(folder) / "sleeps").touch()
        signal.pause()
    return 1.0
"""


def saved(folder) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in folder.glob("global_step_*"))


@pytest.mark.fault("SIGUSR1 saves and goes on; a step longer than trainer.stop_notice_s is left, the one before saved")
@pytest.mark.long
@pytest.mark.usefixtures("joined")
def test_a_step_longer_than_the_notice_is_left(start, tiny_model, arithmetic_files, tmp_path):
    (tmp_path / "reward.py").write_text(SLOW_ON_DEMAND)
    run = tmp_path / "run"
    args = small_run(
        tiny_model, arithmetic_files, run, trainer__total_training_steps=100000, trainer__stop_notice_s=12,
        custom_reward_function__path=tmp_path / "reward.py", reward__timeout_s=100,
        custom_reward_function__reward_kwargs__folder=tmp_path,
    )  # fmt: skip
    process = start(args)
    wait_for_step(run, 2, process)
    process.send_signal(signal.SIGUSR1)
    eventually(lambda: saved(run))
    on_demand = saved(run)[0]
    wait_for_step(run, on_demand + 2, process)
    (tmp_path / "slow").touch()
    eventually((tmp_path / "sleeps").exists)
    process.send_signal(signal.SIGTERM)
    output = over(process, 75)
    last = read_metrics(run)[-1]["step"]
    assert saved(run) == [on_demand, last]
    assert "SIGUSR1: saving after this step, then continuing" in output
    assert f"step {last + 1} needs about " in output
    assert output.splitlines()[-1] == f"stopped after step {last} of 100000; the same command resumes"
    (tmp_path / "slow").unlink()
    again = start([*args, f"trainer.total_training_steps={last + 1}"])
    output = over(again)
    assert [line["step"] for line in read_metrics(run)] == list(range(1, last + 2))


@pytest.mark.fault("A generation longer than trainer.stop_notice_s is given up, exit 75")
@pytest.mark.long
@pytest.mark.usefixtures("own_ray")
def test_a_generation_longer_than_the_notice_is_given_up(start, trap, tiny_model, arithmetic_files, tmp_path):
    args = small_run(
        tiny_model, arithmetic_files, tmp_path, trainer__stop_notice_s=60, data__max_response_length=20000,
        actor_rollout_ref__rollout__ignore_eos=True, actor_rollout_ref__actor__ppo_max_token_len_per_gpu=40000,
    )  # fmt: skip
    trap.lay("generate", 0)  # no signal: it only shows that a worker exists
    process = start(args, **trap.environment)
    trap.wait(process)
    process.send_signal(signal.SIGTERM)
    output = over(process, 75)
    assert "the duration of step 1 is not known yet" in output
    assert output.splitlines()[-1] == "stopped after step 0 of 2; nothing is saved yet, so the same command starts over"
    assert os.path.exists(tmp_path / "train.log")
