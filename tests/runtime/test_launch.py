"""Decisions of a node in a launch: its rank, the nodes that it waits for, the processes that it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from rltrain.common.attempt import ATTEMPT, read_reports, report_to_supervisor
from rltrain.common.errors import ConfigError, Interrupted, NodesMissing, WorkerLost
from rltrain.runtime.launch import ray_node as launch_ray
from rltrain.runtime.launch import rendezvous as module
from rltrain.runtime.launch.arguments import read_launch
from rltrain.runtime.launch.command import run_command
from rltrain.runtime.launch.files import head_token, publish, token_file, unpublish, use_head_token, write
from rltrain.runtime.launch.store import BEAT, END, HEAD, MARK, STOP, Node, clusters_here, end_processes
from tests.clock import VirtualClock, eventually

ENV = (
    "RANK", "NODE_RANK", "SLURM_NODEID", "NNODES", "SLURM_NNODES", "HEAD_FILE", "HEAD_ADDRESS", "MASTER_ADDR", "WAIT_S",
    "MASTER_PORT", "RAY_PORT", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "NODE_IP", "LAUNCH_ID", "SLURM_JOB_ID",
)  # fmt: skip


@pytest.fixture
def make_launch(monkeypatch, tmp_path):
    """make_launch("worker 10.0.0.1", RANK=1): return a `Launch` without other settings."""
    for name in ENV:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def node(words="", **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        return read_launch(words.split())

    return node


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ("head", {}, {"role": "head", "rank": 0, "file": None, "address": ""}),
        ("", {"RANK": 0}, {"role": "head", "rank": 0, "num_nodes": None}),
        ("", {"SLURM_NODEID": 1, "SLURM_NNODES": 8}, {"role": "worker", "num_nodes": 8}),
        ("worker 10.0.0.1", {"HEAD_ADDRESS": "10.0.0.2"}, {"address": "10.0.0.1:6379"}),
        ("", {"RANK": 0, "HEAD_ADDRESS": "10.0.0.2:7000"}, {"role": "head", "port": "7000", "file": None}),
        ("", {"RANK": 1, "MASTER_ADDR": "one", "MASTER_PORT": 29500}, {"address": "one:29500"}),
        ("head --nodes 2 --num-cpus 4 --temp-dir=/x", {}, {"arguments": ["--num-cpus", "4", "--temp-dir=/x"]}),
        ("head -- run trainer.nnodes=4 trainer.n_gpus_per_node=8", {}, {"num_nodes": 4, "devices": 8}),
        ("head -- run trainer.nnodes=$N", {"NNODES": 4}, {"num_nodes": 4, "command": ["run", "trainer.nnodes=$N"]}),
        ("stop 10.0.0.1:6379", {"HEAD_ADDRESS": "10.0.0.2"}, {"role": "stop", "address": "10.0.0.1:6379"}),
    ],
)  # fmt: skip
def test_a_node_learns_who_it_is(make_launch, words, variables, expected):
    found = vars(make_launch(words, **variables))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        ("", {}, "give head or worker, or set RANK"),
        ("head", {"RAY_PORT": 10500}, "the head's port 10500 .* is used by Ray itself: .* Set RAY_PORT=6379"),
        ("", {"RANK": "one"}, "RANK=one: 'one' is not a whole number"),
        ("head -- run", {}, r"with NNODES=4 or --nodes=4"),
        ("head -- run trainer.nnodes=4", {"NNODES": 2}, "NNODES=2, but the command has trainer.nnodes=4"),
    ],
)
def test_a_node_says_which_word_is_wrong(make_launch, words, variables, message):
    with pytest.raises(ConfigError, match=message):
        make_launch(words, **variables)


def missing(launch, *nodes):
    return "; ".join(module.nodes_missing(list(nodes), launch))


def node(rank, npus=8, **changes):
    resources = {"CPU": 4.0, "NPU": float(npus)} if npus else {"CPU": 4.0}
    return Node(f"10.0.0.{rank}", f"n{rank}", rank, resources=resources, **changes)


def test_the_head_names_the_nodes_and_devices_it_waits_for(make_launch):
    launch = make_launch("head --nodes=4", RANK=0)
    assert missing(launch, node(0), node(2)) == "rank 1, 3 (2 of 4 nodes have joined)"
    assert missing(launch, node(0), node(1, left=True), node(2), node(3)) == "rank 1 (3 of 4 nodes have joined)"
    assert missing(launch, node(0), node(1, 7), node(2), node(3)) == "8 NPUs on n1 (rank 1, 10.0.0.1), which has 7"
    assert missing(launch, *map(node, range(4))) == ""
    with pytest.raises(ConfigError, match=r"two nodes have the same RANK: n1 .* and n9"):
        missing(launch, node(0), node(1), Node("10.0.0.9", "n9", 1, resources={"CPU": 1}))
    unnamed = make_launch("head --nodes=2 --devices=9", RANK=0)
    alone = Node("10.0.0.5", "n5", None, resources={"CPU": 9})
    assert missing(unnamed, alone) == "1 more node; joined: n5 (10.0.0.5)"
    assert missing(unnamed, alone, node(1, 0)) == "9 CPUs on n1 (rank 1, 10.0.0.1), which has 4"


def test_waiting_ends_with_the_missing_nodes(make_launch, capsys):
    with pytest.raises(WorkerLost, match=r"waited 3 s \(WAIT_S\) for rank 1"):
        module.wait_for(lambda: "rank 1", make_launch("head", WAIT_S=3), [], "all nodes", VirtualClock())
    assert "waiting for rank 1 (0 s left)" in capsys.readouterr().out


def test_a_head_makes_a_token_for_its_user_alone(make_launch, tmp_path):
    file, own = tmp_path / "shared" / "head", tmp_path / "home/.ray/auth_token"
    head_token(None)
    token = own.read_text().strip()
    assert len(token) == 64
    write(file, "127.0.0.1:1")  # an earlier head, where nobody answers
    write(token_file(file), "of an earlier head")
    own.chmod(0o644)  # as Ray's own command leaves it
    assert head_token(file) == token
    assert not file.exists() | token_file(file).exists()
    publish(file, "10.0.0.1:6379", token)
    assert own.read_text() == token_file(file).read_text() == f"{token}\n"
    assert [each.stat().st_mode & 0o777 for each in (own, token_file(file))] == [0o600, 0o600]
    unpublish(file, "10.0.0.2:6379")
    assert file.exists() & token_file(file).exists()
    unpublish(file, "10.0.0.1:6379")
    assert not file.exists() | token_file(file).exists()
    # A user's own stands before it.
    make_launch("head", RAY_AUTH_TOKEN="abc")
    assert head_token(file) == "abc"


def test_a_token_that_is_there_is_never_replaced(make_launch, tmp_path):
    own = tmp_path / "home/.ray/auth_token"
    write(own, "mine")
    make_launch("head", RAY_AUTH_TOKEN_PATH=tmp_path / "typo")
    with pytest.raises(ConfigError, match=r"typo cannot be read .*RAY_AUTH_TOKEN_PATH points to it"):
        head_token(None)
    assert own.read_text() == "mine\n"
    make_launch("head", RAY_AUTH_TOKEN_PATH="")
    own.unlink()
    own.mkdir()  # one that cannot be read, be it by root
    with pytest.raises(ConfigError, match=r"auth_token cannot be read .*remove it"):
        head_token(None)


def test_what_another_user_has_laid_down_is_not_read(make_launch, tmp_path, monkeypatch):
    write(tmp_path / "head.token", "of another user")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 4711)
    os.chown(tmp_path / "head.token", os.getuid() or 4712, -1)
    with pytest.raises(ConfigError, match=r"head.token belongs to another user"):
        use_head_token(tmp_path / "head")


def test_a_worker_takes_the_heads_token_before_its_own(make_launch, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    assert not use_head_token(tmp_path / "head")
    write(tmp_path / "home/.ray/auth_token", "mine")
    assert use_head_token(tmp_path / "head") == tmp_path / "home/.ray/auth_token"
    assert not os.environ["RAY_AUTH_TOKEN"]
    write(tmp_path / "head.token", "of the head")
    assert use_head_token(tmp_path / "head")
    assert os.environ["RAY_AUTH_TOKEN"] == "of the head"


def test_a_file_of_a_head_that_answers_is_not_taken_over(make_launch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        write(tmp_path / "head", address)
        with pytest.raises(ConfigError, match=rf"contains {address}, where another head is running"):
            head_token(tmp_path / "head")


def sleeper(**environment):
    """A process whose child has lost the mark, as Ray's workers do, and is found by its parent."""
    program = "import signal, subprocess; subprocess.Popen(['sleep', 'inf'], env={}); signal.pause()"
    return subprocess.Popen(
        [sys.executable, "-IS", "-c", program], env=os.environ | environment, start_new_session=True
    )


