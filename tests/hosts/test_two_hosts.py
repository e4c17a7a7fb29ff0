"""One run over two hosts gives the result of one process, despite any failure of the second host."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from rltrain.models.weights.names import CheckpointNames, gathered_weights
from rltrain.run.report.table import read_metrics
from tests.clock import eventually
from tests.distance import distance
from tests.local import local_trainer
from tests.tiny import small_run

# A run that nothing befalls is in every run of the suite: test_running_cluster.py.
pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.timeout(900), pytest.mark.long]
# For a slow and busy machine; what is waited for comes long before.
START_S, END_S = 240, 150
# Ray counts a silent node as lost after 65 s. Here after 20.
IMPATIENT = {"RAY_health_check_period_ms": 1000, "RAY_health_check_timeout_ms": 3000}


def join(host) -> None:
    """Run the script on this host, which starts or joins a Ray."""
    environment = {"RANK": host.number - 1, "NNODES": 2, "HEAD_FILE": f"{host.shared}/head", **IMPATIENT}
    host.ray = host.start("bash scripts/ray_start.sh --num-cpus=2", environment)


def joined(host) -> None:
    assert host.ray.wait(START_S) == 0, host.ray.output


def of_run(host) -> list[int]:
    """Return the workers, reward workers and scorers, by the host's own pids."""
    names = ("ray::_Host", "ray::RewardWorker", "rltrain.runtime.slots")
    return [pid for name in names for pid in host.pids(name)]


class Run:
    """The command of a run, repeated on the first host with different numbers of nodes and workers."""

    def __init__(self, hosts, model, files, environment=None, **keys) -> None:
        self.hosts, self.shared, self.ended, self._environment = hosts, hosts[0].shared, [], environment or {}
        self._keys = keys
        self.folder = self.shared / "run"
        self.model = shutil.copytree(model, self.shared / "model")
        self.files = tuple(shutil.copy(file, self.shared) for file in files)

    def start(self, nodes: int, workers: int, steps: int = 100000, **changes):
        keys = {"trainer__nnodes": nodes, "trainer__n_gpus_per_node": workers, "trainer__total_training_steps": steps}
        keys |= {"trainer__save_freq": 1, "ray_kwargs__ray_init__address": "auto", **self._keys, **changes}
        words = small_run(self.model, self.files, self.folder, **keys)
        return self.hosts[0].start(f"exec python -m rltrain.main_ppo {' '.join(words)}", self._environment)

    def wait_for_step(self, job, step: int) -> None:
        eventually(lambda: self.last_step >= step or job.returncode is not None, f"step {step}", START_S)
        assert self.last_step >= step, job.output

    def learns_what_one_process_learns(self, folder) -> list[dict]:
        """Check that its last weights are those of one process that makes all steps. Return that process's metrics."""
        found = load_file(self.folder / f"global_step_{self.last_step}/huggingface/model.safetensors")
        start = load_file(self.model / "model.safetensors")
        keys = {"trainer__total_training_steps": self.last_step, **self._keys}
        alone = local_trainer(small_run(self.model, self.files, folder, **keys))
        metrics = [alone.step(step).metrics for step in range(1, self.last_step + 1)]
        policy = alone.worker.actor.policy
        weights = gathered_weights(policy, torch.float32, names=CheckpointNames(policy.model))
        expected = {weight.name: weight.values for weight in weights}
        moved = [{name: each[name] - start[name] for name in start} for each in (found, expected)]
        assert distance(*moved) < 1e-4
        return metrics

    def end(self, job) -> None:
        job.wait(END_S)
        self.ended.append(job)

    @property
    def lines(self) -> list[dict]:
        return read_metrics(self.folder) if (self.folder / "metrics.jsonl").exists() else []

    def line_of_second_step(self, job) -> dict:
        """Return the line of the second step that ``job`` itself has made; older lines may be from the previous
        command."""

        def made() -> list[int]:
            return [int(step) for step in re.findall(r"step (\d+)/", job.output)]

        eventually(lambda: len(made()) > 1 or job.returncode is not None, "a second step", START_S)
        assert len(made()) > 1, job.output
        self.wait_for_step(job, made()[1])
        return self.lines[made()[1] - 1]

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.lines), default=0)


