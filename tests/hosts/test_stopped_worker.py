"""A worker on another host than the driver's is stopped."""

import re
import signal

import pytest

from tests.clock import eventually
from tests.hosts.test_two_hosts import END_S, Run, join, joined, of_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
# Of the longest call, which loads the models on a busy machine.
LIMIT_S = 40


def worker_of(host, job) -> int:
    """Return the worker of an active run on ``host``. Ray rewrites its title with every call, so a single look may miss
    it."""
    found: list[int] = []

    def seen() -> bool:
        found[:] = host.pids("ray::_Host")
        return len(found) == 1 or job.returncode is not None

    eventually(seen, f"a worker on {host.name}", 40)
    assert job.returncode is None, job.output
    return found[0]


@pytest.mark.fault("A stopped worker of another host is named with its host and ended, exit 75")
def test_a_stopped_worker_of_another_host_is_named_and_ended(network, tiny_model, arithmetic_files):
    hosts = network(2)
    for host in reversed(hosts):
        join(host)
    for host in hosts:
        joined(host)
    run = Run(hosts, tiny_model, arithmetic_files)
    job = run.start(2, 1, trainer__hang_timeout_s=LIMIT_S)
    run.wait_for_step(job, 1)
    victim = worker_of(hosts[1], job)
    eventually(lambda: len(of_run(hosts[1])) > 1, "the other host scores too", 40)
    hosts[1].check(f"kill -{signal.SIGSTOP:d} {victim}")
    assert job.wait(END_S) == 75, job.output
    place = rf"hybrid worker, rank \d of 2 \(pid {victim} on host2\), in [\w.]+"
    assert re.search(rf"^error: {place}: not done after \d+ s \(and not responding", job.output, re.MULTILINE)
    assert "Traceback" not in job.output
    for host in hosts:
        eventually(lambda host=host: not of_run(host), f"workers and scorers of {host.name} end", 40)