def test_stop_ends_the_processes_of_one_cluster_alone(make_launch):
    addresses = "127.0.0.1:1", "127.0.0.1:2"  # where no head answers
    one, other, stranger = (*(sleeper(**{MARK: address}) for address in addresses), sleeper())
    try:
        eventually(lambda: [len(clusters_here().get(address, [])) for address in addresses] == [2, 2])
        with pytest.raises(ConfigError, match=r"in \d+ clusters\. Give the address: stop .*127.0.0.1:1 or 127.0.0.1:2"):
            module.stop(make_launch("stop"))
        assert end_processes(addresses[0]) == 2
        assert one.wait() == -signal.SIGTERM
        assert addresses[1] in clusters_here()
        assert module.stop(make_launch(f"stop {addresses[1]}")) == 0
        assert other.wait() == -signal.SIGTERM
        assert stranger.poll() is None
    finally:
        for process in (one, other, stranger):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class StoreDouble:
    """A store without Ray."""

    address = "10.0.0.1:6379"

    def __init__(self, *nodes, **values):
        self.values, self.listed = values, nodes

    def nodes(self):
        return list(self.listed)

    def alive(self):
        return {node.address: node.resources for node in self.listed}

    def publish_node(self, node):
        self.values["node"] = dict(vars(node))

    def get(self, name):
        return self.values.get(name)

    def put(self, name, value):
        self.values[name] = value


