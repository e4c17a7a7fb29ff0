"""``python -m rltrain.doctor key=value ...``: test a cluster before training. Prints a table, and causes and fixes.

Give the settings of the planned run. The checks are the functions that run at the start of a training
(`run.preflight.health`), on the same devices and network. Then every device computes, all exchange data, and every pair
of devices is timed. It does not load the devices for hours, which would find devices that fail when hot.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from rltrain.common import logs
from rltrain.common.device import get_device, threads_per_worker
from rltrain.common.errors import ConfigError, WorkerError, WorkerLost
from rltrain.common.stop import Stop
from rltrain.config.load import changed, load_config
from rltrain.config.loaded import LoadedConfig
from rltrain.main_ppo import main as guarded
from rltrain.models.weights.spec import specs_of
from rltrain.run.preflight.health import Check, check_nodes, try_collectives
from rltrain.run.program import explained
from rltrain.runtime.calls import bind
from rltrain.runtime.cluster import cluster_address, free, num_nodes, reserve, start_ray
from rltrain.runtime.group import WorkerGroup
from rltrain.runtime.hang import Deadlines
from rltrain.runtime.ray_watchdog import stop_ray
from rltrain.workers.interface.roles import Links

_USAGE = """usage: rltrain doctor [--config FILE] key=value ...

Test a cluster before training. Prints a table, and causes and fixes.

The keys are those of training (rltrain train --help); these matter here:
  ray_kwargs.ray_init.address=auto   the cluster that scripts/ray_start.sh has started; else this machine only
  trainer.nnodes=N                   default: all nodes of the cluster
  trainer.n_gpus_per_node=N          default: what this machine shows
  trainer.default_local_dir=FOLDER   the run folder, which all nodes must share
  actor_rollout_ref.model.path=…     the model, which every node reads
