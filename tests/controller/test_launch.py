"""What a node of a launch decides by itself: who it is, whom it waits for, whose processes it ends."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rltrain.controller import launch as module
from rltrain.controller.launch_files import beside, offer_token, take_token, write
from rltrain.controller.launch_words import read
from rltrain.controller.nodes import END, MARK, STOP, Node, clusters_here, end_processes
from rltrain.errors import ConfigError, WorkerLost

ENV = (
    "RANK", "NODE_RANK", "SLURM_NODEID", "NNODES", "SLURM_NNODES", "HEAD_FILE", "HEAD_ADDRESS", "MASTER_ADDR", "WAIT_S",
    "MASTER_PORT", "RAY_PORT", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH",
)  # fmt: skip


@pytest.fixture
def say(monkeypatch, tmp_path):
    """say("worker 10.0.0.1", RANK=1): a `Launch`; nothing else is set."""
    for name in ENV:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def node(words="", **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        return read(words.split())

    return node


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ("head", {}, {"role": "head", "rank": None, "file": None, "address": ""}),
        ("", {"RANK": 0}, {"role": "head", "rank": 0, "num_nodes": None}),
        ("", {"NODE_RANK": 2, "RANK": 17}, {"role": "worker", "rank": 2}),
        ("", {"SLURM_NODEID": 1, "SLURM_NNODES": 8}, {"role": "worker", "num_nodes": 8}),
        ("worker 10.0.0.1", {"HEAD_ADDRESS": "10.0.0.2"}, {"address": "10.0.0.1:6379"}),
        ("worker", {"HEAD_ADDRESS": "10.0.0.2:7000"}, {"address": "10.0.0.2:7000"}),
        ("", {"RANK": 1, "MASTER_ADDR": "one", "MASTER_PORT": 29500}, {"address": "one:29500"}),
        ("head --nodes 2 --num-cpus 4 --devices=8", {}, {"num_nodes": 2, "devices": 8}),
        ("head --nodes 2 --num-cpus 4 --temp-dir=/x", {}, {"arguments": ["--num-cpus", "4", "--temp-dir=/x"]}),
        ("head -- run trainer.nnodes=4 trainer.n_gpus_per_node=8", {}, {"num_nodes": 4, "devices": 8}),
        ("head -- run trainer.nnodes=$N", {"NNODES": 4}, {"num_nodes": 4, "command": ["run", "trainer.nnodes=$N"]}),
        ("stop 10.0.0.1:6379", {"HEAD_ADDRESS": "10.0.0.2"}, {"role": "stop", "address": "10.0.0.1:6379"}),
    ],
)  # fmt: skip
def test_a_node_learns_who_it_is(say, words, variables, expected):
    found = vars(say(words, **variables))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        ("", {}, "say head or worker, or set RANK"),
        ("haed", {}, "'haed' is neither head, worker nor stop"),
        ("", {"RANK": "one"}, "RANK=one .* has to be the number of this node: 0, 1, 2"),
        ("head --nodes=0", {}, "--nodes .or NNODES.=0 has to be a whole number, 1 or more"),
        ("head -- run", {}, r"say how many there are, by NNODES=4 or --nodes=4"),
        ("head -- run trainer.nnodes=4", {"NNODES": 2}, "NNODES=2, but the command says trainer.nnodes=4"),
    ],
)
def test_a_node_says_which_word_is_wrong(say, words, variables, message):
    with pytest.raises(ConfigError, match=message):
        say(words, **variables)


def missing(launch, *nodes):
    return "; ".join(module._missing(list(nodes), launch))


def node(rank, npus=8, **changes):
    resources = {"CPU": 4.0, "NPU": float(npus)} if npus else {"CPU": 4.0}
    return Node(f"10.0.0.{rank}", f"n{rank}", rank, resources=resources, **changes)


def test_the_head_names_the_nodes_and_devices_it_waits_for(say):
    launch = say("head --nodes=4", RANK=0)
    assert missing(launch, node(0), node(2)) == "rank 1, 3 (2 of 4 nodes are here)"
    assert missing(launch, node(0), node(1, left=True), node(2), node(3)) == "rank 1 (3 of 4 nodes are here)"
    assert missing(launch, node(0), node(1, 7), node(2), node(3)) == "8 NPUs on n1 (rank 1, 10.0.0.1), which has 7"
    assert missing(launch, *map(node, range(4))) == ""
    with pytest.raises(ConfigError, match=r"two nodes have the same RANK: n1 .* and n9"):
        missing(launch, node(0), node(1), Node("10.0.0.9", "n9", 1, resources={"CPU": 1}))
    unnamed = say("head --nodes=2 --devices=9", RANK=0)
    alone = Node("10.0.0.5", "n5", None, resources={"CPU": 9})
    assert missing(unnamed, alone) == "1 more node; here are n5 (10.0.0.5)"
    assert missing(unnamed, alone, node(1, 0)) == "9 CPUs on n1 (rank 1, 10.0.0.1), which has 4"


def test_waiting_ends_with_what_is_missing(say, capsys):
    launch = say("head", WAIT_S=3)
    with pytest.raises(WorkerLost, match=r"waited 3 s \(WAIT_S\) for rank 1"):
        module._wait_until(lambda: "rank 1", launch, [], "all nodes")
    assert "waiting for rank 1 (1 s left)" in capsys.readouterr().out


def test_a_head_makes_a_token_for_its_user_alone(say, tmp_path):
    file, own = tmp_path / "shared" / "head", tmp_path / "home/.ray/auth_token"
    offer_token(None)
    token = own.read_text().strip()
    assert len(token) == 64
    write(file, "127.0.0.1:1")  # an earlier head, where nobody answers
    write(beside(file), "of an earlier head")
    offer_token(file)
    assert not file.exists()
    assert own.read_text() == beside(file).read_text() == f"{token}\n"
    assert [each.stat().st_mode & 0o777 for each in (own, beside(file))] == [0o600, 0o600]
    # A user's own stands before it.
    say("head", RAY_AUTH_TOKEN="abc")
    offer_token(file)
    assert beside(file).read_text() == "abc\n"


def test_a_worker_takes_the_heads_token_before_its_own(say, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    assert not take_token(tmp_path / "head")
    write(tmp_path / "home/.ray/auth_token", "mine")
    assert take_token(tmp_path / "head")
    assert not os.environ["RAY_AUTH_TOKEN"]
    write(tmp_path / "head.token", "of the head")
    assert take_token(tmp_path / "head")
    assert os.environ["RAY_AUTH_TOKEN"] == "of the head"


def test_a_file_of_a_head_that_answers_is_not_taken_over(say, tmp_path, monkeypatch):
    monkeypatch.setattr("rltrain.controller.launch_files.answers", lambda address: True)
    write(tmp_path / "head", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"names 10.0.0.1:6379, where another head answers"):
        offer_token(tmp_path / "head")


def sleeper(**environment):
    program = "import subprocess, sys, time; subprocess.Popen(['sleep', '100'], env={}); time.sleep(100)"
    return subprocess.Popen([sys.executable, "-IS", "-c", program], env=os.environ | environment)


def test_stop_ends_the_processes_of_one_cluster_alone(say, monkeypatch):
    one, other, stranger = sleeper(**{MARK: "10.0.0.1:6379"}), sleeper(**{MARK: "10.0.0.2:6379"}), sleeper()
    try:
        deadline = time.monotonic() + 30
        # Two of each: the second has lost the mark, as Ray's workers do, and is found by its parent.
        while [len(pids) for pids in clusters_here().values()] != [2, 2] and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(ConfigError, match=r"in 2 clusters: say which, stop 10.0.0.1:6379 or 10.0.0.2:6379"):
            module.stop(say("stop"))
        assert end_processes("10.0.0.1:6379") == 2
        assert one.wait(10) == -signal.SIGTERM
        assert list(clusters_here()) == ["10.0.0.2:6379"]
        assert module.stop(say("stop")) == 0
        assert other.wait(10) == -signal.SIGTERM
        assert stranger.poll() is None
    finally:
        subprocess.run(["pkill", "-P", str(stranger.pid)], check=False)
        for process in (one, other, stranger):
            process.kill()
            process.wait()


class Paper:
    """A board on which nothing has to run."""

    address = "10.0.0.1:6379"

    def __init__(self, **told):
        self.told = told

    def read(self, name):
        return self.told.get(name)

    def tell(self, name, value):
        self.told[name] = value


# A launch script that does not exec; what it runs takes a second to save.
SAVES = (
    "python -IS -c \"import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(1), open('saved', 'w'), "
    "sys.exit(75))); open('begun', 'w'); time.sleep(60)\"; true"
)


@pytest.mark.parametrize("by", ["a signal here", "a signal on another node"])
def test_a_request_to_end_reaches_the_run_and_waits_for_it(say, tmp_path, by):
    board, asked = Paper(), []

    def ask():
        while not (tmp_path / "begun").exists():
            time.sleep(0.05)
        asked.append(signal.SIGTERM) if by == "a signal here" else board.tell(STOP, "n1")

    thread = threading.Thread(target=ask)
    launch = say("head --nodes=1 -- x")
    launch.command[:] = ["bash", "-c", SAVES]
    thread.start()
    assert module._drive(board, launch, asked) == 75
    assert (tmp_path / "saved").exists()
    thread.join()


def test_the_command_learns_where_ray_is_and_its_code_is_kept(say, tmp_path):
    launch = say("head --nodes=3 -- x")
    launch.command[:] = ["bash", "-c", "echo $RAY_ADDRESS $RLTRAIN_NNODES >said; exit 7"]
    assert module._drive(Paper(), launch, []) == 7
    assert (tmp_path / "said").read_text() == "10.0.0.1:6379 3\n"
    launch.command[:] = ["/no/such/program"]
    with pytest.raises(ConfigError, match=r"the command cannot be started: .*'/no/such/program'"):
        module._drive(Paper(), launch, [])


def test_ray_is_told_of_npus_and_its_words_are_shown_when_it_fails(say, monkeypatch):
    started = []

    def run(words, *, env, stdout, **_):
        started.append((words[words.index("start") + 1 :], env[MARK]))
        stdout.write("no room in /dev/shm")
        stdout.flush()
        return subprocess.CompletedProcess(words, len(started) - 1)

    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,3")
    module._ray_start(say("head --temp-dir=/x"), "10.0.0.1:6379", "--head")
    assert started == [(["--head", "--temp-dir=/x", "--resources", '{"NPU": 3}'], "10.0.0.1:6379")]
    with pytest.raises(ConfigError, match=r"ray start --head --resources=1 failed:\nno room in /dev/shm"):
        module._ray_start(say("head --resources=1"), "10.0.0.1:6379", "--head")


def test_the_dashboard_is_off_unless_it_and_its_host_are_named(monkeypatch):
    monkeypatch.delenv("DASHBOARD", raising=False)
    monkeypatch.delenv("DASHBOARD_HOST", raising=False)
    assert module._dashboard() == ["--include-dashboard=false"]
    lacks = ImportError("No module named 'aiohttp_cors'")
    monkeypatch.setattr("ray._private.utils.get_dashboard_dependency_error", lambda: lacks)
    monkeypatch.setenv("DASHBOARD", "1")
    with pytest.raises(ConfigError, match=r"DASHBOARD=1 needs pip install 'ray\[default\]==.*aiohttp_cors"):
        module._dashboard()
    monkeypatch.setattr("ray._private.utils.get_dashboard_dependency_error", lambda: None)
    assert module._dashboard() == ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]
    monkeypatch.setenv("DASHBOARD_HOST", "10.0.0.1")
    assert module._dashboard()[1] == "--dashboard-host=10.0.0.1"


def test_a_worker_leaves_a_head_that_is_silent(say, monkeypatch):
    def silent(name):
        raise ConnectionRefusedError("nobody answers at 10.0.0.1:6379")

    board = Paper()
    board.read = silent
    monkeypatch.setattr(module, "_SILENT_S", 1)
    monkeypatch.setattr(
        module, "_find_head", lambda launch, asked: module._stay(board, Node("10.0.0.2", "n2", 1), asked)
    )
    monkeypatch.setenv("RANK", "1")
    assert module.main(["--", "x"]) == 75


def test_a_worker_stays_until_the_command_has_ended(say, monkeypatch):
    here = Node("10.0.0.2", "n2", 1)
    assert module._stay(Paper(**{END: 7}), here, []) == 7
    monkeypatch.setattr(module, "_SAME_SIGNAL_S", -1)
    board = Paper()
    board.tell = lambda name, value: board.told.update({name: value, END: 75})
    assert module._stay(board, here, [signal.SIGTERM]) == 75
    assert board.told[STOP] == "n2 (rank 1, 10.0.0.2)"
