"""A real run under the supervisor, which starts a separate Ray for each attempt."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain.run.checkpoints.manifest import find_damage
from rltrain.run.report.table import read_metrics
from tests.clock import eventually
from tests.faults.plug import gone, over, wait_for_step
from tests.hosts.hosts import forbidden
from tests.tiny import small_run

# As scripts/kubernetes/job.yaml starts it: a process namespace, whose first process has no default signal handlers and
# gets all orphans.
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
# Before the command: children of a process that ends are orphans, and end some time later.
ORPHANS = ["bash", "-c", 'for each in 1 2 3 4 5 6; do (sleep $each &); done; exec "$@"', "bash"]


@pytest.fixture
def supervised(start, tiny_model, arithmetic_files, tmp_path):
    """supervised(before, inside, first): a supervised run whose driver is killed; SIGTERM ends it. first(process): the
    pid of the supervisor."""

    def run(before, inside, first):
        run = small_run(
            tiny_model, arithmetic_files, tmp_path, trainer__total_training_steps=100000, trainer__save_freq=1
        )
        command = [*before, sys.executable, "-m", "rltrain.main_ppo", *run]
        process = start(["--wait-s", "0", "--", *command], "rltrain.supervise", inside=inside)
        wait_for_step(tmp_path, 2, process)
        supervisor = first(process)
        (driver,) = (pid for pid, _, args in children(supervisor) if "-m rltrain.main_ppo" in args)
        os.kill(driver, signal.SIGKILL)
        eventually((tmp_path / "attempts.jsonl").exists)
        killed = json.loads((tmp_path / "attempts.jsonl").read_text())
        assert (killed["exit_code"], killed["cause"]) == (137, "killed by SIGKILL")
        wait_for_step(tmp_path, killed["step"] + 2, process)
        first(process)
        os.kill(supervisor, signal.SIGTERM)  # as `docker stop` and the kubelet do, from outside
        output = over(process, 75)
        last = read_metrics(tmp_path)[-1]["step"]
        assert f"stopped after step {last} of 100000; the same command resumes" in output
        assert not find_damage(tmp_path / f"global_step_{last}")
        assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, last + 1))
        gone(tmp_path)

    return run


@pytest.mark.long
@pytest.mark.fault(
    "A driver that is killed is started again by the supervisor, and SIGTERM to that saves and ends both"
)
@pytest.mark.usefixtures("own_ray")
def test_the_supervisor_goes_on_after_a_kill_and_saves(supervised):
    supervised([], [], lambda process: process.pid)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.fault(
    "A container whose first process is the supervisor goes on after a kill, saves at SIGTERM, keeps no zombies"
)
@pytest.mark.usefixtures("own_ray")
def test_the_supervisor_is_the_first_process_of_a_container(supervised):
    if reason := forbidden():
        pytest.skip(reason)

    def first(process):
        pid = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        assert re.search(r"^NSpid:\t\d+\t1$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        eventually(lambda: not zombies(pid), "no zombies")
        return pid

    supervised(ORPHANS, CONTAINER, first)


def children(first: int) -> list[tuple[int, str, str]]:
    """Return pid, state and command line of each child."""
    listing = subprocess.run(["ps", "-eww", "-o", "ppid=,pid=,stat=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 3) for line in listing.stdout.splitlines()]
    return [(int(pid), state, args) for parent, pid, state, args in rows if int(parent) == first]


def zombies(first: int) -> list[str]:
    """Return the ended children that the first process of a container has not reaped."""
    return [args for _, state, args in children(first) if state.startswith("Z")]
