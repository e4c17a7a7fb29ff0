"""Environment of the program: environment variables, CPU limits, device files, shipped files.

This module sets all variables that rltrain sets. Variables set by the user are kept.
"""

from __future__ import annotations

import fcntl
import glob
import importlib.util
import json
import math
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from rltrain.common.secrets import masked

# Ascend settings from the documentation of vllm-ascend and HCCL for reinforcement learning. Not verified on hardware.
_NPU = {
    "HCCL_CONNECT_TIMEOUT": "1500",
    # Longer than the driver's deadline (trainer.hang_floor_s), so that the driver reports a hang first. Only its
    # message names the late ranks.
    "HCCL_EXEC_TIMEOUT": "17340",
    # A fixed port would collide between processes of a node, and Linux may assign ports of a fixed range to others.
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    # Early versions of vllm-ascend replace Qwen2.5-VL's code by default; all published recipes disable this.
    "USE_OPTIMIZED_MODEL": "0",
    # Weights in the NZ layout cannot be overwritten in place.
    "VLLM_ASCEND_ENABLE_NZ": "0",
}
# Ray session of a worker: part of the name of shared memory that may outlive the worker.
SESSION = "RLTRAIN_SESSION"
# malloc keeps freed memory, because activations are allocated repeatedly. Waiting OpenMP threads must not spin.
_CPU = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824", "OMP_WAIT_POLICY": "PASSIVE"}
# Prefixes of variables that are copied from the driver to the workers of all nodes.
_PASSED_ON = (
    *("ASCEND_", "GLOO_", "HCCL_", "HF_", "NCCL_", "PYTORCH_", "SGLANG_", "TORCH_", "VLLM_"),
    *("CLEARML_", "MLFLOW_", "SWANLAB_", "TRACKIO_", "WANDB_"),
)
# Suffixes of variables that are not copied, because they differ between nodes or workers.
_EACH_ITS_OWN = ("_VISIBLE_DEVICES", "_IP")
# Names of user variables for workers that Ray must not log.
_SECRETS: set[str] = set()
# Variable that selects devices, and pattern of their device files.
_ACCELERATORS = {
    "npu": ("ASCEND_RT_VISIBLE_DEVICES", "/dev/davinci[0-9]*"),
    "cuda": ("CUDA_VISIBLE_DEVICES", "/dev/nvidia[0-9]*"),
}
# ioctl of Linux for the IPv4 address of a network card.
_SIOCGIFADDR = 0x8915
# Folder and files of a cgroup's memory, by the controllers in /proc: version 2, and version 1.
_MEMORY_FILES = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_BY_DEVICE = {"npu": _NPU, "cuda": {}, "cpu": _CPU}
# Segments can grow, because micro-batches differ in length, which would fragment fixed segments.
_GROWING = "expandable_segments:True"


def shipped(name: str) -> str:
    """Return the path of a project page or script: ``docs/rewards.md`` in a checkout, else its installed path."""
    if (Path(__file__).parents[2] / name).is_file():
        return name
    file = shipped_file(name)
    return str(file) if file else name


def shipped_file(name: str) -> Path | None:
    """Return the absolute path of a page or script of the project, or None if it is not installed."""
    path = Path(__file__).parents[2] / name
    if path.is_file():
        return path
    try:
        placed = [file for file in files("rltrain") or () if file.as_posix().endswith(f"share/rltrain/{name}")]
    except PackageNotFoundError:
        return None
    return Path(str(placed[0].locate())).resolve() if placed else None