HERE = Node("10.0.0.2", "n2", 1)
# A launch script that does not exec; its run saves, and ends after the script.
SAVES = """
python -IS -c "
import os, signal, sys
def save(*_):
    while os.getppid() == parent: pass
    open('saved', 'w')
    sys.exit(75)
parent = os.getppid()
signal.signal(15, save)
open('begun', 'w')
signal.pause()"; true
"""


@pytest.mark.parametrize("by", ["a signal here", "a signal on another node"])
def test_a_request_to_end_reaches_the_run_and_waits_for_it(make_launch, tmp_path, monkeypatch, by):
    monkeypatch.setenv(ATTEMPT, str(tmp_path / "told"))
    store, signals = StoreDouble(), []

    def ask():
        eventually((tmp_path / "begun").exists)
        signals.append(signal.SIGTERM) if by == "a signal here" else store.put(STOP, "n1")

    thread = threading.Thread(target=ask)
    launch = make_launch("head --nodes=1 -- x")
    launch.command[:] = ["bash", "-c", SAVES]
    thread.start()
    assert run_command(launch, store.address, signals, lambda: module.poll_signals(store, signals)) == 75
    assert (tmp_path / "saved").exists()
    thread.join()
    # So that no supervisor runs it again, here or on the other nodes.
    assert json.loads((tmp_path / "told").read_text()) == {"stopped": True}
    (tmp_path / "told").unlink()
    store.values[END] = 75
    assert module.wait_for_end(store, HERE, [], VirtualClock()) == 75
    assert json.loads((tmp_path / "told").read_text()) == {"stopped": True}


def test_the_command_learns_where_ray_is_and_its_code_is_kept(make_launch, tmp_path, monkeypatch):
    launch = make_launch("head --nodes=3 -- x")
    launch.command[:] = ["bash", "-c", "echo $RAY_ADDRESS $RLTRAIN_NNODES $(type -P python) >said; exit 7"]
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert run_command(launch, StoreDouble().address, [], lambda: None) == 7
    assert (tmp_path / "said").read_text() == f"10.0.0.1:6379 3 {Path(sys.executable).parent}/python\n"
    launch.command[:] = ["/no/such/program"]
    with pytest.raises(ConfigError, match=r"the command cannot be started: .*'/no/such/program'"):
        run_command(launch, StoreDouble().address, [], lambda: None)


