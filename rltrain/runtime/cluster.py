"""Ray cluster: start or join it, and reserve the devices of a run.

Ray waits long and silently for unreachable addresses, dead nodes and busy devices. So everything possible is checked in
advance, and while the run waits for devices, missing ones are logged. It does not start Ray on other nodes
(scripts/ray_start.sh does), and the reservation of a run cannot be resized.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
import os
import re
import resource
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Collection, Iterator
from typing import Any
from unittest import mock

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from rltrain.common.clock import SYSTEM
from rltrain.common.device import Device
from rltrain.common.env import first_set, prepare_driver, ray_address, shipped, use_token
from rltrain.common.errors import ConfigError, NodesMissing, WorkerLost, first_line
from rltrain.common.logs import count
from rltrain.config.schema import ClusterConfig
from rltrain.runtime import ray_watchdog
from rltrain.runtime.launch.files import head_token

log = logging.getLogger(__name__)
_RESERVE_S = 120
_POLL_S = 0.5
_CONNECT_S = 5
# Minimum size of the object store; Ray does not report a smaller one.
_LEAST_FILE_BYTES = 80 << 20
_TRIES = 3
# Texts of errors after which joining or starting Ray is retried. The last two are raised if a client's server died
# while Ray inspected it.
_TOO_SLOW = (
    "timed out during startup", "Starting Ray client server failed", "Proxy failed to Connect", "psutil.ZombieProcess",
    "psutil.NoSuchProcess",
)  # fmt: skip
_FIRST_WORD_S, _SAY_EVERY_S = 2, 10
_KEY = "ray_kwargs.ray_init"


def cluster_address(cfg: ClusterConfig) -> str | None:
    """Return the cluster to join: ``ray_kwargs.ray_init.address`` or RAY_ADDRESS. None: start a local Ray."""
    return cfg.ray_kwargs.ray_init.get("address") or ray_address()


def ray_problems(cfg: ClusterConfig) -> Iterator[str]:
    """Yield problems of ``ray_kwargs``: unknown arguments of ray.init, or a missing or unreachable cluster address."""
    # ray.init takes names with an underscore from **kwargs, so its signature lacks them.
    argument_names = {
        *inspect.signature(ray.init).parameters,
        *re.findall(r'kwargs\.pop\(\s*"(_\w+)"', inspect.getsource(ray.init)),
    }
    for name in cfg.ray_kwargs.ray_init:
        if name not in argument_names - {"kwargs"}:
            near = difflib.get_close_matches(name, argument_names, n=1, cutoff=0.5)
            yield f"unknown key '{_KEY}.{name}': ray.init has no such argument." + (
                f" Did you mean {_KEY}.{near[0]}?" if near else ""
            )
    address = cluster_address(cfg)
    # Only host:port can be checked by connecting; auto is left to Ray.
    if address and (match := re.fullmatch(r"(?:ray://)?([\w.-]+):(\d+)", address)):
        try:
            # Ray would retry silently for many minutes.
            socket.create_connection((match[1], int(match[2])), timeout=_CONNECT_S).close()
        except OSError as error:
            yield (
                f"{_KEY}.address={address} (or RAY_ADDRESS) does not accept connections ({error}). Start Ray with "
                "scripts/ray_start.sh."
            )
    if cfg.trainer.nnodes > 1 and not address:
        yield (
            f"trainer.nnodes={cfg.trainer.nnodes} needs a running Ray cluster. Start it with "
            f"{shipped('scripts/ray_start.sh')} on every node, then set {_KEY}.address=auto."
        )


def start_ray(cfg: ClusterConfig) -> bool:
    """Join the cluster at `cluster_address`, or start a local one.

    Returns False without changes if Ray already runs in this process. A worker takes one CPU slot; a local Ray gets at
    least as many slots as workers, even with fewer cores.
    """
    if ray.is_initialized():
        return False
    if problems := list(ray_problems(cfg)):
        raise ConfigError("\n".join(problems))
    settings = {name: value for name, value in cfg.ray_kwargs.ray_init.items() if value is not None}
    address = cluster_address(cfg)
    runtime = dict(settings.pop("runtime_env", {}))
    variables = {name: _as_text(value) for name, value in runtime.pop("env_vars", {}).items()}
    variables = prepare_driver(**variables)
    # Each worker has a separate log file; Ray would print the output of all workers on the driver's terminal.
    arguments: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        # ray.init rejects a number of slots when joining a cluster.
        settings.pop("num_cpus", None)
        _use_token()
    else:
        arguments |= {"num_cpus": max(os.cpu_count() or 1, cfg.trainer.n_gpus_per_node), "include_dashboard": False}
        if "_temp_dir" not in settings and not first_set("RAY_TMPDIR") and (folder := closed_folder()):
            settings["_temp_dir"] = f"{folder}/ray"
        # "local" starts a new Ray instead of joining one that is already running on this machine.
        _check_limits()
        _have_token()
    arguments |= settings | {"address": address or "local"}
    if runtime or variables:
        arguments["runtime_env"] = runtime | {"env_vars": variables}
    try:
        with contextlib.ExitStack() as stack:
            for patch in _patches_of_local_ray(arguments) if arguments["address"] == "local" else []:
                stack.enter_context(patch)
            _init(arguments)
    except (ValueError, TypeError, ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        arguments_shown = {**settings, "address": address} if address else settings
        named = ", ".join(f"{name}={value}" for name, value in arguments_shown.items())
        raise ConfigError(f"ray.init({named}) failed, see {_KEY}: {error}{way_in(address, error)}") from error
    except Exception as error:
        # Ray has no exception type for a start that times out or in which processes die.
        raise WorkerLost(
            f"Ray did not start on this machine: {error} Run the same command again. If it fails again, see "
            f"gcs_server.out and raylet.out in {ray_logs()}."
        ) from error
    # When a node dies, Ray prints the last lines of its log over the run's output.
    ray._private.worker.print_to_stdstream = first_sentence
    return True


def closed_folder(parent: str = "/tmp") -> str | None:
    """Return a folder below ``parent`` that only this user can access; None if it cannot be created.

    Ray makes its temporary folder and its sessions writable for every user. The path is short, because Ray's sockets
    are below it and a socket path has at most 107 bytes.
    """
    folder, user = f"{parent}/rltrain_{os.getuid()}", os.getuid()
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != user:  # another user created it first
            return tempfile.mkdtemp(prefix="rltrain_", dir=parent)
        os.chmod(folder, 0o700)
        return folder
    except OSError:
        return None


def _have_token() -> None:
    """Create a token for a local Ray. Ray's token file would be readable according to the umask."""
    if first_set("RAY_AUTH_MODE") in ("", "token"):
        try:
            head_token(None)
        except OSError:  # no writable home directory
            use_token(secrets.token_hex(32))


