"""Start Ray on one node of many, and the command on one of them. scripts/ray_start.sh runs this on every node.

Typical reasons why nodes do not join: a token that only one node has, an unreachable address, a stale file of an
earlier run, code that one node lacks, a driver on every node. So everything that a node knows before it joins is
compared first, and missing nodes are logged during every wait. It does not start processes on other nodes (the
scheduler or the user runs the script there), and nodes cannot join or leave during a run.

`ray symmetric-run` also starts Ray and waits, but it does not report missing nodes, does not forward signals, always
returns 0 on nodes other than the head, and ends with `ray stop`, which stops all clusters of the node.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rltrain.common.attempt import report_to_supervisor
from rltrain.common.clock import SYSTEM, Clock
from rltrain.common.env import first_set
from rltrain.common.errors import ConfigError, Interrupted, NodesMissing, command, write_error
from rltrain.common.logs import count
from rltrain.common.stop import listed_signals
from rltrain.runtime.launch.arguments import Launch, read_launch
from rltrain.runtime.launch.files import head_token, publish, text, token_variable, unpublish, use_head_token, write
from rltrain.runtime.launch.ray_node import VERSIONS, dashboard, own_address, print_line, ray_start, run_command
from rltrain.runtime.launch.store import (
    BEAT,
    END,
    HEAD,
    STOP,
    KVStore,
    Node,
    accepts_connections,
    clusters_here,
    end_processes,
)
from rltrain.runtime.slots.proc import status

_SAY_EVERY_S = 10
_POLL_S = 0.5
# Seconds without a response after which the head counts as lost; Ray has a timeout of a minute.
_SILENT_S = 45
# Seconds without a heartbeat after which the head's script counts as killed, although the head's Ray is still running.
# It is long, because a script that is only suspended is not lost.
_GONE_S = 180
_LEAVE_S = 20
_SAME_SIGNAL_S = 4


def main(argv: list[str] | None = None) -> int:
    """Run the launch and return the command's exit code; rank 0 also writes it to EXIT_CODE_FILE."""
    code = 1
    try:
        code = _run(argv)
        return code
    finally:
        report_to_supervisor(ended=code)
        # A scheduler may report only the highest exit code of all nodes.
        if (file := first_set("EXIT_CODE_FILE")) and first_set("NODE_RANK", "RANK", "SLURM_NODEID") == "0":
            try:
                write(Path(file), str(code))
            except OSError as error:
                print_line(f"EXIT_CODE_FILE: {error}")


@command
def _run(argv: list[str] | None) -> int:
    launch = read_launch(sys.argv[1:] if argv is None else argv)
    if launch.role == "stop":
        return stop(launch)
    try:
        with listed_signals() as signals:
            report_to_supervisor(pid=os.getpid())
            return (_head if launch.role == "head" else run_worker)(launch, signals)
    except ConnectionError as error:
        raise NodesMissing(f"the head is lost: {error}. Run the same command on all nodes again.") from error
    except OSError as error:
        raise write_error(str(error), error) from error


def stop(launch: Launch) -> int:
    """End the processes of one cluster on this node, and of no other cluster. Raises ConfigError."""
    host, _, port = launch.address.rpartition(":")
    names = {launch.address}
    with suppress(OSError):
        names |= {f"{socket.gethostbyname(host)}:{port}"}
    addresses = [address for address in clusters_here() if not launch.address or address in names]
    if len(addresses) > 1:
        raise ConfigError(
            f"this node is in {len(addresses)} clusters. Give the address: stop {' or '.join(sorted(addresses))}."
        )
    if addresses and _request_stop(launch, addresses[0]):
        left = f"the run of {addresses[0]}, which is saving; a second `stop` terminates it at once"
        wait_for(lambda: left if addresses[0] in clusters_here() else "", launch, [], left)
        print_line(f"the run of {addresses[0]} has ended")
        return 0
    number = end_processes(addresses[0]) if addresses else 0
    print_line(f"ended {number} processes" + (f" of {addresses[0]}" if number else ": none was started by this script"))
    return 0