Exit code 0: nothing failed; 2: something did.
"""
_WORKER = "rltrain.workers.diagnostics.links:LinksWorker"
_ALL_BYTES, _PAIR_BYTES = 2**26, 2**24
_PRODUCT = {True: 512, False: 8192}  # on a CPU, on other devices
_PAIR_S = 120.0
# A pair is slow below this fraction of the median; on shared links a factor of two is usual.
_SLOW = 1 / 3


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return guarded(argv, explained(_USAGE, _examine))


def _examine(arguments: argparse.Namespace, stop: Stop) -> int:
    loaded = load_config(arguments.overrides, arguments.config, arguments.problems)
    with logs.session(), ExitStack() as closing:
        checks = _checks(loaded, stop, closing)
    sys.stdout.write(table(checks))
    return ConfigError.exit_code if any(check.problems for check in checks) else 0


def _checks(loaded: LoadedConfig, stop: Stop, closing: ExitStack) -> list[Check]:
    with logs.waiting("starting Ray"), stop.keeping_handlers("starting Ray"):
        if start_ray(loaded.config.cluster):
            closing.callback(stop_ray)
    device = get_device(loaded.config.trainer.device)
    # If scripts/ray_start.sh started the cluster, the number of nodes is taken from it.
    cluster = loaded.config.cluster
    if cluster.trainer.nnodes == 1 and "trainer.nnodes" not in loaded.explicit and cluster_address(cluster):
        loaded = changed(loaded, {"trainer.nnodes": num_nodes(cluster, device)})
    cfg = loaded.config
    nodes, per_node = cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node
    with logs.waiting(f"waiting for {logs.count(nodes, 'node')} with {logs.count(per_node, 'device')} each"):
        placement = reserve(cfg.cluster, device)
    closing.callback(free, placement)
    group = WorkerGroup(
        "doctor", placement, device, threads_per_worker(per_node), None, stop.raise_if_asked, Deadlines(300.0, 1.0)
    )
    closing.push(lambda kind, error, where: group.stop() if error is None else group.kill())
    with logs.waiting("looking at the nodes"), restored_folder(Path(cfg.trainer.default_local_dir)) as folder:
        checks = check_nodes(group, cfg.trainer, specs_of(cfg, device), folder)
    if any(check.problems for check in checks if check.name in ("devices", "network", "versions")):
        # The next checks would hang, or fail with a less specific message.
        return [*checks, Check("collectives", "not tried", notes=["fix the failed checks, then all devices are tried"])]
    return [*checks, *try_together(group, cfg.trainer.device, device.is_cpu)]


def try_together(group: WorkerGroup, device: str, is_cpu: bool) -> Iterator[Check]:
    """Yield the checks of the devices. The last one names devices that died or timed out."""
    try:
        yield from _tried(group, device, is_cpu)
    except (WorkerLost, WorkerError) as error:
        yield Check("together", "the devices did not get through", [str(error)])


def _tried(group: WorkerGroup, device: str, is_cpu: bool) -> Iterator[Check]:
    with logs.waiting(f"connecting {logs.count(group.world, 'device')}"):
        group.start(_WORKER, {"device": device})
    names = [f"rank {rank} on {name}" for rank, name in enumerate(group.names)]
    with logs.waiting("computing"):
        yield _computing(group.call(Links.computes, _PRODUCT[is_cpu]), names)
    if group.world == 1:
        return
    with logs.waiting("collectives"):
        measured = try_collectives(group, _ALL_BYTES)
    least = {name: min(speeds_of_rank[name] for speeds_of_rank in measured) for name in measured[0]}
    summary = ", ".join(f"{name} {speed:.2f} GB/s" for name, speed in least.items())
    yield Check("collectives", f"{logs.count(group.world, 'rank')}: {summary} per rank")
    speeds = np.full((group.world, group.world), np.nan)
    with logs.waiting("every pair of devices"):
        # Each call is one round, so that a hanging pair is the only late one and can be named.
        for turn in range(group.world - 1 + group.world % 2):
            rows = group.submit([bind(Links.p2p_bandwidth, _PAIR_BYTES, turn)]).collect(_PAIR_S)
            speeds = np.fmax(speeds, np.stack(rows))
    yield from pairs(speeds, names, np.array(group.nodes))


def _computing(speeds: list[float], names: list[str]) -> Check:
    slowest = int(np.argmin(speeds))
    check = Check("computing", f"{np.median(speeds):.3g} TFLOP/s (median), least {min(speeds):.3g}: {names[slowest]}")
    for name, speed in zip(names, speeds, strict=True):
        if not speed:
            check.problems.append(f"{name}: a matrix product was wrong. Do not use this device.")
        elif speed < _SLOW * np.median(speeds):
            check.notes.append(
                f"{name} computes {speed:.3g} TFLOP/s; the median is {np.median(speeds):.3g}. Look for "
                "another process on it, for heat and for its power limit (npu-smi info, nvidia-smi)."
            )
    return check


def pairs(speeds: np.ndarray, names: list[str], node: np.ndarray) -> Iterator[Check]:
    """Yield the checks of pairs within nodes and between them.

    speeds: GB/s as measured by each end [ranks, ranks]. node: node of each rank [ranks].
    """
    speeds, same = np.minimum(speeds, speeds.T), node[:, None] == node
    wrong = speeds == 0
    for title, chosen in (("within nodes", same), ("between nodes", ~same)):
        ones, others = np.nonzero(np.triu(chosen, 1))
        if not len(ones):
            continue
        speeds_here = speeds[ones, others]
        first, least, middle = int(speeds_here.argmin()), float(speeds_here.min()), float(np.median(speeds_here))
        ends, pair = f"{names[ones[first]]} and {names[others[first]]}", logs.count(len(speeds_here), "pair")
        check = Check(title, f"{pair}: {middle:.2f} GB/s (median), least {least:.2f}: {ends}")
        slow = chosen & (speeds < _SLOW * middle)
        if not least:
            # Count over all pairs. In a node with two devices a faulty device makes the other one look faulty too.
            check.problems.append(
                f"{ends}: received data differed from sent data. {logs.count(int(wrong.sum()) // 2, 'pair')} in "
                f"all changed numbers, {_common(wrong, names)}. Exclude that device and run the doctor again."
            )
        elif slow.any():
            check.notes.append(
                f"{ends}: {least:.2f} GB/s; the median pair has {middle:.2f}. {slow.sum() // 2} of {pair} "
                f"are slow, {_common(slow, names)}. Look at that node's cards, cables and switch ports, and "
                "at which card NCCL_SOCKET_IFNAME, HCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name."
            )
        yield check


def _common(chosen: np.ndarray, names: list[str]) -> str:
    """Describe the ranks that occur in most of the chosen pairs [ranks, ranks]."""
    counts = chosen.sum(axis=1)
    most = [names[rank] for rank in np.flatnonzero(counts == counts.max())]
    return f"{counts.max()} of them with {' or '.join(most[:4])}"


def table(checks: list[Check]) -> str:
    """Return the table, and below it the failures and notes."""
    width = max(len(check.name) for check in checks)
    states = ["FAILED" if check.problems else "note" if check.notes else "ok" for check in checks]
    lines = [f"{check.name:<{width}}  {state:<6}  {check.found}" for check, state in zip(checks, states, strict=True)]
    for title, lists in (("failed", [check.problems for check in checks]), ("worth a look", [c.notes for c in checks])):
        if lines_of_title := dict.fromkeys(line for several in lists for line in several):
            lines += ["", title, *(f"  {line}" for line in lines_of_title)]
    return "\n".join(lines) + "\n"


@contextmanager
def restored_folder(path: Path) -> Iterator[Path]:
    """Yield the run folder; remove the folders that did not exist before."""
    path = path.expanduser().resolve()
    # Use os.path.exists, because Path.exists raises an error without permission.
    folders = [folder for folder in (path, *path.parents) if not os.path.exists(folder)]
    try:
        yield path
    finally:
        for folder in folders:
            with suppress(OSError):  # the folder is not empty, or was never created
                folder.rmdir()


if __name__ == "__main__":
    sys.exit(main())