@pytest.fixture(scope="module")
def run(network, tiny_model, arithmetic_files):
    """The second host loses its raylet, returns on a bad wire, and loses its cable; the first finishes the
    run alone."""
    hosts = network(2, delay_ms=0)
    for host in reversed(hosts):  # in any order
        join(host)
    for host in hosts:
        joined(host)
    run = Run(hosts, tiny_model, arithmetic_files)
    job = run.start(2, 2)
    run.wait_for_step(job, 1)
    run.machines = json.loads((run.folder / "env.json").read_text())["hosts"]
    hosts[1].kill("raylet/raylet")
    run.end(job)
    join(hosts[1])
    joined(hosts[1])
    run.refused = run.start(2, 1, trainer__default_local_dir="/tmp/run")
    run.refused.wait(END_S)
    hosts[0].wire(delay_ms=100, loss=0.01)
    job = run.start(2, 1)
    run.slow = run.line_of_second_step(job)
    hosts[1].cut()
    run.end(job)
    run.end(run.start(1, 1, run.last_step + 1))
    return run


@pytest.mark.fault("Weights are right after a host was lost twice and came back")
def test_two_hosts_learn_what_one_process_learns(run, tmp_path):
    """The runs use 2 x 2 workers, then 2 x 1, then one, with the same samples and weights."""
    assert sorted(run.machines) == ["host1", "host2"]
    assert run.ended[2].returncode == 0, run.ended[2].output
    assert [line["step"] for line in run.lines] == list(range(1, run.last_step + 1))
    for one, other in zip(run.lines, run.learns_what_one_process_learns(tmp_path), strict=True):
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], abs=1e-5)


def test_the_engines_of_both_hosts_have_the_trained_weights(run):
    assert all(line["rollout/log_prob_gap/mean"] < 1e-5 for line in run.lines)


@pytest.mark.fault("Training goes on over a wire that is slow and loses packets")
def test_training_goes_on_over_a_bad_wire(run):
    """A ping takes 200 ms, and one frame in a hundred is lost each way."""
    # It did pass the wire, and more than five times.
    assert run.slow["timing_s/update_actor"] > 1, (run.slow, [each.output for each in run.ended])


@pytest.mark.fault("A host that loses its raylet or its cable is named, exit 75; the command goes on")
@pytest.mark.parametrize("which", [0, 1], ids=["raylet_killed", "cable_pulled"])
def test_a_lost_host_is_named_and_the_command_goes_on(run, which):
    job = run.ended[which]
    assert job.returncode == 75, job.output
    (message,) = re.findall("^error: .*", job.output, re.MULTILINE)
    # A scorer of the host may be missed before its workers are.
    missed = r"(rank|reward worker) \d of \d \(pid \d+ on host2\), in [\w. ]+"
    assert re.search(rf"{missed}: the node host2 \(192.0.2.2\) has left", message)
    assert "If scripts/ray_start.sh ran this command, run it again on every node." in message
    assert "If it only started Ray, start Ray again on that node, or lower trainer.nnodes." in message
    assert "Run the same command again" in message
    assert "Traceback" not in job.output
    assert "state-dump" not in job.output


@pytest.mark.fault("A run folder that not all hosts share is refused before a step, exit 2")
def test_a_run_folder_that_is_not_shared_is_refused_before_a_step(run):
    assert run.refused.returncode == 2, run.refused.output
    assert "error: trainer.default_local_dir=/tmp/run is not one folder for all nodes" in run.refused.output
    assert "host2 (192.0.2.2) does not see it" in run.refused.output
    for host in run.hosts:
        assert not list(host.own.glob("tmp/run/global_step_*"))
        assert not (host.own / "tmp/run/metrics.jsonl").exists()


def test_no_worker_is_left_where_the_command_ran(run):
    eventually(lambda: not run.hosts[0].pids("_Host"), "workers of host1 end")