def _check_limits() -> None:
    """Raise ConfigError if a local Ray cannot start: its object store is a file in shared memory."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= most < _LEAST_FILE_BYTES:
        raise ConfigError(
            f"the file size limit is {most / 2**20:.0f} MiB (ulimit -f), and Ray's object store is a file of at least "
            f"{_LEAST_FILE_BYTES >> 20} MiB. Run `ulimit -f unlimited` first."
        )


def _patches_of_local_ray(arguments: dict[str, Any]) -> list[Any]:
    """Return contexts for settings of a local Ray that are no arguments of ray.init: it listens on the loopback only,
    unreachable from other hosts, and starts no process that a run does not need (each takes a second of CPU and 100
    MB).
    """
    unused = {"start_monitor": True, "start_log_monitor": not arguments["log_to_driver"],
              "start_api_server": not arguments["include_dashboard"]}  # fmt: skip
    # Ray's mode for desktops, enabled by a variable that it reads on import. It does not accept 127.0.0.1 as an
    # address.
    loopback = mock.patch.object(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False, create=True)
    node = ray._private.node.Node
    names = [name for name, is_unused in unused.items() if is_unused and hasattr(node, name)]
    return [loopback, *(mock.patch.object(node, name, return_value=None) for name in names)]


def _init(arguments: dict[str, Any]) -> None:
    """Call ``ray.init``, and retry if a busy machine exceeds Ray's timeouts.

    A head may fail to start the server process of a client, and a local Ray has 30 s to start.
    """
    for left in reversed(range(_TRIES)):
        try:
            ray.init(**arguments)
            return
        except Exception as error:
            if not left or not any(words in str(error) for words in _TOO_SLOW):
                raise
            log.warning("Ray did not start in time (%s); trying again", first_line(error))
            ray.shutdown()


def _use_token() -> None:
    """Join with the available token, as Ray does only with ``address=auto``."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    with contextlib.suppress(ImportError):  # an older Ray, which needs RAY_AUTH_MODE=token
        from ray._private.authentication import authentication_token_setup as setup

        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def way_in(address: str | None, error: BaseException) -> str:
    """Return advice on a failed attempt to join. Some reasons are only in the cause of Ray's error."""
    message = f"{error} {error.__cause__ or ''}".lower()
    if not address:
        return ""
    if "authentic" in message or "token" in message:
        return (
            "\nThe cluster has a different token. Copy ~/.ray/auth_token from its head, or set RAY_AUTH_TOKEN, and "
            "RAY_AUTH_MODE=token."
        )
    if address == "auto":
        return f"\nThis machine is not a node of a cluster. Start Ray with {shipped('scripts/ray_start.sh')}."
    if address.startswith("ray://"):
        return "\nUse the port of Ray's client server (10001 on the head), and the Python and Ray of the cluster."
    return (
        "\nThis machine is not a node of that cluster. Run the command on the head, add this machine with "
        f"`ray_start.sh worker`, set {_KEY}.address=ray://HEAD:10001, or use `ray job submit`. If the cluster has no "
        "token but ~/.ray has one, set RAY_AUTH_MODE=disabled."
    )


