"""scripts/ray_start.sh on two hosts without earlier runs, each with separate home, files and network cards."""

import pytest

from tests.clock import eventually
from tests.hosts.hosts import ROOT

# For a busy machine; what is waited for comes long before.
LIMIT_S = 800
SCRIPT = f"bash {ROOT}/scripts/ray_start.sh"
# The driver of a run: says what the cluster is, once per run of it, and then waits to be ended.
DRIVER = """
import ray, signal, sys
ray.init(log_to_driver=False)
print("driver sees", sorted(node["NodeManagerAddress"] for node in ray.nodes()), flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
while True:
    signal.pause()
"""


@pytest.fixture(scope="module")
def hosts(network):
    return network(3)


def ray_of(host):
    return host.pids("raylet") + host.pids("gcs_server")


# Checks of nodes that gather are tested without Ray and hosts in tests/runtime/test_launch.py.
@pytest.mark.long
def test_a_cluster_without_shared_files_gathers_and_ends_alone(hosts):
    head, worker, third = hosts
    log = head.check(f"{SCRIPT} head --num-cpus=1")
    assert f"host1: the head is running at {head.address}:6379\n" in log
    token = head.check("cat ~/.ray/auth_token").strip()
    assert head.check("stat -c %a ~/.ray/auth_token") == "600\n"

    # Without the token, and with another Python: neither is let in, and both say why.
    named = {"HEAD_ADDRESS": head.address, "WAIT_S": 0}
    job = worker.run(f"{SCRIPT} worker --num-cpus=1", named)
    assert (job.returncode, "the head's token, which this node does not have" in job.output) == (75, True)
    job = worker.run(f"{SCRIPT} worker --num-cpus=1", named | {"RAY_AUTH_TOKEN": "0" * 64})
    assert (job.returncode, "this node's token differs from the head's" in job.output) == (75, True)
    (third.shared / "sitecustomize.py").write_text("import platform\nplatform.python_version = lambda: '3.9.0'\n")
    own = named | {"PYTHONPATH": f"{third.shared}:{ROOT}", "RAY_AUTH_TOKEN": token}
    job = third.run(f"{SCRIPT} worker --num-cpus=1", own)
    assert job.returncode == 2
    assert "this node has Python 3.9.0 and Ray" in job.output
    assert not ray_of(third)

    # The first card leads nowhere, and its address is the same on all.
    log = worker.check(f"{SCRIPT} worker --num-cpus=1", named | {"RAY_AUTH_TOKEN": token})
    assert f"host2: joined {head.address}:6379 as {worker.address}" in log
    job = worker.run(f"{SCRIPT} worker --num-cpus=1", named | {"RAY_AUTH_TOKEN": token})
    assert (job.returncode, "this node has already joined 192.0.2.1:6379" in job.output) == (2, True)
    job = head.run(f"{SCRIPT} head --num-cpus=1")
    assert (job.returncode, "port 6379 of this node is in use" in job.output) == (2, True)

    stranger = worker.start("exec -a raylet sleep 100")
    for host in (worker, head):
        assert "processes of 192.0.2.1:6379" in host.check(f"{SCRIPT} stop")
        assert len(ray_of(host)) == (host is worker)
    assert stranger.returncode is None
    stranger.kill()


def test_one_line_on_every_node_runs_the_command_once(hosts):
    head, worker, _ = hosts
    for host in (head, worker):
        host.check(f"{SCRIPT} stop")
    (head.shared / "driver.py").write_text(DRIVER)
    (head.shared / ".ray_head").write_text("192.0.2.3:6379\n")  # of an older run: nobody answers there
    (head.shared / ".ray_head.token").write_text("of an older run\n")
    line = f"exec {SCRIPT} --num-cpus=1 -- python {head.shared}/driver.py"
    second = worker.start(line, {"SLURM_NODEID": 1, "SLURM_NNODES": 2}, cwd=head.shared)
    second.wait_for("waiting for the head: 192.0.2.3:6379 (from")
    first = head.start(line, {"RANK": 0, "NNODES": 2}, cwd=head.shared)
    first.wait_for("driver sees ['192.0.2.1', '192.0.2.2']", LIMIT_S)
    assert "host2 (rank 1, 192.0.2.2): 1 CPU" in first.output
    assert "driver sees" not in second.output
    # Whoever ends one node ends the run: the driver saves, and all have its code.
    worker.check(f"kill -TERM {worker.pids('-m rltrain.runtime.launch')[0]}")
    assert (first.wait(LIMIT_S), second.wait(LIMIT_S)) == (75, 75)
    assert not ray_of(head) + ray_of(worker)
    assert not list(head.shared.glob(".ray_head*"))


@pytest.mark.long
@pytest.mark.fault("A supervised launch gathers anew on all nodes after a kill, and ends on all after one signal")
def test_a_supervised_launch_gathers_again_and_ends_together(hosts):
    head, worker, _ = hosts
    (head.shared / "driver.py").write_text(DRIVER)
    line = f"exec {SCRIPT} --num-cpus=1 -- python {head.shared}/driver.py"
    second = worker.start(line, {"RANK": 1, "NNODES": 2, "RESTARTS": 5}, cwd=head.shared)
    first = head.start(line, {"RANK": 0, "NNODES": 2, "RESTARTS": 5}, cwd=head.shared)
    first.wait_for("driver sees ['192.0.2.1', '192.0.2.2']", LIMIT_S)
    head.check(f"kill -KILL {head.pids('driver.py')[-1]}")
    for job in (first, second):
        job.wait_for("attempt 1 ended with exit code 137", LIMIT_S)
    seen = "driver sees ['192.0.2.1', '192.0.2.2']"
    eventually(lambda: first.output.count(seen) == 2 or first.returncode is not None, "the second attempt", LIMIT_S)
    worker.check(f"kill -TERM {worker.pids('-m rltrain.supervise')[0]}")
    assert (first.wait(LIMIT_S), second.wait(LIMIT_S)) == (75, 75)
    assert "attempt 2 ended with exit code 75" in first.output
    assert "stopped: requested on another node" in first.output
    assert not ray_of(head) + ray_of(worker)
