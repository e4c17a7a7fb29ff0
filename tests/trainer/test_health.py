"""The reports of nodes about themselves, and the run's conclusions. The reports are made in this process and edited."""

from dataclasses import replace
from pathlib import Path

import pytest

from rltrain.common.device import get_device
from rltrain.common.errors import ConfigError
from rltrain.common.versions import fingerprint
from rltrain.models.weights.spec import specs_of
from rltrain.run.preflight import health
from rltrain.run.preflight.health import Check, check_nodes, refuse
from rltrain.workers.diagnostics import node
from tests.tiny import save_tiny_model, small_config


class Answered:
    """`Handle` of a finished call."""

    def __init__(self, found) -> None:
        self.found = found

    def collect(self, deadline_s):
        return self.found


class Hosts:
    """`WorkerGroup` of two nodes with two ranks each. asked, answered: functions that change requests to and replies of
    rank 2, the first of node b, by name of the called function."""

    world = 4

    def __init__(self, asked=lambda question: question, **answered) -> None:
        self.firsts = {0: "127.0.0.1", 2: "127.0.0.1"}
        self.names = ["a", "a", "b", "b"]
        self.asked, self.answered = asked, answered

    def ask(self, function, questions):
        name = function.__name__
        changed = [self.asked(each) if at == 2 and name == "probe_node" else each for at, each in enumerate(questions)]
        found = [function(each) for each in changed]
        found[2] = self.answered.get(name, lambda found: found)(found[2])
        return Answered(found)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Check two nodes and return the checks by name. The faulty node is ``b``."""
    monkeypatch.setattr(node, "SEEN_S", 0.3)
    monkeypatch.setattr(health, "ray_logs", lambda: "/tmp/ray/session_1/logs")

    def run(hosts: Hosts, **trainer) -> dict[str, Check]:
        cfg = small_config()
        cfg.trainer.device, cfg.actor_rollout_ref.model.path = "cpu", str(model)
        for key, value in trainer.items():
            setattr(cfg.trainer, key, value)
        (tmp_path / "run").mkdir(exist_ok=True)
        checks = check_nodes(hosts, cfg.trainer, specs_of(cfg, get_device("cpu")), tmp_path / "run")
        found = {check.name: check for check in checks}
        assert list((tmp_path / "run").iterdir()) == []
        assert not node.open_ports
        return found

    return run


def problems(found: dict[str, Check]) -> str:
    """Return the only problem."""
    (problem,) = [problem for check in found.values() for problem in check.problems]
    return problem


def elsewhere(folder: Path):
    """Make the requests of a node see another folder under the same name."""
    return lambda question: replace(question, proof=folder / question.proof.name)


def changed(**facts):
    return lambda found: replace(found, **facts)


def test_two_nodes_in_order_have_nothing_to_say(run):
    found = run(Hosts())
    assert [check.problems + check.notes for check in found.values()] == [[]] * len(found)
    assert found["devices"].found == "4 x CPU"
    assert found["network"].found.startswith("2 nodes, ")
    assert "torch 2." in found["versions"].found


def test_a_run_folder_that_a_node_does_not_see_is_refused(run, tmp_path):
    said = problems(run(Hosts(elsewhere(tmp_path / "b"))))
    assert said.startswith(f"trainer.default_local_dir={tmp_path / 'run'} is not one folder for all nodes")
    assert "b does not see it" in said
    assert "on storage that all nodes mount" in said


def test_a_node_that_cannot_write_is_named(run):
    def asked(question):
        (question.proof / "rank_2").mkdir()  # root may write anywhere, but not over a folder
        return question

    assert "b sees it but cannot write next to it (Is a directory)" in problems(run(Hosts(asked)))


def test_a_run_that_saves_nothing_needs_no_shared_folder(run, tmp_path):
    found = run(Hosts(elsewhere(tmp_path / "b")), save_freq=-1, save_at_end=False)
    assert "does not see it" in found["run folder"].notes[0]
    assert found["run folder"].problems == []


def test_a_node_that_nobody_reaches_is_told_once(run):
    said = problems(run(Hosts(probe_node=changed(port=1))))
    assert said.startswith("b: no node can connect to it (Connection refused). Is this the address")
    assert "NODE_IP" in said


def test_other_versions_and_other_code_are_named(run):
    versions = fingerprint() | {"torch": "2.1.0", "rltrain/common/stop.py": "0123"}
    said = problems(run(Hosts(probe_node=changed(versions=versions))))
    assert said.startswith("b has other versions than this command (torch 2.1.0, here 2.")
    assert "other code: rltrain/common/stop.py). Install the same" in said


def test_a_model_that_one_node_lacks_is_named(run, tmp_path):
    def asked(question):
        return replace(question, models=tuple((key, f"{tmp_path}/nowhere") for key, _ in question.models))

    said = problems(run(Hosts(asked)))
    assert said.startswith("b: actor_rollout_ref.model.path=")
    assert "the folder does not exist" in said


def test_a_clock_that_is_wrong_is_a_note(run):
    (note,) = run(Hosts(close=lambda found: found - 90))["clocks"].notes
    assert note.startswith("b: its clock is 90 s behind")


def test_a_broken_device_is_refused_and_a_full_one_noted(run):
    said = problems(run(Hosts(probe_node=changed(device_error="torch sees no NPU device"))))
    assert said.startswith("b, rank 2: torch sees no NPU device.")
    busy = changed(device="Ascend910B3", memory=(20 << 30, 64 << 30))
    full, _ = run(Hosts(probe_node=busy))["devices"].notes
    assert full.startswith("b, rank 2: 20.0 of 64.0 GiB of the device are free. Another process has the rest: npu-smi")


def test_small_memory_disks_and_limits_are_notes(run):
    found = run(Hosts(probe_node=changed(room={"/dev/shm": 0.0625, "local disk": -2.0, "open files": 1024})))
    assert "b: /dev/shm: 0.1 GiB. Ray and NCCL need more: --shm-size=64g" in found["/dev/shm"].notes[0]
    assert "b: local disk: -2 GiB for Ray. Free some" in found["local disk"].notes[0]
    assert "b: open files: 1,024 per process. Run `ulimit -n 65536`" in found["open files"].notes[0]
    assert all(not check.problems for check in found.values())


def test_a_run_refuses_all_problems_at_once_and_logs_notes(caplog):
    refuse([Check("clocks", "9 s", notes=["b: its clock is late"])])
    assert "note: b: its clock is late" in caplog.text
    with pytest.raises(ConfigError, match="one\ntwo\nthree"):
        refuse([Check("models", "", ["one", "two"]), Check("run folder", "", ["three"])])
