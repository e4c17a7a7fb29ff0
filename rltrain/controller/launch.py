"""Start Ray on one node of many, and the command on one of them: what scripts/ray_start.sh runs on every node.

A cluster fails to gather for dull reasons: a token that only one node has, an address that others do not reach, a file
that an earlier run has left, code that was copied to all nodes but one, a driver on every node. So whatever a node can
know before it joins is compared first, and whoever waits says for whom. Left out: starting processes on other nodes
(the scheduler or the user runs the script there), and nodes that come or go during a run.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import ray

from rltrain.controller.launch_files import beside, offer_token, take_token, text, write
from rltrain.controller.launch_words import Launch, read
from rltrain.controller.nodes import (
    END,
    HEAD,
    MARK,
    STOP,
    Board,
    Node,
    answers,
    clusters_here,
    end_processes,
    group_is_alive,
    program_of,
)
from rltrain.env import address_towards, devices_here, first_set
from rltrain.errors import ConfigError, DiskError, Interrupted, WorkerLost, command
from rltrain.logs import count
from rltrain.versions import fingerprint, unlike

_SAY_EVERY_S = 10
_POLL_S = 0.5
# A head that is silent for so long is gone; Ray itself gives up after a minute.
_SILENT_S = 45
_LEAVE_S = 20
_SAME_SIGNAL_S = 4


@command
def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the command where there is one."""
    launch = read(sys.argv[1:] if argv is None else argv)
    if launch.role == "stop":
        return stop(launch)
    try:
        with _signals() as asked:
            return (_head if launch.role == "head" else _worker)(launch, asked)
    except ConnectionError as error:
        raise WorkerLost(f"the head is gone: {error}. Run the same on all nodes again.") from error
    except OSError as error:
        raise DiskError(str(error)) from error


def stop(launch: Launch) -> int:
    """End the processes of one cluster on this node, and of no other. Raises ConfigError."""
    found = clusters_here()
    addresses = [address for address in found if launch.address in ("", address)]
    if len(addresses) > 1:
        raise ConfigError(
            f"this node is in {len(addresses)} clusters: say which, stop {' or '.join(sorted(addresses))}."
        )
    ended = end_processes(addresses[0]) if addresses else 0
    _say(f"ended {ended} processes" + (f" of {addresses[0]}" if ended else ": this script has started none here"))
    return 0


def _head(launch: Launch, asked: list[int]) -> int:
    ip = _own_address(launch)
    address = f"{ip}:{launch.port}"
    if answers(address):
        raise ConfigError(
            f"port {launch.port} of this node is taken, perhaps by Ray of an earlier run. `ray_start.sh stop` ends "
            "what this script has started, and RAY_PORT takes another port."
        )
    offer_token(launch.file)
    code, kept, board = 75, False, None
    try:
        _ray_start(launch, address, "--head", f"--node-ip-address={ip}", f"--port={launch.port}", *_dashboard())
        board = Board(address)
        board.tell(HEAD, {"fingerprint": fingerprint(), "stays": bool(launch.command)})
        board.tell_of(Node(ip, socket.gethostname(), launch.rank))
        if launch.file:
            write(launch.file, address)
        _say(f"the head answers at {address}" + (f", as {launch.file} says" if launch.file else ""))
        if launch.num_nodes:
            _gather(board, launch, asked)
        kept = not launch.command
        code = _drive(board, launch, asked) if launch.command else 0
        return code
    except ConfigError as error:
        code = error.exit_code
        raise
    finally:
        if not kept:
            _finish(board, code)
            end_processes(address)
            # Another head may have come since.
            if launch.file and text(launch.file) in (address, ""):
                launch.file.unlink(missing_ok=True)
                beside(launch.file).unlink(missing_ok=True)


def _gather(board: Board, launch: Launch, asked: list[int]) -> None:
    """Wait for the nodes and devices that are expected, and say which are missing."""

    def missing() -> str:
        nodes = board.nodes()
        for node in nodes:
            if node.refused:
                raise ConfigError(f"{node} cannot take part: {node.refused}.")
        return "; ".join(_missing(nodes, launch))

    _wait_until(missing, launch, asked, f"all {count(launch.num_nodes or 1, 'node')}")
    for node in board.nodes():
        devices = ", ".join(
            f"{each:.0f} {name}" for name in ("NPU", "GPU", "CPU") if (each := node.resources.get(name))
        )
        _say(f"{node}: {devices}")


