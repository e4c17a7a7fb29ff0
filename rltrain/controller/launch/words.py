"""The arguments and variables of scripts/ray_start.sh on one node."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from rltrain.base.env import first_set
from rltrain.base.errors import ConfigError

# What `ray start` takes by default: the dashboard, the client's server, the agent of each node; and the workers.
_PORTS_OF_RAY = (8265, 10001, 52365)
_PORTS_OF_WORKERS = range(10002, 20000)
_USAGE = """ray_start.sh [head | worker [ADDRESS] | stop [ADDRESS]] [options] [-- COMMAND]"""


@dataclass(frozen=True)
class Launch:
    """What the arguments and variables of one node say."""

    role: str
    rank: int | None
    """0 of a head."""
    address: str
    """Of the head; empty where the file says it."""
    file: Path | None
    """Where the head leaves its address, and beside it the token."""
    port: str
    job: str
    """What tells this run from others of its folder, by the scheduler; empty without one."""
    wait_s: float
    num_nodes: int | None
    devices: int | None
    """Devices that every node has to have; None: as many as the head."""
    arguments: list[str]
    """Those of `ray start`."""
    command: list[str]


def read(argv: list[str]) -> Launch:
    """Arguments and variables of a node. Raises ConfigError."""
    words, run = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    rank = first_set("NODE_RANK", "RANK", "SLURM_NODEID")
    if rank and not rank.isdigit():
        raise ConfigError(f"RANK={rank} (or NODE_RANK) has to be the number of this node: 0, 1, 2 …")
    role = words.pop(0) if words and not words[0].startswith("-") else ""
    role = role or {"": "", "0": "head"}.get(rank, "worker")
    if role not in ("head", "worker", "stop"):
        wrong = f"{role!r} is neither head, worker nor stop" if role else "say head or worker, or set RANK"
        raise ConfigError(f"{wrong}\nusage: {_USAGE}")
    named = words.pop(0) if role != "head" and words and not words[0].startswith("-") else ""
    options = argparse.ArgumentParser(prog="ray_start.sh", usage=_USAGE, allow_abbrev=False, add_help=False)
    options.add_argument("--nodes", default=first_set("NNODES", "SLURM_NNODES"))
    options.add_argument("--devices", default=_value_of("trainer.n_gpus_per_node", run))
    options_given, rest = options.parse_known_args(words)
    nodes, in_command = (
        _number("--nodes (or NNODES)", options_given.nodes),
        _number("trainer.nnodes", _value_of("trainer.nnodes", run)),
    )
    if nodes and in_command and nodes != in_command:
        raise ConfigError(f"NNODES={nodes}, but the command says trainer.nnodes={in_command}: leave one of them out.")
    if run and role == "head" and not (nodes or in_command):
        raise ConfigError(
            "the command would not wait for other nodes: say how many there are, by NNODES=4 or --nodes=4."
        )
    address = named or ("" if role == "stop" else first_set("HEAD_ADDRESS", "MASTER_ADDR"))
    if address.count(":") > 1:
        raise ConfigError(f"{address} is an address of IPv6: give one of IPv4, or a name that has one.")
    host, _, port = address.partition(":")
    port = port or first_set("RAY_PORT", "MASTER_PORT") or "6379"
    file = first_set("HEAD_FILE")
    # As the folder one works in is shared more often than not, nothing has to be said in the simplest case. With an
    # address nothing has to be shared, and what lies here may be another head's.
    default = (rank or role == "stop") and not (address and role != "stop") and os.access(".", os.W_OK)
    return Launch(
        role=role,
        rank=0 if role == "head" else int(rank) if rank else None,
        address=f"{host}:{port}" if host else "",
        file=Path(file or ".ray_head").absolute() if file or default else None,
        port=_port_of_head(port, rest) if role == "head" else str(_number("the head's port", port)),
        job=first_set("LAUNCH_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
        wait_s=_number("WAIT_S", first_set("WAIT_S") or "360", least=0) or 0,
        num_nodes=nodes or in_command,
        devices=_number("--devices", options_given.devices),
        arguments=rest,
        command=run,
    )


def _number(name: str, text: str, least: int = 1, most: int | None = None) -> int | None:
    if text and (not text.isdigit() or int(text) < least or (most and int(text) > most)):
        raise ConfigError(f"{name}={text} has to be a whole number, {least} {f'to {most}' if most else 'or more'}.")
    return int(text) if text else None


def _port_of_head(port: str, ray_words: list[str]) -> str:
    """The port, unless Ray, started with these words, gives it to a part of its own: then it ends with a traceback."""
    number = _number("the head's port", port, most=65535) or 0
    moved = any(word.startswith(("--min-worker-port", "--max-worker-port", "--worker-port-list")) for word in ray_words)
    if number in _PORTS_OF_RAY or (number in _PORTS_OF_WORKERS and not moved):
        first, last = _PORTS_OF_WORKERS[0], _PORTS_OF_WORKERS[-1]
        raise ConfigError(
            f"the head's port {number} (RAY_PORT, MASTER_PORT or HEAD_ADDRESS) is one that Ray uses itself: "
            f"{', '.join(map(str, _PORTS_OF_RAY))}, and {first} to {last} for its workers. Set RAY_PORT=6379."
        )
    return str(number)


def _value_of(key: str, words: list[str]) -> str:
    """The last value of a key in a command; empty where it is not a number that stands there."""
    values = [word.partition("=")[2] for word in words if word.partition("=")[0] == key]
    return values[-1] if values and values[-1].isdigit() else ""