def _request_stop(launch: Launch, address: str) -> bool:
    with suppress(ConnectionError):
        has_token = accepts_connections(address) and bool(token_variable() or use_head_token(launch.file))
        return has_token and request_stop(KVStore(address))
    return False


def request_stop(store: KVStore) -> bool:
    """Request a stop of the cluster's command, so that it saves. Returns False if none runs or it was requested."""
    runs = (store.get(HEAD) or {}).get("stays") and store.get(END) is None and store.get(STOP) is None
    if runs:
        store.put(STOP, f"`ray_start.sh stop` on {socket.gethostname()}")
    return bool(runs)


def _head(launch: Launch, signals: list[int]) -> int:
    ip = own_address(launch)
    address = f"{ip}:{launch.port}"
    if accepts_connections(address):
        raise ConfigError(
            f"port {launch.port} of this node is in use, perhaps by Ray of an earlier run. `ray_start.sh stop` stops "
            "processes of this script; RAY_PORT sets another port."
        )
    token = head_token(launch.file)
    code, stays, store = 75, False, None
    try:
        ray_start(launch, address, "--head", f"--node-ip-address={ip}", f"--port={launch.port}", *dashboard())
        store = KVStore(address)
        run = {"job": launch.job, "NNODES": launch.num_nodes}
        store.put(HEAD, {"versions": VERSIONS, "stays": bool(launch.command), "address": address, "run": run})
        store.publish_node(Node(ip, socket.gethostname(), launch.rank))
        if launch.file:
            publish(launch.file, address, token)
        print_line(f"the head is running at {address}" + (f", written to {launch.file}" if launch.file else ""))
        if launch.num_nodes:
            wait_for_nodes(store, launch, signals)
        stays = not launch.command
        code = run_command(launch, address, signals, lambda: poll_signals(store, signals)) if launch.command else 0
        return code
    except ConfigError as error:
        code = error.exit_code
        raise
    finally:
        if not stays:
            _finish(store, code)
            end_processes(address)
            if launch.file:
                unpublish(launch.file, address)


def wait_for_nodes(store: KVStore, launch: Launch, signals: list[int]) -> None:
    """Wait for the expected nodes and devices, and log the missing ones."""

    def missing() -> str:
        poll_signals(store, signals)
        nodes = store.nodes()
        refused = [node for node in nodes if node.refused]
        for node in refused:
            if not node.stranger:
                raise ConfigError(f"{node} cannot join: {node.refused.rstrip('.')}.")
        lines = [*nodes_missing(nodes, launch)]
        return "; ".join(lines + [f"{node} was rejected: {node.refused.rstrip('.')}" for node in refused if lines])

    wait_for(missing, launch, signals, f"all {count(launch.num_nodes or 1, 'node')}")
    for node in store.nodes():
        devices = ", ".join(
            f"{number:.0f} {name}" for name in ("NPU", "GPU", "CPU") if (number := node.resources.get(name))
        )
        print_line(f"{node}: {devices}")


def nodes_missing(nodes: list[Node], launch: Launch) -> Iterator[str]:
    """Yield descriptions of the nodes and devices that have not joined yet."""
    nodes_in = [node for node in nodes if node.is_in]
    ranks = [node.rank for node in nodes_in]
    lacking = (launch.num_nodes or 1) - len(nodes_in)
    for rank in {rank for rank in ranks if rank is not None and ranks.count(rank) > 1}:
        both = " and ".join(str(node) for node in nodes_in if node.rank == rank)
        raise ConfigError(f"two nodes have the same RANK: {both}.")
    if lacking > 0 and None not in ranks:
        absent = [str(rank) for rank in range(launch.num_nodes or 1) if rank not in ranks]
        yield f"rank {', '.join(absent)} ({len(nodes_in)} of {launch.num_nodes} nodes have joined)"
    elif lacking > 0:
        yield f"{count(lacking, 'more node')}; joined: {', '.join(map(str, nodes_in))}"
    kind = next((name for name in ("NPU", "GPU") if any(node.resources.get(name) for node in nodes_in)), "CPU")
    num_devices = launch.devices or (nodes_in[0].resources.get(kind, 0) if nodes_in and kind != "CPU" else 0)
    for node in nodes_in:
        if (have := node.resources.get(kind, 0)) < num_devices:
            yield f"{num_devices:.0f} {kind}s on {node}, which has {have:.0f}"


