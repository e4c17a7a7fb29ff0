"""What nodes say of themselves, and what a run makes of it. The nodes are answers of this process, changed by hand."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from rltrain.base.errors import ConfigError, WorkerError, WorkerLost
from rltrain.base.versions import fingerprint
from rltrain.run.preflight import health
from rltrain.run.preflight.health import Check, look_at_nodes, refuse, try_collectives
from rltrain.workers import node
from tests.tiny import save_tiny_model, small_config


class Answered:
    """`Handle` of a call that is over."""

    def __init__(self, found) -> None:
        self.found = found

    def collect(self, deadline_s):
        return self.found


class Hosts:
    """`WorkerGroup` of two nodes with two ranks each. asked, answered: what changes questions to and answers of rank 2,
    the first of node b, by name of the function."""

    world = 4

    def __init__(self, asked=lambda question: question, **answered) -> None:
        self.firsts = {0: "127.0.0.1", 2: "127.0.0.1"}
        self.names = ["a", "a", "b", "b"]
        self.asked, self.answered = asked, answered

    def ask(self, function, questions):
        name = function.__name__
        changed = [self.asked(each) if at == 2 and name == "look" else each for at, each in enumerate(questions)]
        found = [function(each) for each in changed]
        found[2] = self.answered.get(name, lambda found: found)(found[2])
        return Answered(found)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Look at two nodes and give the checks by name. The one that is wrong is ``b``."""
    monkeypatch.setattr(node, "SEEN_S", 0.3)
    monkeypatch.setattr(health, "ray_logs", lambda: "/tmp/ray/session_1/logs")

    def run(hosts: Hosts, **trainer) -> dict[str, Check]:
        cfg = small_config()
        cfg.trainer.device, cfg.actor_rollout_ref.model.path = "cpu", str(model)
        for key, value in trainer.items():
            setattr(cfg.trainer, key, value)
        (tmp_path / "run").mkdir(exist_ok=True)
        found = {check.name: check for check in look_at_nodes(hosts, cfg, tmp_path / "run")}
        assert list((tmp_path / "run").iterdir()) == []
        assert not node.open_doors
        return found

    return run


def problems(found: dict[str, Check]) -> str:
    """The only problem."""
    (problem,) = [problem for check in found.values() for problem in check.problems]
    return problem


def elsewhere(folder: Path, *, seen: bool = False):
    """Questions of a node that sees another folder under the same name; ``seen``: with a copy of what was there."""

    def asked(question):
        proof = folder / question.proof.name
        if seen:
            proof.mkdir(parents=True)
            (proof / "driver").write_text(proof.name)
        return replace(question, proof=proof)

    return asked


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


def test_a_copy_of_the_run_folder_is_no_shared_folder(run, tmp_path):
    assert "b does not give back what it writes" in problems(run(Hosts(elsewhere(tmp_path / "b", seen=True))))


def test_a_node_that_cannot_write_is_named(run):
    def asked(question):
        (question.proof / "rank_2").mkdir()  # root may write anywhere, but not over a folder
        return question

    assert "b sees it and cannot write beside it (Is a directory)" in problems(run(Hosts(asked)))


def test_a_run_that_saves_nothing_needs_no_shared_folder(run, tmp_path):
    found = run(Hosts(elsewhere(tmp_path / "b")), save_freq=-1, save_at_end=False)
    assert "does not see it" in found["run folder"].notes[0]
    assert found["run folder"].problems == []


@pytest.mark.parametrize("place", ["file/run", "run"], ids=["unusable", "unwritable"])
def test_a_run_folder_that_takes_no_files_is_a_failed_row(model, tmp_path, monkeypatch, place):
    monkeypatch.setattr(node, "SEEN_S", 0.3)
    monkeypatch.setattr(health, "ray_logs", lambda: "/tmp/ray/session_1/logs")
    (tmp_path / "file").touch()
    if place == "run":  # root may write anywhere
        monkeypatch.setattr(Path, "mkdir", lambda self, **_: (_ for _ in ()).throw(PermissionError(13, "denied")))
    cfg = small_config()
    cfg.trainer.device, cfg.actor_rollout_ref.model.path = "cpu", str(model)
    found = {check.name: check for check in look_at_nodes(Hosts(), cfg, tmp_path / place)}
    assert problems(found).startswith(f"trainer.default_local_dir={tmp_path / place}: nothing can be written there (")


def test_storage_that_hangs_is_called_so(tmp_path):
    class Hanging(Hosts):
        def ask(self, function, questions):
            return self

        def collect(self, deadline_s):
            raise WorkerLost("hybrid worker, rank 2 of 4 (pid 1 on b), in look: not done after 300 s")

    cfg = small_config()
    cfg.trainer.device = "cpu"
    with pytest.raises(WorkerLost, match=r"rank 2 of 4(.*\n)The nodes were .* storage hangs there: try `ls` on that"):
        look_at_nodes(Hanging(), cfg, tmp_path)


