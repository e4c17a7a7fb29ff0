"""The Ray cluster: start or join it, and reserve the devices of a run.

Ray waits long and silently for what does not come: an address where nobody listens, a node that is down, devices in
use. So everything that can be known beforehand is checked first, and while devices are awaited the log says which are
missing. Left out: starting Ray on other nodes (scripts/ray_start.sh does it), and growing or shrinking the reservation
of a run.
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

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from rltrain.base.clock import SYSTEM
from rltrain.base.device import Device
from rltrain.base.env import first_set, prepare_driver, ray_address, shipped, use_token
from rltrain.base.errors import ConfigError, NodesMissing, WorkerLost, first_line
from rltrain.base.logs import count
from rltrain.config.schema import Config
from rltrain.controller import lifeline
from rltrain.controller.launch.files import own_token

log = logging.getLogger(__name__)
_RESERVE_S = 120
_POLL_S = 0.5
_CONNECT_S = 5
# Of the object store; what Ray makes of less is told nowhere.
_LEAST_FILE_BYTES = 80 << 20
_TRIES = 3
# The last two: the server of a client has died while Ray looked at it.
_TOO_SLOW = (
    "timed out during startup", "Starting Ray client server failed", "Proxy failed to Connect", "psutil.ZombieProcess",
    "psutil.NoSuchProcess",
)  # fmt: skip
_FIRST_WORD_S, _SAY_EVERY_S = 2, 10
_KEY = "ray_kwargs.ray_init"


def cluster_address(cfg: Config) -> str | None:
    """The cluster to join: ``ray_kwargs.ray_init.address`` or RAY_ADDRESS. None: a local Ray is started."""
    return cfg.ray_kwargs.ray_init.get("address") or ray_address()


def ray_problems(cfg: Config) -> Iterator[str]:
    """Problems of ``ray_kwargs``: arguments that ray.init does not have, a cluster that is needed and not named."""
    # ray.init takes names with an underscore out of **kwargs, so its signature lacks them.
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
    # Only host:port can be tried by a connection; auto is left to Ray.
    if address and (match := re.fullmatch(r"(?:ray://)?([\w.-]+):(\d+)", address)):
        try:
            # Ray itself would try for many minutes, without a word.
            socket.create_connection((match[1], int(match[2])), timeout=_CONNECT_S).close()
        except OSError as error:
            yield (
                f"{_KEY}.address={address} (or RAY_ADDRESS): nobody answers there ({error}). "
                "Start Ray with scripts/ray_start.sh."
            )
    if cfg.trainer.nnodes > 1 and not address:
        yield (
            f"trainer.nnodes={cfg.trainer.nnodes} needs a running Ray cluster. Start it with "
            f"{shipped('scripts/ray_start.sh')} on every node, then set {_KEY}.address=auto."
        )


def start_ray(cfg: Config) -> bool:
    """Join the cluster at `cluster_address`, else start a local one.

    Returns False, and changes nothing, where Ray runs in this process already.

    A worker takes one CPU slot. A local Ray gets as many slots as there are workers, however few cores the machine has.
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
    # Each worker has a log file of its own; Ray would print the output of all of them on the driver's terminal.
    arguments: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        # ray.init refuses a number of slots where it joins a cluster.
        settings.pop("num_cpus", None)
        _use_token()
    else:
        arguments |= {"num_cpus": max(os.cpu_count() or 1, cfg.trainer.n_gpus_per_node), "include_dashboard": False}
        if "_temp_dir" not in settings and not first_set("RAY_TMPDIR") and (folder := closed_folder()):
            settings["_temp_dir"] = f"{folder}/ray"
        # "local" means a Ray of our own, not one that happens to run on this machine.
        _check_limits()
        _have_token()
    arguments |= settings | {"address": address or "local"}
    if runtime or variables:
        arguments["runtime_env"] = runtime | {"env_vars": variables}
    try:
        with contextlib.ExitStack() as stack:
            if arguments["address"] == "local":
                stack.enter_context(_on_this_machine())
                stack.enter_context(_without(_unasked(arguments)))
            _init(arguments)
    except (ValueError, TypeError, ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        arguments_shown = {**settings, "address": address} if address else settings
        named = ", ".join(f"{name}={value}" for name, value in arguments_shown.items())
        raise ConfigError(f"ray.init({named}) failed, see {_KEY}: {error}{way_in(address, error)}") from error
    except Exception as error:
        # Ray has no type of its own for a start that takes too long, or whose processes die.
        raise WorkerLost(
            f"Ray did not start on this machine: {error} Run the same command again; if it fails again, look for the "
            f"reason in gcs_server.out and raylet.out of {ray_logs()}."
        ) from error
    # Of a node that ends, Ray prints the last lines of its log, over the run's own words.
    ray._private.worker.print_to_stdstream = first_sentence
    return True


def closed_folder(parent: str = "/tmp") -> str | None:
    """Return a folder below ``parent`` that this user alone may enter; None where none can be made.

    Ray lets every user write into its temporary folder and its sessions. The path is short, because Ray's sockets lie
    below it and the path of a socket has at most 107 bytes.
    """
    folder, user = f"{parent}/rltrain_{os.getuid()}", os.getuid()
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != user:  # another user was first
            return tempfile.mkdtemp(prefix="rltrain_", dir=parent)
        os.chmod(folder, 0o700)
        return folder
    except OSError:
        return None


def _have_token() -> None:
    """A token for a local Ray. Ray would make one itself, and leave it to the umask who may read it."""
    if first_set("RAY_AUTH_MODE") in ("", "token"):
        try:
            own_token(None)
        except OSError:  # no home that can be written
            use_token(secrets.token_hex(32))


def _check_limits() -> None:
    """Raise ConfigError where a local Ray could not start: its object store is a file in shared memory."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= most < _LEAST_FILE_BYTES:
        raise ConfigError(
            f"files may have {most / 2**20:.0f} MiB here (ulimit -f), and Ray's object store is one of at least "
            f"{_LEAST_FILE_BYTES >> 20} MiB. Type `ulimit -f unlimited` first."
        )


@contextlib.contextmanager
def _on_this_machine() -> Iterator[None]:
    """Inside, a Ray that starts listens on the loopback alone, which no other host reaches."""
    # Ray has this for desktops, by a variable that it reads when it is imported. It takes no 127.0.0.1 as an address.
    constants, name = ray._private.ray_constants, "ENABLE_RAY_CLUSTER"
    before = getattr(constants, name, True)
    setattr(constants, name, False)
    try:
        yield
    finally:
        setattr(constants, name, before)


def _unasked(arguments: dict[str, Any]) -> list[str]:
    """What a Ray for one run starts and nobody asks: what makes a cluster larger, what sends output of workers to the
    driver, and what shows the cluster. Each is a process that takes a second of processor and 100 MB."""
    return [
        "start_monitor",
        *(["start_log_monitor"] if not arguments["log_to_driver"] else []),
        *(["start_api_server"] if not arguments["include_dashboard"] else []),
    ]


@contextlib.contextmanager
def _without(parts: list[str]) -> Iterator[None]:
    """Inside, a Ray that starts leaves these out. No argument of ray.init does."""
    node = ray._private.node.Node
    before = {name: getattr(node, name) for name in parts if hasattr(node, name)}
    for name in before:
        setattr(node, name, lambda self, **_: None)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(node, name, method)


def _init(arguments: dict[str, Any]) -> None:
    """Call ``ray.init``, and again if a busy machine was too slow for Ray's limits.

    A head may fail to start the process that serves a client, and a local Ray gives its own start 30 s.
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
    """Join with the token that is at hand, as Ray itself does with ``address=auto`` alone."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    with contextlib.suppress(ImportError):  # an older Ray, for which RAY_AUTH_MODE=token has to be set
        from ray._private.authentication import authentication_token_setup as setup

        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def way_in(address: str | None, error: BaseException) -> str:
    """What to do where a cluster could not be joined. Ray tells some reasons by the cause of its error alone."""
    message = f"{error} {error.__cause__ or ''}".lower()
    if not address:
        return ""
    if "authentic" in message or "token" in message:
        return (
            "\nThe cluster asks for another token: copy ~/.ray/auth_token from its head, or set RAY_AUTH_TOKEN, and "
            "RAY_AUTH_MODE=token."
        )
    if address == "auto":
        return f"\nThis machine is no node of a cluster: start Ray with {shipped('scripts/ray_start.sh')}."
    if address.startswith("ray://"):
        return "\nIts port is that of Ray's client server (10001 on the head), with the same Python and Ray as here."
    return (
        "\nThis machine is no node of that cluster: run the command on the head, or make this one a node "
        f"(ray_start.sh worker), or set {_KEY}.address=ray://HEAD:10001, or use `ray job submit`. "
        "A cluster without a token is joined with RAY_AUTH_MODE=disabled where one lies in ~/.ray."
    )


def num_nodes(cfg: Config, device: Device) -> int:
    """Nodes of the cluster with as many devices as ``trainer.n_gpus_per_node`` asks for; 1 at least."""
    slots = [node["Resources"].get(device.ray_resource, 0) for node in ray.nodes() if node["Alive"]]
    return max(1, sum(num_slots >= cfg.trainer.n_gpus_per_node for num_slots in slots))


def first_sentence(data: dict[str, Any], ignore_prefix: bool = False) -> None:
    """Log what Ray said, without the rest of its advice."""
    # Of a traceback, what stands behind it.
    log.warning("Ray: %s", re.split(r"\. |\n", re.sub(r"(?s)^Traceback.*\n(?=\S+:)", "", " ".join(data["lines"])))[0])


def free(groups: list[PlacementGroup]) -> None:
    """Give devices back to a Ray that goes on."""
    for group in groups:
        ray.util.remove_placement_group(group)


def reserve(cfg: Config, device: Device, within_s: float = _RESERVE_S) -> list[PlacementGroup]:
    """Reserve one placement group per node, with one bundle per device. Raises NodesMissing when they do not come up.

    A local Ray that lacks devices is a ConfigError at once. In a cluster, nodes may still join.
    """
    trainer = cfg.trainer
    name, per_node = device.ray_resource, trainer.n_gpus_per_node
    # No node can join a local Ray, so waiting would not help.
    if not cluster_address(cfg) and (have := int(ray.cluster_resources().get(name, 0))) < per_node:
        raise ConfigError(f"trainer.n_gpus_per_node={per_node}, but the local Ray has {have} {name} slots.")
    bundle = {"CPU": 1.0} if device.is_cpu else {"CPU": 1.0, name: 1.0}
    # A group per node keeps ranks that are numbered one after the other on one node. The ranks of an engine replica and
    # of a sequence-parallel group are such neighbours, and they exchange the most.
    groups = [placement_group([dict(bundle)] * per_node, strategy="STRICT_PACK") for _ in range(trainer.nnodes)]
    try:
        _wait_for(groups, cfg, name, within_s)
    except BaseException:  # a Ray of the caller's goes on, and would hold or still look for these devices
        free(groups)
        raise
    return groups


def _wait_for(groups: list[PlacementGroup], cfg: Config, name: str, within_s: float) -> None:
    nnodes, per_node = cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node
    waiting, started, say_at = [group.ready() for group in groups], time.monotonic(), _FIRST_WORD_S
    while waiting and (waited := time.monotonic() - started) < within_s:
        if waited > say_at:
            left = within_s - waited
            log.info("waiting for devices: %s (%d s left)", _lacking(len(waiting), cfg, name), left)
            say_at += _SAY_EVERY_S
        # The wait is cut into short ones, because signals are handled between them.
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
        lifeline.raise_if_lost()
    if waiting:
        raise NodesMissing(
            f"{len(waiting)} of {count(nnodes, 'node')} with {per_node} free {name} slots each did not come up "
            f"in {within_s:g} s: {_lacking(len(waiting), cfg, name)}. "
            "Check trainer.nnodes and trainer.n_gpus_per_node, or start the missing nodes."
        )


def lost_node(nodes: Collection[str], wait_s: float) -> tuple[str, str]:
    """Which of ``nodes`` (Ray's ids) is no longer in the cluster: its id, and name with address. Empty where all are.

    Ray may learn of it only now, so this waits.
    """

    def lost() -> tuple[str, str] | None:
        for node in ray.nodes():
            if node["NodeID"] in nodes and not node["Alive"]:
                return node["NodeID"], f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        return None

    return (SYSTEM.poll(lost, wait_s, _POLL_S) if nodes else None) or ("", "")


def ray_logs() -> str:
    """The folder of Ray's logs on this node. It has the same name on all nodes."""
    node: Any = ray._private.worker._global_node
    # Behind ray:// this process is none of the cluster's.
    return node.get_logs_dir_path() if node else "/tmp/ray/session_latest/logs"


def _lacking(num_missing: int, cfg: Config, resource: str) -> str:
    """Compare the devices of the cluster with those that the run asks for."""
    slots = [int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]]
    needed, per_node = cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node
    fitting = sum(num_slots // per_node for num_slots in slots)
    supply = f"the cluster has {count(len(slots), 'node')} with {' + '.join(map(str, slots))} {resource} slots"
    if fitting >= needed:
        return f"{supply}, which would do, but {num_missing * per_node} of those asked for are in use"
    return f"{supply}; {needed} x {per_node} on one node each are asked for, so {needed - fitting} more are needed"


def _as_text(value: Any) -> str:
    """An environment variable as the user typed it: YAML has made numbers and booleans of some."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def share(value: Any) -> ray.ObjectRef:
    """Put ``value`` into the object store once; workers that get the reference read it from there."""
    return ray.put(value)