def _missing(nodes: list[Node], launch: Launch) -> Iterator[str]:
    """Whom the head waits for, in words."""
    here = [node for node in nodes if node.is_in]
    ranks = [node.rank for node in here]
    lacking = (launch.num_nodes or 1) - len(here)
    for rank in {rank for rank in ranks if rank is not None and ranks.count(rank) > 1}:
        both = " and ".join(str(node) for node in here if node.rank == rank)
        raise ConfigError(f"two nodes have the same RANK: {both}.")
    if lacking > 0 and None not in ranks:
        absent = [str(rank) for rank in range(launch.num_nodes or 1) if rank not in ranks]
        yield f"rank {', '.join(absent)} ({len(here)} of {launch.num_nodes} nodes are here)"
    elif lacking > 0:
        yield f"{count(lacking, 'more node')}; here are {', '.join(map(str, here))}"
    kind = next((name for name in ("NPU", "GPU") if any(node.resources.get(name) for node in here)), "CPU")
    wanted = launch.devices or (here[0].resources.get(kind, 0) if here and kind != "CPU" else 0)
    for node in here:
        if (have := node.resources.get(kind, 0)) < wanted:
            yield f"{wanted:.0f} {kind}s on {node}, which has {have:.0f}"


def _drive(board: Board, launch: Launch, asked: list[int]) -> int:
    """Run the command, hand signals on to it, and return its exit code."""
    own = {"RAY_ADDRESS": board.address, MARK: board.address}
    own |= {"RLTRAIN_NNODES": str(launch.num_nodes)} if launch.num_nodes else {}
    try:
        driver = subprocess.Popen(launch.command, env=os.environ | own, start_new_session=True)
    except OSError as error:
        raise ConfigError(f"the command cannot be started: {error}") from error
    handed = 0
    # Its whole group: a launch script that does not exec would end alone, and leave the run behind that is saving.
    while driver.poll() is None or group_is_alive(driver.pid):
        with suppress(ConnectionError):  # without its head the command ends by itself
            if not asked and board.read(STOP):
                asked.append(signal.SIGTERM)
        for signum in asked[handed:]:
            handed += 1
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signum)
        time.sleep(_POLL_S)
    code = driver.returncode if driver.returncode >= 0 else 128 - driver.returncode
    return 75 if handed and code == 128 + signal.SIGTERM else code


def _finish(board: Board | None, code: int) -> None:
    """Tell the nodes how it has ended, and wait until they have heard it."""
    # Without a head that answers there is nobody to tell.
    with suppress(ConnectionError):
        if board:
            board.tell(END, code)
            until = time.monotonic() + _LEAVE_S
            # The head itself is one of those that have not left.
            while sum(node.is_in for node in board.nodes()) > 1 and time.monotonic() < until:
                time.sleep(_POLL_S)


def _worker(launch: Launch, asked: list[int]) -> int:
    board = _find_head(launch, asked)
    if left := clusters_here().get(board.address):
        if any(program_of(pid) == "raylet" for pid in left):
            raise ConfigError(f"this node has joined {board.address} already; `ray_start.sh stop` takes it out.")
        # Ray was killed here, and its helpers would stay.
        end_processes(board.address)
    ip = _own_address(launch, board.address)
    here, head, ours = Node(ip, socket.gethostname(), launch.rank), board.read(HEAD), fingerprint()
    if problem := unlike(head["fingerprint"], ours):
        here.refused = f"it has {problem}"
        board.tell_of(here)
        raise ConfigError(f"this node and the head differ. The head has {unlike(ours, head['fingerprint'])}.")
    if head["stays"] != bool(launch.command):
        with_it, without = ("the head", "this node") if head["stays"] else ("this node", "the head")
        raise ConfigError(f"{with_it} was given a command behind --, {without} was not. Say the same on every node.")
    try:
        _ray_start(launch, board.address, f"--address={board.address}", f"--node-ip-address={ip}")
        board.tell_of(here)
        _say(f"joined {board.address} as {ip}")
        return _stay(board, here, asked) if launch.command else 0
    except ConfigError as error:
        here.refused = str(error)
        board.tell_of(here)
        raise
    finally:
        if launch.command:
            here.left = True
            with suppress(ConnectionError):
                board.tell_of(here)
            end_processes(board.address)


def _find_head(launch: Launch, asked: list[int]) -> Board:
    """The store of a head that answers, has our token, and has not ended."""
    if not launch.address and not launch.file:
        raise ConfigError("a worker needs the head's address: ray_start.sh worker ADDRESS, HEAD_ADDRESS or HEAD_FILE")
    found: list[Board] = []
    own = first_set("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") or first_set("RAY_AUTH_MODE") != "token"

    def missing() -> str:
        # What an earlier head has left behind: an address where nobody answers, or a token that is not this one's.
        address = launch.address or text(launch.file)
        said = "" if launch.address else f", which {launch.file} says"
        if not address:
            return (
                f"the head's address: there is no {launch.file}. Is the head up? Where this storage is not shared, set "
                "HEAD_ADDRESS and RAY_AUTH_TOKEN"
            )
        if not answers(address):
            return f"the head: nobody answers at {address}{said}"
        if not own and not take_token(launch.file):
            return (
                "the head's token, which this node has not. Copy ~/.ray/auth_token from the head, or set HEAD_FILE (on "
                "shared storage) or RAY_AUTH_TOKEN on every node"
            )
        try:
            board = Board(address)
            if board.read(HEAD) and board.read(END) is None:
                found.append(board)
                return ""
        except ConnectionError as error:
            return f"the head: {error}{said}"
        return f"the head: at {address}{said} is another Ray, or one that ends"

    _wait_until(missing, launch, asked, "the head")
    return found[0]


