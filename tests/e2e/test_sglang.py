"""SGLang on two devices by the command: Ray, two workers, an engine with a process for each (of the double)."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from rltrain.run.report.table import read_metrics
from tests.faults.conftest import own_ray, start  # noqa: F401
from tests.faults.plug import gone, over, wait_for_step
from tests.tiny import small_run

R = "actor_rollout_ref__rollout__"
pytestmark = pytest.mark.usefixtures("own_ray")


@pytest.fixture
def launch(start, tiny_model, arithmetic_files, tmp_path, monkeypatch):  # noqa: F811
    """Start a run with the double as SGLang."""
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tests / "doubles", tests.parent))))

    def launch() -> subprocess.Popen:
        changes = {
            R + "name": "sglang", R + "tensor_model_parallel_size": 2, "trainer__n_gpus_per_node": 2,
            f"+{R}engine_kwargs__sglang__enable_deterministic_inference": True,
            "trainer__total_training_steps": 100_000, "trainer__save_freq": -1, "trainer__save_at_end": False,
        }  # fmt: skip
        return start(small_run(tiny_model, arithmetic_files, tmp_path, **changes), whole=True)

    return launch


def engine_pids() -> list[int]:
    """Return the processes of an engine's forkserver below a training worker."""
    listing = subprocess.run(["ps", "-eww", "-o", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = (line.split(None, 2) for line in listing.splitlines()[1:])
    known = {int(pid): (int(parent), args) for pid, parent, args in rows}

    def above(pid: int) -> tuple[int, str]:
        return known.get(known[pid][0], (0, ""))

    return [
        pid
        for pid, (parent, args) in known.items()
        if "forkserver" in args and "forkserver" in above(pid)[1] and "ray::_Host" in above(parent)[1]
    ]


@pytest.mark.long
@pytest.mark.fault("A killed process of an engine ends the run, exit 75, and leaves none")
def test_a_dead_process_of_an_engine_ends_the_run(launch, tmp_path):
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as a script's `&` does
    try:
        process = launch()
    finally:
        signal.signal(signal.SIGQUIT, before)
    wait_for_step(tmp_path, 2, process)
    for line in read_metrics(tmp_path)[:2]:
        assert line["rollout/log_prob_gap/mean"] < 1e-5
        assert line["rollout/canary_gap"] < 1e-5
    both = engine_pids()
    assert len(both) == 2
    os.kill(both[1], signal.SIGKILL)
    output = over(process, 75)
    assert re.search(r"rank 0 of 2 .*the process died", output)
    gone(tmp_path)