def worker_environment(device: str, threads: int, engine: str = "hf", *, graphs: bool = False) -> dict[str, str]:
    """Return the environment of a worker process on ``device`` (npu, cuda, cpu) with ``threads`` CPU threads.

    graphs: the ``engine`` captures graphs on an accelerator.
    """
    variables = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **_BY_DEVICE[device]}
    if device == "npu":
        # Level 2 launches fastest, but torch_npu cannot capture graphs with it.
        variables["TASK_QUEUE_ENABLE"] = "1" if graphs else "2"
    # SGLang's memory saver is incompatible with expandable segments. vLLM disables them around its own memory.
    # vllm-ascend rejects the variable, so with it expandable segments are enabled after the engine has started
    # (`Device.grow_segments`).
    if (device, engine) in (("cuda", "hf"), ("cuda", "vllm"), ("npu", "hf")):
        names = [f"PYTORCH_{device.upper()}_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
        variables |= {names[0]: _GROWING} if not any(name in os.environ for name in names) else {}
    # Ray's runtime environment overrides other settings, so it must include the user's values.
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def driver_environment(*more: str | None) -> dict[str, str]:
    """Return the variables that the driver passes to workers (see `adopt`), with ``more`` added. Some are secrets, so
    do not log them."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_PASSED_ON) and not name.endswith(_EACH_ITS_OWN)) or name in more or name in _SECRETS
    }


def adopt(environment: dict[str, str]) -> None:
    """Set variables, such as the driver's in a worker, except variables that this node has set."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def chosen_threads() -> int | None:
    """Return OMP_NUM_THREADS if the user has set it."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdigit() and int(value) else None


def use_interface(address: str, num_nodes: int) -> None:
    """Make gloo, NCCL and HCCL use the network card with this address, unless the user has set another.

    By default, gloo uses the address of the host's name. In many /etc/hosts files this is 127.0.1.1, which other nodes
    cannot reach. NCCL and HCCL use the first card, which may be a container bridge. On a single node with a local Ray,
    only gloo is configured, for the loopback.
    """
    for name, card_address in _interfaces():
        if card_address == address:
            # "=": exactly this card instead of a prefix. It is used only for rendezvous; data may use RoCE.
            if num_nodes > 1 or address.startswith("127."):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            for variable in ("NCCL", "HCCL") if num_nodes > 1 else ():
                os.environ.setdefault(f"{variable}_SOCKET_IFNAME", f"={name}")


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield name and IPv4 address of every network card that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        for _, name in socket.if_nameindex():
            try:
                # The result is Linux's `struct ifreq`: 16 bytes of name, family and port of two bytes each, then the
                # address.
                ifreq = fcntl.ioctl(line, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # a card without an address
                continue
            yield name, socket.inet_ntoa(ifreq[20:24])


def address_towards(other: str | None) -> str | None:
    """Return this node's address on the network card towards another host, or (None) towards the outside.

    None without a route. The first address of a machine may belong to a container bridge.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line, suppress(OSError):
        # Nothing is sent: the kernel only looks up the route. The address is a placeholder for any remote host.
        line.connect((other or "203.0.113.1", 9))
        return line.getsockname()[0]
    # Nodes of an isolated network have no route to the outside, so the address of their card is used.
    cards = [address for name, address in _interfaces() if not name.startswith(("lo", "docker", "br-", "virbr", "cni"))]
    return cards[0] if cards and not other else None


def first_set(*names: str) -> str:
    """Return the first non-empty value of these variables, or ""."""
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def see_own_device(given: Mapping[str, Sequence[str]]) -> None:
    """Restrict a worker to the devices from Ray, by resource (NPU, GPU), before torch looks for devices.

    Ray does so itself, except with RAY_EXPERIMENTAL_NOSET_*_VISIBLE_DEVICES, which verl's launchers set: all workers of
    a node would then use its first device.
    """
    for kind, resource in (("npu", "NPU"), ("cuda", "GPU")):
        if devices := given.get(resource):
            os.environ[_ACCELERATORS[kind][0]] = ",".join(devices)


def devices_here(device: str, none: int = 1) -> int:
    """Return the default of ``trainer.n_gpus_per_node``: the machine's devices of this kind, or ``none``.

    device: auto, npu or cuda. They are counted from the variable that selects devices, SLURM's count or the device
    files, without torch or a driver.
    """
    for kind, (variable, pattern) in _ACCELERATORS.items():
        if device not in (kind, "auto"):
            continue
        if variable in os.environ:
            count = len(chosen_devices(kind))
        else:
            slurm = os.environ.get("SLURM_GPUS_ON_NODE", "")
            count = int(slurm) if slurm.isdigit() else len(glob.glob(pattern))
        if count:
            return count
    return none


def nodes_here() -> int:
    """Return the default of ``trainer.nnodes``: the nodes that scripts/ray_start.sh has gathered, or 1."""
    return int(os.environ.get("RLTRAIN_NNODES", "1"))


def installed(package: str) -> bool:
    """Return whether a package can be found, without importing it."""
    return importlib.util.find_spec(package) is not None


def engine_here(device: str, devices_per_engine: int) -> str:
    """Return the default of ``actor_rollout_ref.rollout.name``, for ``trainer.device`` and the devices of an engine.

    A named device counts as available, because the driver's node may not have it. Workers get the result in their
    configuration.
    """
    accelerated = devices_here(device, none=0) > 0 if device == "auto" else device != "cpu"
    return "vllm" if devices_per_engine > 1 or (accelerated and installed("vllm")) else "hf"


def chosen_devices(device: str) -> list[str]:
    """Return the visible devices of this process from the variable that selects devices, or [] if it is not set."""
    # An empty list or -1 hides all devices.
    entries = os.environ.get(_ACCELERATORS[device][0], "").split(",")
    return [entry for entry in entries if entry.strip() not in ("", "-1")]


@contextmanager
def showing(device: str, devices: Sequence[str]) -> Iterator[None]:
    """Show these devices to processes that are started inside the context ("": this process's devices).

    Afterwards, variables are restored, except new ones of SGLang: its settings for NCCL would separate this rank from
    the others.
    """
    before = dict(os.environ)
    if all(devices):
        os.environ[_ACCELERATORS[device][0]] = ",".join(devices)
    try:
        yield
    finally:
        for name, value in {**dict.fromkeys(os.environ), **before}.items():
            if value is None and not name.startswith("SGLANG_"):
                del os.environ[name]
            elif value is not None and os.environ.get(name) != value:
                os.environ[name] = value


def cpu_quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Return the cores that the container's CPU quota (cgroup v2) allows; infinite without one."""
    try:
        quota, period = file.read_text("utf-8").split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf


def memory_left(root: Path = Path("/sys/fs/cgroup"), cgroup: Path = Path("/proc/self/cgroup")) -> float:
    """Return the bytes that the memory limits of this process's cgroup and its parents still allow, or infinity."""
    lines = [line.split(":", 2) for line in cgroup.read_text("utf-8").splitlines()] if cgroup.is_file() else []
    left = [math.inf]
    for _, controllers, path in lines:
        base, *names = _MEMORY_FILES.get(controllers, ("",))
        folder = root / base / path.strip("/")
        # A container may see its own group as the root, at a path that does not exist.
        left += [
            _memory_left(cgroup, *names)
            for cgroup in (folder, *folder.parents)
            if names and root in (cgroup, *cgroup.parents)
        ]
    return min(left)


def _memory_left(folder: Path, limit: str, used: str, files: str) -> float:
    try:
        # The page cache that is inactive counts as used, but the kernel can reclaim it, so it is added.
        stat = dict(line.split() for line in (folder / "memory.stat").read_text("utf-8").splitlines())
        return int((folder / limit).read_text("utf-8")) - int((folder / used).read_text("utf-8")) + int(stat[files])
    except (OSError, ValueError, KeyError):  # no such file, or "max"
        return math.inf


def slot_environment() -> dict[str, str]:
    """Return the environment of a process for user functions. Threads and malloc arenas are limited to one, because
    more would waste address space.
    """
    # User variables take precedence, except that connections to this machine never use a proxy.
    own = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1"]))
    few = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
    return few | os.environ | dict.fromkeys(("no_proxy", "NO_PROXY"), own)


def prepare_driver(**of_workers: str) -> dict[str, str]:
    """Prepare the driver's environment before Ray starts. of_workers: the user's variables for workers and driver.

    Returns the variables for Ray's runtime environment, which Ray logs. Secrets are sent to workers by `adopt`.
    """
    os.environ.update(of_workers)
    secret = {name for name, value in of_workers.items() if masked(value, name) != value}
    _SECRETS.update(secret)
    if job := os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        # `ray job submit` started the program. The command's settings for workers override the job's.
        os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
        # A single thread is Ray's default for a process without CPU slots, so it is unset unless the job has requested
        # it.
        variables = (json.loads(job).get("runtime_env") or {}).get("env_vars") or {}
        if "OMP_NUM_THREADS" not in variables | of_workers and os.environ.get("OMP_NUM_THREADS") == "1":
            del os.environ["OMP_NUM_THREADS"]
    # Suppress Ray's warning that it will stop hiding devices from actors without devices, because this is intended.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray runs its workers at low priority, which starves training if anything else runs on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray's GCS records 100,000 calls for a dashboard that is not used: 65 kB per step in the soak test.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # Ray prestarts a process per core, which would be unused, because rltrain's workers have different environments.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault(
        "RAY_IGNORE_UNHANDLED_ERRORS", "1"
    )  # later errors, because the first error ends the run and is reported
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    return {name: value for name, value in of_workers.items() if name not in secret}