def poll_signals(store: KVStore, signals: list[int]) -> None:
    """Publish the heartbeat, and exchange stop requests with the nodes."""
    store.put(BEAT, SYSTEM.monotonic())
    if not signals and (node := store.get(STOP)):
        print_line(f"stop requested by {node}")
        signals.append(signal.SIGTERM)
    elif signals and store.get(STOP) is None:
        store.put(STOP, f"a signal on {socket.gethostname()}")


def _finish(store: KVStore | None, code: int) -> None:
    """Publish the exit code, and wait until the nodes have read it."""
    # Skip this if the head does not respond.
    with suppress(ConnectionError):
        if store:
            store.put(END, code)
            # Wait until only the head itself is left.
            SYSTEM.poll(lambda: sum(node.is_in for node in store.nodes()) <= 1, _LEAVE_S, _POLL_S)


def run_worker(launch: Launch, signals: list[int], store: KVStore | None = None) -> int:
    """Join the Ray of ``store``'s head, and return this node's exit code."""
    store = store or find_head(launch, signals)
    head = store.get(HEAD)
    here = Node(socket.gethostname(), socket.gethostname(), launch.rank)
    try:
        here.address = own_address(launch, store.address)
        _compare(store, head, here, launch)
        return join(store, head, here, launch, signals)
    except ConfigError as error:
        here.refused = here.refused or str(error)
        with suppress(ConnectionError):
            store.publish_node(here)
        raise


def _compare(store: KVStore, head: dict[str, Any], here: Node, launch: Launch) -> None:
    """Raise ConfigError if this node differs from the head or belongs to another run. The head only logs it."""
    here.stranger = True
    run: dict[str, Any] = {"job": launch.job, "NNODES": launch.num_nodes}
    for name, value in head.get("run", {}).items():
        if value and run[name] and value != run[name]:
            raise ConfigError(
                f"the head at {store.address} belongs to another run: its {name} is {value}, and this node's is "
                f"{run[name]}. Two runs in one folder need different HEAD_FILEs."
            )
        if name == "NNODES" and value and (here.rank or 0) >= value:
            raise ConfigError(f"RANK={here.rank}, but the ranks of {value} nodes are 0 to {value - 1}")
    for node in store.nodes():
        if node.is_in and here.rank is not None and node.rank == here.rank and node.address != here.address:
            raise ConfigError(f"{node} has already joined. Set another RANK, or another HEAD_FILE for another run")
    mark = head.get("address", store.address)
    if left := clusters_here().get(mark):
        # Excludes processes of an earlier head with the same address.
        if here.address in store.alive() and any(status(pid).get("Name") == "raylet" for pid in left):
            raise ConfigError(f"this node has already joined {mark}. Remove it with `ray_start.sh stop`.")
        # The raylet of this node was killed, but its helper processes are still running.
        end_processes(mark)
    here.stranger = False
    # Ray would also reject the node, but the head would not know why it is missing. Packages and code are compared when
    # a run starts (`run.preflight.health`).
    if (of_head := head.get("versions", "another version of rltrain")) != VERSIONS:
        raise ConfigError(f"this node has {VERSIONS}, but the head has {of_head}. Install the same on every node.")
    if head["stays"] != bool(launch.command):
        with_it, without = ("the head", "this node") if head["stays"] else ("this node", "the head")
        raise ConfigError(
            f"{with_it} was started with a command after --, {without} was not. Give it on all nodes or on none."
        )