def num_nodes(cfg: ClusterConfig, device: Device) -> int:
    """Return the number of cluster nodes with at least ``trainer.n_gpus_per_node`` devices, at least 1."""
    slots = [node["Resources"].get(device.ray_resource, 0) for node in ray.nodes() if node["Alive"]]
    return max(1, sum(num_slots >= cfg.trainer.n_gpus_per_node for num_slots in slots))


def first_sentence(data: dict[str, Any], ignore_prefix: bool = False) -> None:
    """Log the first sentence of Ray's message, without its advice."""
    # Of a traceback, only the last line is logged.
    log.warning("Ray: %s", re.split(r"\. |\n", re.sub(r"(?s)^Traceback.*\n(?=\S+:)", "", " ".join(data["lines"])))[0])


def free(groups: list[PlacementGroup]) -> None:
    """Release the devices of a Ray that keeps running."""
    for group in groups:
        ray.util.remove_placement_group(group)


def reserve(cfg: ClusterConfig, device: Device, within_s: float = _RESERVE_S) -> list[PlacementGroup]:
    """Reserve one placement group per node, with one bundle per device. Raises NodesMissing after a timeout.

    A local Ray that lacks devices is a ConfigError at once. In a cluster, nodes may still join.
    """
    trainer = cfg.trainer
    name, per_node = device.ray_resource, trainer.n_gpus_per_node
    # No node can join a local Ray, so waiting would not help.
    if not cluster_address(cfg) and (have := int(ray.cluster_resources().get(name, 0))) < per_node:
        raise ConfigError(f"trainer.n_gpus_per_node={per_node}, but the local Ray has {have} {name} slots.")
    bundle = {"CPU": 1.0} if device.is_cpu else {"CPU": 1.0, name: 1.0}
    # One group per node keeps consecutive ranks on one node, because ranks of an engine replica or a sequence-parallel
    # group are consecutive and communicate most.
    groups = [placement_group([dict(bundle)] * per_node, strategy="STRICT_PACK") for _ in range(trainer.nnodes)]
    try:
        _wait_for(groups, cfg, name, within_s)
    except BaseException:  # a Ray started by the caller keeps running, and would keep or still request these devices
        free(groups)
        raise
    return groups


def _wait_for(groups: list[PlacementGroup], cfg: ClusterConfig, name: str, within_s: float) -> None:
    nnodes, per_node = cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node
    waiting, started, say_at = [group.ready() for group in groups], time.monotonic(), _FIRST_WORD_S
    while waiting and (waited := time.monotonic() - started) < within_s:
        if waited > say_at:
            left = within_s - waited
            log.info("waiting for devices: %s (%d s left)", _lacking(len(waiting), cfg, name), left)
            say_at += _SAY_EVERY_S
        # Short waits, because signals are handled between them.
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
        ray_watchdog.raise_if_lost()
    if waiting:
        raise NodesMissing(
            f"{len(waiting)} of {count(nnodes, 'node')} with {per_node} free {name} slots each did not become "
            f"available in {within_s:g} s: {_lacking(len(waiting), cfg, name)}. Check trainer.nnodes and "
            "trainer.n_gpus_per_node, or start the missing nodes."
        )


def lost_node(nodes: Collection[str], wait_s: float) -> tuple[str, str]:
    """Return (id, name with address) of one of ``nodes`` (Ray's ids) that has left the cluster; empty if all are alive.

    Waits, because Ray may notice it late.
    """

    def lost() -> tuple[str, str] | None:
        for node in ray.nodes():
            if node["NodeID"] in nodes and not node["Alive"]:
                return node["NodeID"], f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        return None

    return (SYSTEM.poll(lost, wait_s, _POLL_S) if nodes else None) or ("", "")


def ray_logs() -> str:
    """Return the folder of Ray's logs on this node. Its path is the same on all nodes."""
    node: Any = ray._private.worker._global_node
    # With ray://, this process does not run on a node of the cluster.
    return node.get_logs_dir_path() if node else "/tmp/ray/session_latest/logs"


def _lacking(num_missing: int, cfg: ClusterConfig, resource: str) -> str:
    """Describe the devices of the cluster compared with the requested ones."""
    slots = [int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]]
    needed, per_node = cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node
    fitting = sum(num_slots // per_node for num_slots in slots)
    supply = f"the cluster has {count(len(slots), 'node')} with {' + '.join(map(str, slots))} {resource} slots"
    if fitting >= needed:
        return f"{supply}, which is enough, but {num_missing * per_node} of the needed slots are in use"
    return f"{supply}; the run needs {needed} nodes with {per_node} each, so {needed - fitting} more nodes are needed"


def _as_text(value: Any) -> str:
    """Return an environment variable as the user typed it: YAML has converted numbers and booleans."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def share(value: Any) -> ray.ObjectRef:
    """Put ``value`` into the object store once; workers read it there by the reference."""
    return ray.put(value)