@pytest.mark.parametrize(
    ("last", "code"), [("ended=1", 1), ("error='a bug'", 1), ("error='a hang', ends=75", 75), ("folder='run'", 75)]
)
@pytest.mark.parametrize("supervised", [True, False])
def test_a_run_that_ray_has_ended_may_be_run_again(make_launch, tmp_path, monkeypatch, last, code, supervised):
    if supervised:
        monkeypatch.setenv(ATTEMPT, str(tmp_path / "told"))
        report_to_supervisor(pid=os.getpid())
    launch = make_launch("head --nodes=1 -- x")
    values = "import os; from rltrain.common.attempt import report_to_supervisor as tell; tell(pid=os.getpid()); "
    values += f"tell({last}); os._exit(1)"
    launch.command[:] = [sys.executable, "-c", values]
    assert run_command(launch, StoreDouble().address, [], lambda: None) == code
    if supervised and code == 75:
        assert ("a hang" if "a hang" in last else "without a report") in read_reports(tmp_path / "told")["error"]


def test_ray_is_told_of_npus_and_its_words_are_shown_when_it_fails(make_launch, monkeypatch):
    started = []

    def run(words, *, env, stdout, **_):
        started.append((words[words.index("start") + 1 :], env[MARK]))
        stdout.write("no room in /dev/shm")
        stdout.flush()
        return subprocess.CompletedProcess(words, [0, 2, 1][len(started) - 1])

    monkeypatch.setattr(launch_ray.subprocess, "run", run)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,3")
    launch_ray.ray_start(make_launch("head --temp-dir=/x"), "10.0.0.1:6379", "--head")
    assert started == [(["--head", "--temp-dir=/x", "--resources", '{"NPU": 3}'], "10.0.0.1:6379")]
    with pytest.raises(ConfigError, match=r"ray start --head --resources=1 failed:\nno room in /dev/shm"):
        launch_ray.ray_start(make_launch("head --resources=1"), "10.0.0.1:6379", "--head")
    # As where the head ended while this node joined it.
    with pytest.raises(NodesMissing, match=r"ray start .* failed:\nno room in /dev/shm"):
        launch_ray.ray_start(make_launch("worker"), "10.0.0.1:6379", "--address=10.0.0.1:6379")


def test_the_dashboard_is_off_unless_it_and_its_host_are_named(monkeypatch):
    monkeypatch.delenv("DASHBOARD", raising=False)
    monkeypatch.delenv("DASHBOARD_HOST", raising=False)
    assert launch_ray.dashboard() == ["--include-dashboard=false"]
    monkeypatch.setattr("ray._private.utils.get_dashboard_dependency_error", lambda: None)
    monkeypatch.setenv("DASHBOARD", "1")
    assert launch_ray.dashboard() == ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]
    monkeypatch.setenv("DASHBOARD_HOST", "10.0.0.1")
    assert launch_ray.dashboard()[1] == "--dashboard-host=10.0.0.1"


def test_a_worker_leaves_a_head_that_is_silent():
    store, silent = StoreDouble(**{END: 7}), iter([True, True])

    def get(name):
        if next(silent, False):
            raise ConnectionRefusedError("10.0.0.1:6379 does not accept connections")
        return store.values.get(name)

    store.get = get
    assert module.wait_for_end(store, HERE, [], VirtualClock()) == 7  # not at once
    silent, clock = iter([True] * 1000), VirtualClock()
    with pytest.raises(ConnectionRefusedError):
        module.wait_for_end(store, HERE, [], clock)
    assert 45 < sum(clock.asked) < 60


def test_a_worker_stays_until_the_command_has_ended():
    assert module.wait_for_end(StoreDouble(**{END: 7}), HERE, [], VirtualClock()) == 7
    store = StoreDouble()
    store.put = lambda name, value: store.values.update({name: value, END: 75})
    assert module.wait_for_end(store, HERE, [signal.SIGTERM], VirtualClock()) == 75
    assert store.values[STOP] == "n2 (rank 1, 10.0.0.2)"