def join(store: KVStore, head: dict[str, Any], here: Node, launch: Launch, signals: list[int]) -> int:
    """Join, and stay while the command runs."""
    # Use the address that the head has published, whatever name this node uses for the head.
    mark = head.get("address", store.address)
    try:
        ray_start(launch, mark, f"--address={store.address}", f"--node-ip-address={here.address}")
        store.publish_node(here)
        print_line(f"joined {store.address} as {here.address}")
        return wait_for_end(store, here, signals) if launch.command else 0
    finally:
        if launch.command:
            here.left = True
            with suppress(ConnectionError):
                store.publish_node(here)
            end_processes(mark)


def find_head(launch: Launch, signals: list[int]) -> KVStore:
    """Wait for a head that responds, has our token and has not ended. Returns its store."""
    if not launch.address and not launch.file:
        raise ConfigError("a worker needs the head's address: ray_start.sh worker ADDRESS, HEAD_ADDRESS or HEAD_FILE")
    stores: list[KVStore] = []
    token = token_variable()

    def missing() -> str:
        # An earlier head may have left an unreachable address or another token.
        address = launch.address or text(launch.file)
        origin = "" if launch.address else f" (from {launch.file})"
        if not address:
            return (
                f"the head's address: {launch.file} does not exist. Is the head running? If this storage is not "
                "shared, set HEAD_ADDRESS and RAY_AUTH_TOKEN"
            )
        if not accepts_connections(address):
            return f"the head: {address}{origin} does not accept connections"
        if not (source := token or use_head_token(launch.file)):
            return (
                "the head's token, which this node does not have. Copy ~/.ray/auth_token from the head, or set "
                "HEAD_FILE (on shared storage) or RAY_AUTH_TOKEN on every node"
            )
        try:
            store = KVStore(address)
            if store.get(HEAD) and store.get(END) is None:
                stores.append(store)
                return ""
        except ConnectionError as error:
            fix = f"; this node's is from {source}. Copy the head's token there" if "token" in str(error) else ""
            return f"the head: {error}{origin}{fix}"
        return f"the head: the Ray at {address}{origin} is not a head of ray_start.sh, or it is ending"

    wait_for(missing, launch, signals, "the head")
    return stores[0]


def wait_for_end(store: KVStore, here: Node, signals: list[int], clock: Clock = SYSTEM) -> int:
    """Wait for the command's end and return its exit code. A signal on this node stops the whole run."""
    last_reply_at = signalled_at = beat_changed_at = clock.monotonic()
    has_requested, beat = False, None
    while len(signals) < 2:
        try:
            now, code = store.get(BEAT), store.get(END)
            # If all nodes got the signal, so did the head.
            if signals and not has_requested and clock.monotonic() - signalled_at > _SAME_SIGNAL_S:
                store.put(STOP, str(here))
                has_requested = True
                print_line("asked the head to stop; a second signal leaves at once")
            last_reply_at = clock.monotonic()
            if now != beat:
                beat, beat_changed_at = now, last_reply_at
        except ConnectionError:
            code = None
            if clock.monotonic() - last_reply_at > _SILENT_S:
                raise
        signalled_at = signalled_at if signals else clock.monotonic()
        if code is not None:
            if store.get(STOP):
                report_to_supervisor(stopped=True)
            return int(code)
        if clock.monotonic() - beat_changed_at > _GONE_S:
            raise ConnectionError(f"Ray is running at {store.address}, but its ray_start.sh was killed")
        clock.sleep(2 * _POLL_S)
    raise Interrupted("stopped before the run ended", 75)


def wait_for(missing: Callable[[], str], launch: Launch, signals: list[int], goal: str, clock: Clock = SYSTEM) -> None:
    """Poll until `missing` returns "". Raises NodesMissing with its text after the timeout."""
    started, say_at = clock.monotonic(), 2.0
    while missing_text := missing():
        waited = clock.monotonic() - started
        if signals:
            raise Interrupted(f"stopped while waiting for {goal}", 75)
        if waited >= launch.wait_s:
            raise NodesMissing(f"waited {launch.wait_s:.0f} s (WAIT_S) for {missing_text}")
        if waited > say_at:
            print_line(f"waiting for {missing_text} ({launch.wait_s - waited:.0f} s left)")
            say_at += _SAY_EVERY_S
        clock.sleep(_POLL_S)
