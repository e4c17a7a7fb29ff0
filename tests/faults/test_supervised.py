"""A real run under the supervisor, which starts its own Ray each time."""

import json
import os
import signal
import sys

import pytest

from rltrain.report import read_metrics
from tests.faults.plug import PATIENCE_S, gone, wait_for_step, wait_until
from tests.tiny import small_run


@pytest.mark.long
@pytest.mark.fault(
    "A driver that is killed is started again by the supervisor, and SIGTERM to that saves and ends both"
)
@pytest.mark.usefixtures("own_ray")
def test_the_supervisor_goes_on_after_a_kill_and_saves(start, tiny_model, arithmetic_files, tmp_path):
    run = small_run(tiny_model, arithmetic_files, tmp_path, trainer__total_training_steps=100000, trainer__save_freq=1)
    command = [sys.executable, "-m", "rltrain.main_ppo", *run]
    process = start(["--wait-s", "0", "--", *command], "rltrain.supervise")
    wait_for_step(tmp_path, 2, process)
    driver = int((tmp_path / "run.lock").read_text().split()[1])
    os.kill(driver, signal.SIGKILL)
    assert wait_until(lambda: (tmp_path / "attempts.jsonl").exists())
    killed = json.loads((tmp_path / "attempts.jsonl").read_text())
    assert (killed["exit_code"], killed["cause"]) == (137, "killed by SIGKILL")
    wait_for_step(tmp_path, killed["step"] + 2, process)
    process.terminate()
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, output
    last = read_metrics(tmp_path)[-1]["step"]
    assert f"stopped after step {last} of 100000; the same command goes on" in output
    assert (tmp_path / f"global_step_{last}" / "manifest.json").is_file()
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, last + 1))
    assert gone(tmp_path)