def test_a_worker_leaves_a_head_whose_script_was_killed():
    clock = VirtualClock()
    with pytest.raises(ConnectionError, match=r"Ray is running at 10.0.0.1:6379, but its ray_start.sh was killed"):
        module.wait_for_end(StoreDouble(**{BEAT: 1.0}), HERE, [], clock)
    assert 180 < sum(clock.asked) < 190


def test_processes_that_a_command_leaves_behind_are_not_waited_for(make_launch, capsys):
    launch = make_launch("head --nodes=1 -- x")
    launch.command[:] = ["bash", "-c", "sleep inf & echo $! >left; exit 3"]
    assert run_command(launch, StoreDouble().address, [], lambda: None) == 3
    os.kill(int(Path("left").read_text()), signal.SIGKILL)
    assert "terminating the processes that it has left" in capsys.readouterr().out


def test_a_request_to_end_is_obeyed_while_nodes_gather(make_launch, capsys):
    with pytest.raises(Interrupted, match=r"stopped while waiting for all 2 nodes"):
        module.wait_for_nodes(StoreDouble(node(0), **{STOP: "n1"}), make_launch("head --nodes=2 -- x"), [])
    assert "stop requested by n1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (
            "-- x",
            {"RANK": 1, "SLURM_JOB_ID": "8"},
            "belongs to another run: its job is 7, and this node's is 8. Two runs in one folder",
        ),
        ("--nodes=3 -- x", {"RANK": 1}, "belongs to another run: its NNODES is 2, and this node's is 3"),
        ("-- x", {"RANK": 2}, "RANK=2, but the ranks of 2 nodes are 0 to 1"),
        ("-- x", {"RANK": 0}, "n0 .rank 0, 10.0.0.0. has already joined. Set another RANK, or another HEAD_FILE"),
    ],
)
def test_a_node_of_another_run_is_refused_and_breaks_nothing(make_launch, words, variables, message):
    store = StoreDouble(node(0), **{HEAD: {"versions": "", "stays": True, "run": {"job": "7", "NNODES": 2}}})
    with pytest.raises(ConfigError, match=message):
        module.run_worker(make_launch(f"worker {words}", NODE_IP="10.0.0.7", **variables), [], store)
    assert store.values["node"]["stranger"]
    store.listed += (Node(**store.values["node"]),)
    with pytest.raises(WorkerLost, match=rf"rank 1 \(1 of 2 nodes have joined\); \w+ .* was rejected: .*{message}"):
        module.wait_for_nodes(store, make_launch("head --nodes=2 -- x", WAIT_S=0), [])


@pytest.mark.parametrize(
    ("versions", "words", "message"),
    [
        ("Python 3.10.1 and Ray 2.6", "-- x", "the head has Python 3.10.1 and Ray 2.6. Install the same"),
        (module.VERSIONS, "", "the head was started with a command after --, this node was not"),
    ],
)
def test_a_node_that_cannot_take_part_is_named_by_both(make_launch, versions, words, message):
    store = StoreDouble(node(0), **{HEAD: {"versions": versions, "stays": True, "run": {}}})
    with pytest.raises(ConfigError, match=message):
        module.run_worker(make_launch(f"worker {words}", RANK=1, NODE_IP="10.0.0.7"), [], store)
    store.listed += (Node(**store.values["node"]),)
    with pytest.raises(ConfigError, match=rf"rank 1.* cannot join: .*{message}"):
        module.wait_for_nodes(store, make_launch("head --nodes=2 -- x"), [])


def test_stop_lets_a_run_save_and_a_second_one_does_not_wait():
    store = StoreDouble(**{HEAD: {"stays": True}})
    assert module.request_stop(store)
    assert "stop` on" in store.values[STOP]
    assert not module.request_stop(store)


def test_rank_0_leaves_its_exit_code_for_the_scheduler(make_launch, tmp_path):
    for rank, left in (("1", False), ("0", True)):
        make_launch("head", RANK=rank, EXIT_CODE_FILE=tmp_path / "code")
        assert module.main(["haed"]) == 2
        assert (tmp_path / "code").exists() == left
    assert (tmp_path / "code").read_text() == "2\n"
