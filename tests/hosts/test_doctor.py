"""The doctor on two hosts: what is wrong with one of them is found from the other, by name."""

import re

import pytest

from tests.hosts.hosts import ROOT
from tests.tiny import save_tiny_model

DOCTOR = "python -m rltrain.doctor ray_kwargs.ray_init.address=auto actor_rollout_ref.model.path=/tmp/model"
CHANGED = ROOT / "rltrain/stop.py"


@pytest.fixture
def hosts(network):
    """Two hosts with Ray; the second has another version of a file, and no model."""
    first, second = network(2)
    started = f"{ROOT}/scripts/ray_start.sh"
    environment = {"HEAD_FILE": first.shared / "ray"}
    first.check(f"{started} head --num-cpus=1", environment | {"NODE_IP": first.address})
    second.check(f"(cat {CHANGED}; echo '# newer') > /tmp/newer.py; mount --bind /tmp/newer.py {CHANGED}")
    second.check(f"{started} worker --num-cpus=1", environment | {"NODE_IP": second.address})
    save_tiny_model(first.own / "tmp/model")
    return first, second


def row(output: str, name: str) -> str:
    """The state and the finding of a check."""
    (found,) = re.findall(rf"^{name} +(\S.*)$", output, re.MULTILINE)
    return re.sub(" +", " ", found)


def test_the_doctor_names_what_is_wrong_until_nothing_is(hosts):
    first, second = hosts
    ill = first.run(f"{DOCTOR} trainer.default_local_dir=/tmp/runs/first", timeout_s=300)
    assert ill.returncode == 2, ill.output
    for check in ("versions", "models", "run folder"):
        assert row(ill.output, check).startswith("FAILED")
    assert row(ill.output, "network").startswith("ok 2 nodes, connections within")
    assert row(ill.output, "collectives") == "note not tried"
    for said in (
        "host2 (192.0.2.2) has other versions than this command (other code: rltrain/stop.py)",
        "host2 (192.0.2.2): actor_rollout_ref.model.path=/tmp/model: there is no such folder",
        "trainer.default_local_dir=/tmp/runs/first is not one folder for all nodes: a file was written there, and "
        "host2 (192.0.2.2) does not see it.",
    ):
        assert said in ill.output
    assert "host1 (192.0.2.1)" not in ill.output.partition("\nfailed\n")[2]
    assert not (first.own / "tmp/runs").exists()

    second.check(f"umount {CHANGED}")
    save_tiny_model(second.own / "tmp/model")
    well = first.run(f"{DOCTOR} trainer.default_local_dir={first.shared}/runs/first", timeout_s=300)
    assert well.returncode == 0, well.output
    assert "FAILED" not in well.output
    assert row(well.output, "devices") == "ok 2 x CPU"
    assert re.match(r"\w+ 2 ranks: all-reduce [\d.]+ GB/s, all-gather [\d.]+ GB/s", row(well.output, "collectives"))
    ends = r"rank \d on host\d \(192.0.2.\d\)"
    between = row(well.output, "between nodes")
    assert re.match(rf"ok 1 pair: [\d.]+ GB/s \(median\), least [\d.]+: {ends} and {ends}$", between)
    assert second.traffic()[0] > 2**24
    assert not (first.shared / "runs").exists()
