"""Traffic between nodes: the real trainer with idle workers on several Ray nodes of this machine.

    python -m bench.nodes [--nodes 2,4,8] [--workers 2] [--samples 128] [--tokens 10000]

Every node is a raylet with a separate object store, so data that is read on another node than where it was created
crosses the loopback interface. A dedicated network namespace (which needs root) counts its bytes, including Ray's
messages. The workers compute nothing and return columns of a byte per token. Samples grow with the nodes, so the bytes
per sample show how the traffic grows. `whole` is the old behaviour: every node reads whole objects, and layouts ignore
where a response is stored; so the difference includes both, not only cutting objects. Writes
bench/results/nodes_cpu.md.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import statistics
import subprocess
import time
from pathlib import Path

from ray.cluster_utils import Cluster

from bench.scale import PROMPT_TOKENS, make_trainer, numbers
from bench.table import finished_row, parse, table, write
from rltrain.common.device import get_device
from rltrain.config.load import load_config
from rltrain.runtime.cluster import reserve, start_ray
from rltrain.runtime.group import WorkerGroup
from rltrain.runtime.ray_watchdog import stop_ray

_CLONE_NEWNET = 0x40000000
_ADDRESS = "198.51.100.1"
_STORE_BYTES = 512 << 20
STEPS = 3
TITLES = ("nodes", "workers", "samples", "reading", "counted, kB a sample", "wire, kB a sample", "share", "step, s")
# Per sample with its two columns of log-probs, with the idle workers' byte per token.
COLUMNS = 5


def own_network() -> None:
    """Move this process to a new network namespace, whose loopback has no other users. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "a network namespace needs root")
    # The interface gets an address and a route, as on a machine with a network, because Ray looks for an address that
    # other nodes can reach.
    for command in ("link set lo up", f"address add {_ADDRESS}/32 dev lo", f"route add default dev lo src {_ADDRESS}"):
        subprocess.run(["ip", *command.split()], check=True)


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface has carried so far."""
    match = re.search(r"^\s*lo:\s*(\d+)", Path("/proc/self/net/dev").read_text(), re.MULTILINE)
    assert match
    return int(match[1])


def measure(nodes: int, workers: int, samples: int, tokens: int) -> list[tuple[str, float, float, float]]:
    """Measure per way of reading: bytes per sample between nodes as counted by the trainer and on the wire, seconds a
    step."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": workers, "object_store_memory": _STORE_BYTES})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=workers, object_store_memory=_STORE_BYTES)
        cfg = load_config(
            ["trainer.device=cpu", f"trainer.n_gpus_per_node={workers}", f"trainer.nnodes={nodes}",
             f"ray_kwargs.ray_init.address={cluster.address}"]
        ).config  # fmt: skip
        start_ray(cfg.cluster)
        device = get_device("cpu")
        group = WorkerGroup("hybrid", reserve(cfg.cluster, device), device, threads=1)
        group.start("bench.idle_worker:IdleWorker", {"prompt_tokens": PROMPT_TOKENS})
        places, rows = group.nodes, []
        for way in ("whole", "parcels"):
            # With all ranks on one node nothing is cut, and layouts ignore nodes.
            group.nodes = [0] * len(places) if way == "whole" else places
            trainer = make_trainer(group, workers * nodes, samples * nodes, tokens)
            trainer.step(1)
            steps = []
            for step in range(2, 2 + STEPS):
                started, before, counted = time.perf_counter(), loopback_bytes(), group.bytes_between_nodes().total()
                trainer.step(step)
                wire, counted = loopback_bytes() - before, group.bytes_between_nodes().total() - counted
                steps.append((counted, wire, time.perf_counter() - started))
            counted, wire, seconds = (statistics.median(values) for values in zip(*steps, strict=True))
            rows.append((way, counted / (samples * nodes), wire / (samples * nodes), seconds))
        group.kill()
        return rows
    finally:
        stop_ray()
        cluster.shutdown()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=numbers, default=[2, 4, 8])
    for name, default in (("workers", 2), ("samples", 128), ("tokens", 10_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parse(parser, argv, out="nodes_cpu.md", nodes=[2], workers=1, samples=16, tokens=100)
    try:
        own_network()
    except OSError:
        if not options.smoke:
            raise
    os.environ.pop("RAY_ADDRESS", None)
    # the network namespace has no other users; raylets and driver must use the same mode
    os.environ["RAY_AUTH_MODE"] = "disabled"
    size, rows = COLUMNS * options.tokens, []
    for nodes in options.nodes:
        for way, counted, wire, seconds in measure(nodes, options.workers, options.samples, options.tokens):
            cells = f"{counted / 1e3:.1f} | {wire / 1e3:.1f} | {wire / size:.2f} | {seconds:.2f}"
            row = f"| {nodes} | {nodes * options.workers} | {nodes * options.samples} | {way} | {cells} |"
            finished_row(rows, row)
    write(
        options,
        f"GRPO with a reference, two optimizer steps, {options.tokens} tokens an answer, {size / 1e3:.0f} kB "
        "a sample with its log-probs (a byte a token; of a real run about 17 bytes); raylets of one machine stand for "
        f"nodes; median of {STEPS} steps. `counted` is `perf/node_bytes_per_sample`; `wire` is what the loopback "
        "interface carried, Ray's own messages included; `share` is the wire's part of a sample's bytes. `whole`: "
        "neither parcels nor layouts that look at nodes; `parcels`: both.",
        table(TITLES, rows),
    )


if __name__ == "__main__":
    main()
