"""The doctor on two hosts: a problem of one of them is found from the other, and names the host."""

import re

import pytest

from tests.hosts.hosts import ROOT
from tests.tiny import save_tiny_model


# The doctor of one host, with every check: tests/test_doctor.py.
@pytest.mark.long
def test_the_doctor_names_what_is_wrong_with_a_host(network):
    first, second = network(2)
    script, where = f"bash {ROOT}/scripts/ray_start.sh", {"HEAD_FILE": first.shared / "ray"}
    first.check(f"{script} head --num-cpus=1", where)
    second.check(f"{script} worker --num-cpus=1", where)
    save_tiny_model(first.own / "tmp/model")

    settings = "ray_kwargs.ray_init.address=auto actor_rollout_ref.model.path=/tmp/model"
    job = first.run(f"python -m rltrain.doctor {settings} trainer.default_local_dir=/tmp/runs/first", timeout_s=300)
    assert job.returncode == 2, job.output
    rows = dict(re.findall(r"^(\w[\w /]+?) {2,}(\S.*)$", re.sub(r"^/", "", job.output, flags=re.M), re.M))
    for check in ("models", "run folder"):
        assert rows.pop(check).startswith("FAILED")
    assert not [row for row in rows.values() if row.startswith("FAILED")]
    assert rows["devices"] == "ok      2 x CPU"
    assert rows["network"].startswith("ok      2 nodes, connections within")
    assert re.search(r"2 ranks: all-reduce [\d.]+ GB/s, all-gather [\d.]+ GB/s per rank", rows["collectives"])
    ends = r"rank \d on host\d \(192.0.2.\d\)"
    pair = rf"1 pair: [\d.]+ GB/s \(median\), least [\d.]+: {ends} and {ends}$"
    assert re.search(pair, rows["between nodes"]), job.output

    failed = job.output.partition("\nfailed\n")[2]
    for said in (
        "host2 (192.0.2.2): actor_rollout_ref.model.path=/tmp/model: there is no such folder",
        "trainer.default_local_dir=/tmp/runs/first is not one folder for all nodes: a file was written there, and "
        "host2 (192.0.2.2) does not see it.",
    ):
        assert said in failed
    # Beside others a host may be slow, and is told so.
    assert not [line for line in failed.splitlines() if "host1" in line and "computes" not in line]
    assert not (first.own / "tmp/runs").exists()  # as it was before
