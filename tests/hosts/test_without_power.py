"""Hosts lose power in the middle of a step, one after the other, and the run resumes without a new command."""

import json
import re

import pytest

from tests.clock import eventually
from tests.hosts.test_two_hosts import IMPATIENT, START_S, Run, of_run
from tests.tiny import small_run

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("process_group"), pytest.mark.timeout(900)]
STEPS = 5
# A node that no longer hears the head gives it up after 45 s, and then ends Ray there; a busy machine takes its time.
LEFT_S = 100
# The scores are those of always. Some steps wait in the middle until they are let go.
REWARD = """
import pathlib
from tests.clock import eventually
from rltrain.rewards.scorers.registry import find_scorer
def compute_score(data_source, solution_str, ground_truth, extra_info, folder, steps):
    folder = pathlib.Path(folder)
    lines = folder / "run" / "metrics.jsonl"
    step = 1 + (len(lines.read_text().splitlines()) if lines.exists() else 0)
    if step in steps:
        (folder / f"waits_{step}").touch()
        eventually((folder / f"go_{step}").exists)
    return find_scorer(data_source)(solution_str, ground_truth, extra_info)
"""


@pytest.mark.fault("A run whose hosts lose power, the first and then the second, goes on to its end with nobody typing")
def test_a_run_outlives_each_of_its_hosts(network, tiny_model, arithmetic_files, tmp_path):
    hosts = network(2)
    run = Run(hosts, tiny_model, arithmetic_files)
    (run.shared / "reward.py").write_text(REWARD)
    words = small_run(
        run.model, run.files, run.folder, trainer__nnodes=2, trainer__total_training_steps=STEPS, trainer__save_freq=1,
        custom_reward_function__path=run.shared / "reward.py", reward__timeout_s=300,
        custom_reward_function__reward_kwargs__folder=run.shared,
        custom_reward_function__reward_kwargs__steps="[2,4]",
    )  # fmt: skip

    def line(host):
        environment = {"RANK": host.number - 1, "NNODES": 2, "RESTARTS": 5, "HEAD_FILE": f"{run.shared}/head"}
        command = f"python -m rltrain.main_ppo {' '.join(words)}"
        return host.start(f"exec bash scripts/ray_start.sh --num-cpus=2 -- {command}", environment | IMPATIENT)

    def lose(host, job, step) -> None:
        """Power off a host in the middle of ``step``."""
        waits = run.shared / f"waits_{step}"
        eventually(lambda: waits.exists() or job.returncode is not None, f"step {step}", START_S)
        assert waits.exists(), job.output
        assert of_run(hosts[1])
        host.power_off()
        (run.shared / f"go_{step}").touch()

    first, second = map(line, hosts)
    lose(hosts[0], first, 2)
    eventually(lambda: not of_run(hosts[1]), "workers and scorers of host2 end without a head", LEFT_S)
    assert second.returncode is None, second.output
    hosts[0].boot()
    first = line(hosts[0])
    lose(hosts[1], first, 4)
    hosts[1].boot()
    second = line(hosts[1])
    assert (first.wait(START_S), second.wait(START_S)) == (0, 0), first.output + second.output
    attempts = [json.loads(each) for each in (run.folder / "attempts.jsonl").read_text().splitlines()]
    assert [attempt["exit_code"] for attempt in attempts] == [75, 0]
    assert re.search(r"the node host2 \(192.0.2.2\) has left", attempts[0]["cause"])
    for host in hosts:
        eventually(lambda host=host: not of_run(host), f"workers and scorers of {host.name} end", 20)

    assert [each["step"] for each in run.lines] == list(range(1, STEPS + 1))
    run.learns_what_one_process_learns(tmp_path)