def use_token(token: str) -> None:
    """Set the token of the Ray of another node."""
    os.environ["RAY_AUTH_TOKEN"] = token


def prepare_vllm(rank: int, world: int) -> None:
    """Set the environment of a worker before vLLM is imported, whose engine runs inside this process."""
    adopt({
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # GiB of key-value cache on the CPU backend, which uses the worker's threads.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    })  # fmt: skip
    # The values that torchrun would set. The process group already exists, so the address is unused.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    # The newer runner, the default on GPUs, does not support a custom sampler.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


def prepare_sglang(num_devices: int) -> None:
    """Set the environment of a worker process before SGLang starts an engine over ``num_devices`` devices."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    adopt({
        # SGLang's context may exceed the model's positions by a few tokens, which no sequence uses.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Trainers use slightly different memory per device, but SGLang rejects differences above a tenth.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        # On the CPU, SGLang would otherwise require a socket (NUMA node) for each of several processes.
        **({"SGLANG_CPU_OMP_THREADS_BIND": "|".join([cores] * num_devices)} if num_devices > 1 else {}),
    })  # fmt: skip


def work_offline() -> None:
    """Disable hub access in this process and the workers, because the hub is unreachable."""
    # The variable is set for the driver, and workers get all HF_ variables of the driver.
    os.environ["HF_HUB_OFFLINE"] = "1"


def ray_address() -> str | None:
    """Return the cluster address in RAY_ADDRESS, or None."""
    return os.environ.get("RAY_ADDRESS") or None


def volcengine_account() -> dict[str, str]:
    """Return the account for Volcengine's platform, by verl's names. Raises KeyError for a missing variable."""
    names = {"ak": "VOLC_ACCESS_KEY_ID", "sk": "VOLC_SECRET_ACCESS_KEY", "region": "MLP_TRACKING_REGION"}
    return {argument: os.environ[name] for argument, name in names.items()}
