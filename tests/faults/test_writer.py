"""The process that writes the samples is killed, and restarted."""

import os
import re
import signal

import pytest

from rltrain.run.report.samples import read_samples
from tests.faults.plug import below, over, wait_for_step
from tests.tiny import small_run


@pytest.mark.long
@pytest.mark.usefixtures("own_ray")
@pytest.mark.fault(
    "A killed writer of answers is started again: the run goes on, and no answer is missing or it is said"
)
def test_a_killed_writer_is_started_again(start, tiny_model, arithmetic_files, tmp_path):
    process = start(small_run(tiny_model, arithmetic_files, tmp_path / "run", trainer__total_training_steps=30))
    wait_for_step(tmp_path / "run", 3, process)
    (victim,) = [pid for pid, words in below(process.pid).items() if words.startswith("ray::_WriterProcess")]
    os.kill(victim, signal.SIGKILL)
    output = over(process)
    kept = {int(file.stem[-6:]) for file in (tmp_path / "run/samples").glob("train_*.parquet")}
    # Steps of a tenth of a second continue while it starts, and only so many samples wait.
    match = re.search(r"the responses of these steps are missing: train ([\d, -]+)", output)
    ranges = [word.split("-") for word in match[1].split(",")] if match else []
    missing = {step for each in ranges for step in range(int(each[0]), int(each[-1]) + 1)}
    assert kept == set(range(1, 31)) - missing, output
    assert {1, 30} <= kept, output
    assert len(read_samples(tmp_path / "run", step=30))
