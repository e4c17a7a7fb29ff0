"""Checks on the nodes of a run before a model is loaded. Results are compared and reported by node name. `preflight`
checks settings and the local machine; here every node checks itself (`workers.diagnostics.node`) in a few seconds.
Every run calls `check_nodes` at its start and refuses to start if it cannot work; `python -m rltrain.doctor` shows all
results as a table. Nothing is repaired, and changes during a run are not detected.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rltrain.common.errors import ConfigError, WorkerError, WorkerLost
from rltrain.common.logs import count
from rltrain.common.versions import differences, fingerprint
from rltrain.config.schema.trainer import TrainerConfig
from rltrain.models.weights.spec import Specs
from rltrain.runtime.calls import bind
from rltrain.runtime.cluster import ray_logs
from rltrain.runtime.group import WorkerGroup
from rltrain.workers.diagnostics.node import NodeProbe, NodeReport, close, commit, connect, missing_files, probe_node
from rltrain.workers.interface.roles import Links

log = logging.getLogger(__name__)
# Timeouts in seconds. Hanging storage never responds, but models of hundreds of files on slow storage take a while. The
# first connection of hundreds of devices takes minutes.
_LOOK_S, _REACH_S, _COLLECTIVES_S = 300.0, 120.0, 600.0
_SKEW_S, _GIB = 5.0, 2**30
# Free resources of a node: minimum, unit, and fix.
_ROOM = {
    "local disk": (1, "GiB for Ray", "Free some, or start Ray with --temp-dir=FOLDER on another disk."),
    "/dev/shm": (1, "GiB", "Ray and NCCL need more: --shm-size=64g, in Kubernetes an emptyDir with medium: Memory."),
    "open files": (8192, "per process", "Run `ulimit -n 65536` before Ray is started there."),
}


@dataclass
class Check:
    """A row of the table."""

    name: str
    found: str
    problems: list[str] = field(default_factory=list)
    """Reasons why a run does not start."""
    notes: list[str] = field(default_factory=list)
    """Warnings; the run starts anyway."""


def check_nodes(
    group: WorkerGroup, trainer: TrainerConfig, specs: Specs, folder: Path, resumed: Path | None = None
) -> list[Check]:
    """Check all nodes of ``group``, whose ranks are not connected yet. Takes seconds.

    specs: specs of the models. folder: the run folder. resumed: the checkpoint that the run resumes from.
    """
    names, firsts, device = group.names, group.firsts, trainer.device
    resumed_key = [("trainer.resume_from_path", str(resumed))] if resumed else []
    with _proof(folder) as (proof, unusable):
        ranks = enumerate(names)
        about = (proof, _models(specs), resumed_key, ray_logs())
        facts = group.ask(probe_node, [NodeProbe(rank, name, device, rank in firsts, *about) for rank, name in ranks])
        try:
            facts_of = facts.collect(_LOOK_S)
        except WorkerLost as lost:
            raise WorkerLost(
                f"{lost}\nThe nodes were checking files, which takes seconds. If no process died, the storage hangs: "
                "try `ls` on that node in trainer.default_local_dir and in the folders of the models."
            ) from lost
        # A copy of the folder, or a container layer over it, accepts writes that other nodes do not see. The driver
        # must see them, because it writes the manifest of a checkpoint.
        unshared = {rank: facts_of[rank].unshared for rank in firsts}
        wrote = [rank for rank, why in unshared.items() if not why]
        for rank, why in zip(wrote, missing_files([proof / f"rank_{rank}" for rank in wrote]), strict=True):
            unshared[rank] = "does not give back what it writes" if why else ""
    doors = [(address, facts_of[rank].port) for rank, address in firsts.items()]
    lines = group.ask(connect, [doors if rank in firsts else [] for rank in range(group.world)]).collect(_REACH_S)
    before = time.time()
    clocks = group.ask(close, [None] * group.world).collect(_REACH_S)
    middle, error = (before + time.time()) / 2, (time.time() - before) / 2
    nodes = [facts_of[rank] for rank in firsts]
    checks = [_devices(facts_of), _network(nodes, [lines[rank] for rank in firsts])]
    checks.append(_clock([(node.name, clocks[node.rank] - middle) for node in nodes], error))
    shared = _shared(trainer, folder, [(names[rank], why) for rank, why in unshared.items() if why])
    if unusable:
        shared = Check("run folder", str(folder), [unusable])
    return [*checks, _versions(nodes), _models_there(nodes), shared, *_room(nodes)]


def refuse(checks: Sequence[Check]) -> None:
    """Log the notes. Raises ConfigError with all problems."""
    if problems := [problem for check in checks for problem in check.problems]:
        raise ConfigError("\n".join(problems))
    for note in (note for check in checks for note in check.notes):
        log.warning("note: %s", note)


def try_collectives(group: WorkerGroup, num_bytes: int = 2**20) -> list[dict[str, float]]:
    """Run the first collectives of a started group. Return GB/s per rank, see `Links.collectives`."""
    try:
        return group.submit([bind(Links.collectives, num_bytes)]).collect(_COLLECTIVES_S)
    except (WorkerLost, WorkerError) as error:
        raise type(error)(
            f"{error}\nThis was the first collective of the workers. python -m rltrain.doctor with the same settings "
            "checks nodes, devices and every pair of them."
        ) from error


@contextmanager
def _proof(folder: Path) -> Iterator[tuple[Path, str]]:
    """Create a new folder with a file of this process. Yield it with the reason why that failed, or "". Its name is
    random, so that no cache reports it as missing.
    """
    proof, unusable = folder / f".tmp_seen_{secrets.token_hex(6)}", ""
    draft = proof.with_name(f"{proof.name}_made")
    try:
        draft.mkdir(parents=True)
        commit(draft / "driver", proof.name)
        # Checkpoints rename folders, which not all storage supports.
        draft.rename(proof)
    except OSError as error:
        unusable = f"trainer.default_local_dir={folder}: nothing can be written there ({error})."
    try:
        yield proof, unusable
    finally:
        for path in (proof, draft):
            shutil.rmtree(path, ignore_errors=True)


def _models(specs: Specs) -> list[tuple[str, str]]:
    # Roles often share a model; the policy's key is reported.
    keys = {spec.path: f"{spec.section}.path" for _, spec in reversed(specs.values()) if spec.path}
    return [(key, path) for path, key in keys.items()]


def _devices(ranks: Sequence[NodeReport]) -> Check:
    kinds = Counter(facts.device for facts in ranks if not facts.device_error)
    check = Check("devices", ", ".join(f"{number} x {kind}" for kind, number in kinds.items()) or "none")
    check.problems += [
        f"{facts.name}, rank {facts.rank}: {facts.device_error}. Ray counts a device there that torch cannot use: see "
        "whether its driver works (npu-smi info, nvidia-smi), and which torch the node has."
        for facts in ranks
        if facts.device_error
    ]
    check.notes += [
        f"{facts.name}, rank {facts.rank}: {facts.memory[0] / _GIB:.1f} of {facts.memory[1] / _GIB:.1f} GiB of the "
        "device are free. Another process has the rest: npu-smi info or nvidia-smi on that node names it."
        for facts in ranks
        if facts.device != "CPU" and facts.memory[0] < 0.9 * facts.memory[1]
    ]
    if len(kinds) > 1:
        check.notes.append("the devices are of several kinds, and every step takes as long as on the slowest")
    return check


def _network(nodes: Sequence[NodeReport], lines: Sequence[Sequence[float | str]]) -> Check:
    slowest = max((entry for line in lines for entry in line if isinstance(entry, float)), default=0.0)
    check = Check("network", f"{count(len(nodes), 'node')}, connections within {1e3 * slowest:.1f} ms")
    for at, node in enumerate(nodes):
        shut = {peer.name: line[at] for peer, line in zip(nodes, lines, strict=True) if isinstance(line[at], str)}
        if shut:
            # A node that cannot connect to itself has a wrong address.
            subject = "no node can" if len(shut) == len(nodes) else " and ".join(list(shut)[:4]) + " cannot"
            check.problems.append(
                f"{node.name}: {subject} connect to it ({next(iter(shut.values()))}). Is this the address that others "
                "reach (NODE_IP of scripts/ray_start.sh)? Does a firewall close its ports? Workers take any port of "
                "net.ipv4.ip_local_port_range."
            )
    return check


def _clock(skew: Sequence[tuple[str, float]], error: float) -> Check:
    seconds = [skew_s for _, skew_s in skew]
    notes = [
        f"{name}: its clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's. Logs "
        "will not agree, and certificates may fail: start chrony or ntpd there."
        for name, skew_s in skew
        if abs(skew_s) - error > _SKEW_S
    ]
    return Check("clocks", f"{max(seconds) - min(seconds):.1f} s apart", notes=notes)


def _versions(nodes: Sequence[NodeReport]) -> Check:
    # Packages that are missing on this machine, for example because it has no devices, are compared among the nodes.
    packages = {name: nodes[0].versions.get(name, own) if own == "none" else own for name, own in fingerprint().items()}
    problems = [
        f"{node.name} has other versions than this command ({differ}). Install the same everywhere, and restart Ray "
        "there."
        for node in nodes
        if (differ := differences(packages, node.versions))
    ]
    return Check("versions", ", ".join(f"{name} {packages[name]}" for name in ("torch", "python", "ray")), problems)


def _models_there(nodes: Sequence[NodeReport]) -> Check:
    problems = [f"{node.name}: {problem} Every node reads it." for node in nodes for problem in node.lacking]
    return Check(
        "models", f"readable on {sum(not node.lacking for node in nodes)} of {count(len(nodes), 'node')}", problems
    )


def _shared(trainer: TrainerConfig, folder: Path, unshared: Sequence[tuple[str, str]]) -> Check:
    lines = [
        f"trainer.default_local_dir={folder} is not one folder for all nodes: a file was written there, and {name} "
        f"{why}. Every node writes its part of a checkpoint into this folder. Choose one on storage that all nodes "
        "mount under the same name (NFS, Lustre, …), or mount it there."
        for name, why in unshared
    ]
    saves = not trainer.val_only and (trainer.saves_regularly or trainer.save_at_end)
    return Check("run folder", str(folder), lines if saves else [], [] if saves else lines)


def _room(nodes: Sequence[NodeReport]) -> Iterator[Check]:
    for name, (least, unit, fix) in _ROOM.items():
        left = {node.name: f"{node.room[name]:,.1f}".removesuffix(".0") + f" {unit}" for node in nodes}
        few = [f"{node.name}: {name}: {left[node.name]}. {fix}" for node in nodes if node.room[name] < least]
        lowest = min(nodes, key=lambda node: node.room[name])
        yield Check(name, f"{left[lowest.name]} at least", notes=few)
