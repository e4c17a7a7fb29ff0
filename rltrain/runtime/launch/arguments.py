"""Arguments and environment variables of scripts/ray_start.sh on one node."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from rltrain.common.env import first_set
from rltrain.common.errors import ConfigError
from rltrain.config.schema.arguments import read_arguments
from rltrain.config.schema.fields import key

# Default ports of `ray start`: dashboard, client server, agent of each node; and the workers.
_PORTS_OF_RAY = (8265, 10001, 52365)
_PORTS_OF_WORKERS = range(10002, 20000)
_USAGE = """ray_start.sh [head | worker [ADDRESS] | stop [ADDRESS]] [options] [-- COMMAND]"""
_SOURCES = (
    "RANK is NODE_RANK, RANK or SLURM_NODEID; NNODES is --nodes, NNODES, SLURM_NNODES or trainer.nnodes; devices is "
    "--devices or trainer.n_gpus_per_node; RAY_PORT is RAY_PORT, MASTER_PORT or the port in the address."
)


@dataclass(frozen=True)
class Launch:
    """Settings of a node, from arguments and environment variables."""

    role: str
    rank: int | None
    """0 for a head."""
    address: str
    """Address of the head; empty if the file contains it."""
    file: Path | None
    """File for the head's address, next to the token's file."""
    port: str
    job: str
    """Scheduler's job id, which distinguishes runs in one folder; empty without one."""
    wait_s: float
    num_nodes: int | None
    devices: int | None
    """Minimum devices per node; None: the head's number."""
    arguments: list[str]
    """Arguments of `ray start`."""
    command: list[str]


@dataclass(frozen=True)
class _Numbers:
    """Arguments and variables that are numbers, with their defaults."""

    RANK: int = key(-1, least=0)
    NNODES: int = key(0, least=1)
    devices: int = key(0, least=1)
    WAIT_S: int = key(360, least=0)
    RAY_PORT: int = key(6379, least=1, most=65535)


def read_launch(argv: list[str]) -> Launch:
    """Read the arguments and variables of a node. Raises ConfigError."""
    arguments, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    rank = first_set("NODE_RANK", "RANK", "SLURM_NODEID")
    role = arguments.pop(0) if arguments and not arguments[0].startswith("-") else ""
    role = role or {"": "", "0": "head"}.get(rank, "worker")
    if role not in ("head", "worker", "stop"):
        wrong = f"{role!r} is not head, worker or stop" if role else "give head or worker, or set RANK"
        raise ConfigError(f"{wrong}\nusage: {_USAGE}")
    named = arguments.pop(0) if role != "head" and arguments and not arguments[0].startswith("-") else ""
    options = argparse.ArgumentParser(prog="ray_start.sh", usage=_USAGE, allow_abbrev=False, add_help=False)
    options.add_argument("--nodes", default=first_set("NNODES", "SLURM_NNODES"))
    options.add_argument("--devices", default=_value_of("trainer.n_gpus_per_node", command))
    given, rest = options.parse_known_args(arguments)
    address = named or ("" if role == "stop" else first_set("HEAD_ADDRESS", "MASTER_ADDR"))
    if address.count(":") > 1:
        raise ConfigError(f"{address} is an IPv6 address. Give an IPv4 address, or a name that resolves to one.")
    host, _, port = address.partition(":")
    in_command = _value_of("trainer.nnodes", command)
    texts = {"RANK": rank, "NNODES": given.nodes or in_command, "devices": given.devices}
    texts |= {"WAIT_S": first_set("WAIT_S"), "RAY_PORT": port or first_set("RAY_PORT", "MASTER_PORT")}
    numbers = read_arguments(_Numbers, [f"{name}={text}" for name, text in texts.items() if text], hint=_SOURCES)
    num_nodes = numbers.NNODES or None
    if in_command and num_nodes != int(in_command):
        raise ConfigError(f"NNODES={num_nodes}, but the command has trainer.nnodes={in_command}. Remove one of them.")
    if command and role == "head" and not num_nodes:
        raise ConfigError("the command would not wait for other nodes. Give their number with NNODES=4 or --nodes=4.")
    if role == "head":
        _check_port(numbers.RAY_PORT, rest)
    file = first_set("HEAD_FILE")
    # By default the file is in the working folder, which is usually shared, so the simplest case needs no settings.
    # With an address no file is used, because nothing has to be shared, and a file here may be another head's.
    default = (rank or role == "stop") and not (address and role != "stop") and os.access(".", os.W_OK)
    return Launch(
        role=role,
        rank=0 if role == "head" else numbers.RANK if rank else None,
        address=f"{host}:{numbers.RAY_PORT}" if host else "",
        file=Path(file or ".ray_head").absolute() if file or default else None,
        port=str(numbers.RAY_PORT),
        job=first_set("LAUNCH_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
        wait_s=numbers.WAIT_S,
        num_nodes=num_nodes,
        devices=numbers.devices or None,
        arguments=rest,
        command=command,
    )


def _check_port(port: int, ray_arguments: list[str]) -> None:
    """Raise ConfigError if Ray, started with these arguments, uses this port itself and would fail with a traceback."""
    prefixes = ("--min-worker-port", "--max-worker-port", "--worker-port-list")
    moved = any(argument.startswith(prefixes) for argument in ray_arguments)
    if port in _PORTS_OF_RAY or (port in _PORTS_OF_WORKERS and not moved):
        first, last = _PORTS_OF_WORKERS[0], _PORTS_OF_WORKERS[-1]
        raise ConfigError(
            f"the head's port {port} (RAY_PORT, MASTER_PORT or HEAD_ADDRESS) is used by Ray itself: "
            f"{', '.join(map(str, _PORTS_OF_RAY))}, and {first} to {last} for its workers. Set RAY_PORT=6379."
        )


def _value_of(key: str, arguments: list[str]) -> str:
    """Return the last value of a key in a command; empty if it is not a number."""
    values = [argument.partition("=")[2] for argument in arguments if argument.partition("=")[0] == key]
    return values[-1] if values and values[-1].isdigit() else ""