def _stay(board: Board, here: Node, asked: list[int]) -> int:
    """Until the head says how the command has ended; returns that code. A signal here ends the whole run."""
    heard = asked_at = time.monotonic()
    told = False
    while len(asked) < 2:
        try:
            code = board.read(END)
            # Whoever signals all nodes has signalled the head too.
            if asked and not told and time.monotonic() - asked_at > _SAME_SIGNAL_S:
                board.tell(STOP, str(here))
                told = True
                _say("asked the head to stop; a second signal leaves at once")
            heard = time.monotonic()
        except ConnectionError:
            code = None
            if time.monotonic() - heard > _SILENT_S:
                raise
        asked_at = asked_at if asked else time.monotonic()
        if code is not None:
            return int(code)
        time.sleep(2 * _POLL_S)
    raise Interrupted("left before the run had ended", 75)


def _wait_until(missing: Callable[[], str], launch: Launch, asked: list[int], what: str) -> None:
    """Poll until `missing` has nothing to say. Raises WorkerLost with what it says when the time is over."""
    started, say_at = time.monotonic(), 2.0
    while lacks := missing():
        waited = time.monotonic() - started
        if asked:
            raise Interrupted(f"stopped while waiting for {what}", 75)
        if waited >= launch.wait_s:
            raise WorkerLost(f"waited {launch.wait_s:.0f} s (WAIT_S) for {lacks}")
        if waited > say_at:
            _say(f"waiting for {lacks} ({launch.wait_s - waited:.0f} s left)")
            say_at += _SAY_EVERY_S
        time.sleep(_POLL_S)


def _ray_start(launch: Launch, address: str, *arguments: str) -> None:
    """`ray start`, whose lines are shown where it fails. Raises ConfigError."""
    given = [*arguments, *launch.arguments]
    # Ray counts GPUs itself; NPUs only where CANN's Python package is installed, so tell it.
    if (devices := devices_here("npu", none=0)) and not any(word.startswith("--resources") for word in given):
        given += ["--resources", f'{{"NPU": {devices}}}']
    with tempfile.TemporaryFile("w+") as output:
        # A file, since Ray's processes would keep a pipe open; a session, since a signal to us is not one to Ray.
        done = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *given],
            env=os.environ | {MARK: address}, stdout=output, stderr=output, start_new_session=True, check=False,
        )  # fmt: skip
        output.seek(0)
        if done.returncode:
            raise ConfigError(f"ray start {' '.join(given)} failed:\n{output.read().strip()}")


def _dashboard() -> list[str]:
    """Off, since whoever reaches it can start programs; DASHBOARD=1 for this machine, DASHBOARD_HOST for others."""
    if not first_set("DASHBOARD") or first_set("DASHBOARD") == "0":
        return ["--include-dashboard=false"]
    if error := ray._private.utils.get_dashboard_dependency_error():
        raise ConfigError(f"DASHBOARD=1 needs pip install 'ray[default]=={ray.__version__}' ({error}).")
    return ["--include-dashboard=true", f"--dashboard-host={first_set('DASHBOARD_HOST') or '127.0.0.1'}"]


def _own_address(launch: Launch, head: str = "") -> str:
    """Of the card that leads to the head."""
    host = (head or launch.address).rpartition(":")[0]
    found = first_set("NODE_IP") or address_towards(host or None)
    # On the head its own name may stand for 127.0.1.1.
    if found and found.startswith("127.") and not first_set("NODE_IP") and not head:
        found = address_towards(None)
    if not found:
        raise ConfigError(
            "this node's address is not known, as no network card leads out: set NODE_IP to the one that others reach."
        )
    return found


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Inside, the signals that ask for an end are listed instead of obeyed; one that was ignored (nohup) stays so."""
    asked: list[int] = []
    wanted = [
        each for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN
    ]
    before = {each: signal.signal(each, lambda signum, _: asked.append(signum)) for each in wanted}
    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _say(text: str) -> None:
    """With the name of the node, as a scheduler shows the lines of all nodes together."""
    sys.stdout.write(f"{socket.gethostname()}: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