def test_a_node_that_nobody_reaches_is_told_once(run):
    said = problems(run(Hosts(look=changed(port=1))))
    assert said.startswith("b: no node can connect to it (Connection refused). Is this the address")
    assert "NODE_IP" in said


def test_a_line_that_is_shut_names_both_ends(run):
    said = problems(run(Hosts(reach=lambda found: ["No route to host", *found[1:]])))
    assert said.startswith("a: b cannot connect to it (No route to host)")


def test_other_versions_and_other_code_are_named(run):
    versions = fingerprint() | {"torch": "2.1.0", "rltrain/base/stop.py": "0123"}
    said = problems(run(Hosts(look=changed(versions=versions))))
    assert said.startswith("b has other versions than this command (torch 2.1.0, here 2.")
    assert "other code: rltrain/base/stop.py). Install the same" in said


def test_packages_that_the_driver_lacks_are_compared(run, monkeypatch):
    monkeypatch.setattr(health, "fingerprint", lambda: fingerprint() | {"sglang": "none"})
    said = problems(run(Hosts(look=changed(versions=fingerprint() | {"sglang": "0.2"}))))
    assert "sglang 0.2, here none" in said


def test_a_model_that_one_node_lacks_is_named(run, tmp_path):
    def asked(question):
        return replace(question, models=tuple((key, f"{tmp_path}/nowhere") for key, _ in question.models))

    said = problems(run(Hosts(asked)))
    assert said.startswith("b: actor_rollout_ref.model.path=")
    assert "there is no such folder" in said


def test_a_clock_that_is_wrong_is_a_note(run):
    (note,) = run(Hosts(part=lambda found: found - 90))["clocks"].notes
    assert note.startswith("b: its clock is 90 s behind")


def test_a_broken_device_is_refused_and_a_full_one_noted(run):
    said = problems(run(Hosts(look=changed(device_error="torch sees no NPU device"))))
    assert said.startswith("b, rank 2: torch sees no NPU device.")
    found = [node.Facts(rank, "b", "Ascend910B3", memory=(60 << 30, 64 << 30)) for rank in range(4)]
    found[3] = replace(found[3], memory=(20 << 30, 64 << 30))
    check = health._devices(found)
    assert check.found == "4 x Ascend910B3"
    assert check.notes == [
        "b, rank 3: 20.0 of 64.0 GiB of the device are free. Another process has the rest: npu-smi info or "
        "nvidia-smi on that node names it."
    ]


def test_small_memory_disks_and_limits_are_notes(run):
    found = run(Hosts(look=changed(room={"/dev/shm": 0.0625, "local disk": -2.0, "open files": 1024})))
    assert "b: /dev/shm: 0.1 GiB. Ray and NCCL want more: --shm-size=64g" in found["/dev/shm"].notes[0]
    assert "b: local disk: -2 GiB for Ray. Free some" in found["local disk"].notes[0]
    assert "b: open files: 1,024 per process. Type `ulimit -n 65536`" in found["open files"].notes[0]
    assert all(not check.problems for check in found.values())


@pytest.mark.parametrize("kind", [WorkerLost, WorkerError])
def test_a_first_collective_that_fails_points_to_the_doctor(kind):
    class Group:
        def submit(self, calls):
            raise kind("hybrid worker, rank 3 of 4 (pid 1 on b), in Links.collectives: not done after 600 s.")

    with pytest.raises(kind, match=r"rank 3 of 4(.*\n)This was the first time.* python -m rltrain\.doctor, with"):
        try_collectives(Group())


def test_a_run_refuses_all_problems_at_once_and_logs_notes(caplog):
    refuse([Check("clocks", "9 s", notes=["b: its clock is late"])])
    assert "note: b: its clock is late" in caplog.text
    with pytest.raises(ConfigError, match="one\ntwo\nthree"):
        refuse([Check("models", "", ["one", "two"]), Check("run folder", "", ["three"])])


def test_storage_that_shows_a_file_late_is_shared_storage(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "SEEN_S", 30.0)
    file, asked = tmp_path / "driver", []

    def late(seconds: float) -> None:
        asked.append(seconds)
        if len(asked) == 3:
            file.write_text(tmp_path.name)

    monkeypatch.setattr(time, "sleep", late)
    assert node.unseen([file]) == [""]
    assert len(asked) == 3


def test_files_that_do_not_come_are_waited_for_together(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    assert node.unseen([tmp_path / f"rank_{rank}" for rank in range(64)]) == ["does not see it"] * 64
    assert now[0] == pytest.approx(node.SEEN_S, abs=1)
