"""The surroundings of the program: environment variables, CPU limits, device files, shipped files.

Every variable that rltrain sets is set here; one that the user has set is left alone.
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

from rltrain.base.secrets import masked

# Ascend, as vllm-ascend's and HCCL's documentation ask for reinforcement learning. Not verified on hardware.
_NPU = {
    "HCCL_CONNECT_TIMEOUT": "1500",
    # Longer than the driver's own deadline, whose message names who is late (trainer.hang_floor_s).
    "HCCL_EXEC_TIMEOUT": "17340",
    # Processes of a node collide at a fixed port, and a range of our own might be one that Linux gives to others.
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    # Early vllm-ascend puts code of its own in the place of Qwen2.5-VL's, which all published recipes turn off.
    "USE_OPTIMIZED_MODEL": "0",
    # Weights in the NZ layout cannot be overwritten in place.
    "VLLM_ASCEND_ENABLE_NZ": "0",
}
# The session of a worker's Ray: shared memory that may outlive the worker has it in its name.
SESSION = "RLTRAIN_SESSION"
# Activations come and go: their memory must not go back to the kernel each time. Waiting OpenMP threads must not spin.
_CPU = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824", "OMP_WAIT_POLICY": "PASSIVE"}
# A user who sets one of these for the driver means the workers too, on every node,
_PASSED_ON = (
    *("ASCEND_", "GLOO_", "HCCL_", "HF_", "NCCL_", "PYTORCH_", "SGLANG_", "TORCH_", "VLLM_"),
    *("CLEARML_", "MLFLOW_", "SWANLAB_", "TRACKIO_", "WANDB_"),
)
# but not those that differ from node to node or from worker to worker.
_EACH_ITS_OWN = ("_VISIBLE_DEVICES", "_IP")
# Names of the user's variables for workers that Ray must not write down.
_SECRETS: set[str] = set()
# The variable that chooses devices, and the pattern of their files.
_ACCELERATORS = {
    "npu": ("ASCEND_RT_VISIBLE_DEVICES", "/dev/davinci[0-9]*"),
    "cuda": ("CUDA_VISIBLE_DEVICES", "/dev/nvidia[0-9]*"),
}
# Linux's request for the IPv4 address of a network card.
_SIOCGIFADDR = 0x8915
# Folder and files of a cgroup's memory, by the controllers that /proc names: version 2, and version 1.
_MEMORY_FILES = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_BY_DEVICE = {"npu": _NPU, "cuda": {}, "cpu": _CPU}
# Micro-batches differ in length, so an allocator of fixed segments is left with holes that no tensor fits into.
_GROWING = "expandable_segments:True"


def shipped(name: str) -> str:
    """The path of a page or script of the project: ``docs/rewards.md`` in a checkout, else where pip has put it."""
    if (Path(__file__).parents[2] / name).is_file():
        return name
    file = shipped_file(name)
    return str(file) if file else name


def shipped_file(name: str) -> Path | None:
    """Where a page or script of the project is, from wherever this runs; None where it was not installed."""
    path = Path(__file__).parents[2] / name
    if path.is_file():
        return path
    try:
        placed = [file for file in files("rltrain") or () if file.as_posix().endswith(f"share/rltrain/{name}")]
    except PackageNotFoundError:
        return None
    return Path(str(placed[0].locate())).resolve() if placed else None


def worker_environment(device: str, threads: int, engine: str = "hf", *, graphs: bool = False) -> dict[str, str]:
    """Environment of a worker process on ``device`` (npu, cuda, cpu) with ``threads`` CPU threads.

    graphs: the ``engine`` captures some on an accelerator.
    """
    variables = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **_BY_DEVICE[device]}
    if device == "npu":
        # Level 2 launches fastest, but torch_npu captures no graph under it.
        variables["TASK_QUEUE_ENABLE"] = "1" if graphs else "2"
    # SGLang's memory saver does not go together with it. vLLM switches it off around its own memory; vllm-ascend
    # refuses the variable, so there it is set once the engine is up (`Device.grow_segments`).
    if (device, engine) in (("cuda", "hf"), ("cuda", "vllm"), ("npu", "hf")):
        names = [f"PYTORCH_{device.upper()}_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
        variables |= {names[0]: _GROWING} if not any(name in os.environ for name in names) else {}
    # This becomes Ray's runtime environment, which overrides what is set elsewhere, so the user's own value has to be
    # in it.
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def driver_environment(*more: str | None) -> dict[str, str]:
    """What workers take over from the driver (`adopt`), and the variables ``more``. Some are secrets: log none."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_PASSED_ON) and not name.endswith(_EACH_ITS_OWN)) or name in more or name in _SECRETS
    }


def adopt(environment: dict[str, str]) -> None:
    """In a worker: take over the driver's variables, but for those that this node sets itself."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def chosen_threads() -> int | None:
    """OMP_NUM_THREADS, where the user has set it."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdigit() and int(value) else None


def use_interface(address: str, num_nodes: int) -> None:
    """Make gloo, NCCL and HCCL meet over the network card with this address, unless the user has named another.

    By itself gloo takes the address of the host's name, which many a system's /etc/hosts says is 127.0.1.1: no other
    node gets there. The other two take the first card they find, be it a bridge of containers. On a single node with a
    Ray of its own gloo alone is told: to stay on the loopback.
    """
    for name, card_address in _interfaces():
        if card_address == address:
            # "=": this card, and not all whose names begin so. Only the meeting goes over it, data over RoCE too.
            if num_nodes > 1 or address.startswith("127."):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            for variable in ("NCCL", "HCCL") if num_nodes > 1 else ():
                os.environ.setdefault(f"{variable}_SOCKET_IFNAME", f"={name}")


def _interfaces() -> Iterator[tuple[str, str]]:
    """Name and IPv4 address of every network card that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        for _, name in socket.if_nameindex():
            try:
                # The answer is Linux's `struct ifreq`: 16 bytes of name, family and port of two bytes each, then the
                # address.
                ifreq = fcntl.ioctl(line, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # a card without an address
                continue
            yield name, socket.inet_ntoa(ifreq[20:24])


def address_towards(other: str | None) -> str | None:
    """This node's address on the network card that leads to another host, or (None) out of this node.

    None where there is no way. The first address of a machine may be that of a bridge of containers.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line, suppress(OSError):
        # Nothing is sent: the kernel only looks up the route. The address stands for any host that is far away.
        line.connect((other or "203.0.113.1", 9))
        return line.getsockname()[0]
    # Nodes of an isolated network have no way out, and meet on the card that they have.
    cards = [address for name, address in _interfaces() if not name.startswith(("lo", "docker", "br-", "virbr", "cni"))]
    return cards[0] if cards and not other else None


def first_set(*names: str) -> str:
    """The value of the first of these variables that is set and not empty, or an empty text."""
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def see_own_device(given: Mapping[str, Sequence[str]]) -> None:
    """In a worker, before torch looks for devices: see those that Ray has given it, by resource (NPU, GPU).

    Ray does so itself, but not where RAY_EXPERIMENTAL_NOSET_*_VISIBLE_DEVICES is set, as launchers of verl's do: all
    workers of a node would then take its first device.
    """
    for kind, resource in (("npu", "NPU"), ("cuda", "GPU")):
        if devices := given.get(resource):
            os.environ[_ACCELERATORS[kind][0]] = ",".join(devices)


def devices_here(device: str, none: int = 1) -> int:
    """What ``trainer.n_gpus_per_node`` is by default: the devices of this kind (auto, npu, cuda) that this machine
    shows, or else ``none``.

    From the variable that chooses devices, SLURM's count or the device files: neither torch nor a driver is asked.
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
    """What ``trainer.nnodes`` is by default: the nodes that scripts/ray_start.sh has gathered, or else 1."""
    return int(os.environ.get("RLTRAIN_NNODES", "1"))


def installed(package: str) -> bool:
    """Whether a package can be found; it is not imported."""
    return importlib.util.find_spec(package) is not None


def engine_here(device: str, devices_per_engine: int) -> str:
    """What ``actor_rollout_ref.rollout.name`` is by default, for ``trainer.device`` and the devices of an engine.

    A device that is named counts as there: the driver may run on a node that has none of them. The answer stands in the
    configuration that workers are given, so they never ask for themselves.
    """
    accelerated = devices_here(device, none=0) > 0 if device == "auto" else device != "cpu"
    return "vllm" if devices_per_engine > 1 or (accelerated and installed("vllm")) else "hf"


def chosen_devices(device: str) -> list[str]:
    """The devices that this process may see, as the variable that chooses them names them. None where it is not set."""
    # An empty list or -1 hides all devices.
    entries = os.environ.get(_ACCELERATORS[device][0], "").split(",")
    return [entry for entry in entries if entry.strip() not in ("", "-1")]


@contextmanager
def showing(device: str, devices: Sequence[str]) -> Iterator[None]:
    """Inside, processes that are started see these devices ("": what this one sees).

    Afterwards this process's variables are as before, but for new ones of SGLang's: what it sets for NCCL would part
    this rank from the others.
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
    """Cores that the container's CPU quota (cgroup v2) allows; infinite without one."""
    try:
        quota, period = file.read_text("utf-8").split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf


def memory_left(root: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")) -> float:
    """Bytes that the memory limits of this process's cgroup and of those above it still allow; infinite without one."""
    lines = [line.split(":", 2) for line in mine.read_text("utf-8").splitlines()] if mine.is_file() else []
    left = [math.inf]
    for _, controllers, path in lines:
        base, *names = _MEMORY_FILES.get(controllers, ("",))
        folder = root / base / path.strip("/")
        # A container may see its own group as the root, at a path that is not there.
        left += [
            _memory_left(cgroup, *names)
            for cgroup in (folder, *folder.parents)
            if names and root in (cgroup, *cgroup.parents)
        ]
    return min(left)


def _memory_left(folder: Path, limit: str, used: str, files: str) -> float:
    try:
        # Pages of files count as used, and the kernel gives them up.
        stat = dict(line.split() for line in (folder / "memory.stat").read_text("utf-8").splitlines())
        return int((folder / limit).read_text("utf-8")) - int((folder / used).read_text("utf-8")) + int(stat[files])
    except (OSError, ValueError, KeyError):  # no such file, or "max"
        return math.inf


def slot_environment() -> dict[str, str]:
    """Environment of a process for a user's functions: more threads, or arenas, would only eat its address space."""
    # What the user has set stands last and wins; but no proxy reaches this machine's own address.
    own = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1"]))
    few = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
    return few | os.environ | dict.fromkeys(("no_proxy", "NO_PROXY"), own)


def prepare_driver(**of_workers: str) -> dict[str, str]:
    """Environment of the driver, before Ray starts. of_workers: the user's variables for workers count here too.

    Return those for Ray's runtime environment, which Ray writes into its logs. Secrets reach workers by `adopt`.
    """
    os.environ.update(of_workers)
    secret = {name for name, value in of_workers.items() if masked(value, name) != value}
    _SECRETS.update(secret)
    if job := os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        # The command came by `ray job submit`. What it sets for workers goes before what the job sets,
        os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
        # and a single thread is Ray's choice for a process without CPU slots, unless the job has asked for it.
        variables = (json.loads(job).get("runtime_env") or {}).get("env_vars") or {}
        if "OMP_NUM_THREADS" not in variables | of_workers and os.environ.get("OMP_NUM_THREADS") == "1":
            del os.environ["OMP_NUM_THREADS"]
    # Ray warns that it will stop hiding devices from actors that ask for none; that is what we want.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray runs its workers at low priority, which starves training as soon as anything else runs on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray's GCS keeps a record of 100,000 calls for a dashboard that is not there: 65 kB a step in the soak.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # Ray starts a process a core beforehand, which would serve nobody: ours have environments of their own.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # those behind the one that ends the run, and is told
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    return {name: value for name, value in of_workers.items() if name not in secret}


def use_token(token: str) -> None:
    """Reach the Ray of another node with its token."""
    os.environ["RAY_AUTH_TOKEN"] = token


def prepare_vllm(rank: int, world: int) -> None:
    """Environment of a worker process before vLLM is imported: its engine is launched by us, inside this process."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # GiB of key-value cache on the CPU backend, whose threads are those of the worker.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    # As torchrun would set them; the process group exists already, so the address is read by nobody.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    # The newer runner, the default on GPUs, has no place for a sampler of our own.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "1")


def prepare_sglang(num_devices: int) -> None:
    """Environment of a worker process before SGLang starts an engine over so many devices."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    variables = {
        # Its context may be a few tokens longer than the positions that the model knows; no sequence gets there.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Trainers leave a little more on one device than on another; SGLang would refuse more than a tenth.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        # On the CPU it would want a socket (NUMA node) for each of several processes.
        **({"SGLANG_CPU_OMP_THREADS_BIND": "|".join([cores] * num_devices)} if num_devices > 1 else {}),
    }
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def work_offline() -> None:
    """The hub cannot be reached: neither this process nor the workers need try it again."""
    # Set for the driver and with it for the workers, since HF_ is passed on.
    os.environ["HF_HUB_OFFLINE"] = "1"


def ray_address() -> str | None:
    """The cluster that RAY_ADDRESS points at, or None."""
    return os.environ.get("RAY_ADDRESS") or None


def volcengine_account() -> dict[str, str]:
    """The account for Volcengine's machine learning platform, by verl's names. KeyError names a variable not set."""
    names = {"ak": "VOLC_ACCESS_KEY_ID", "sk": "VOLC_SECRET_ACCESS_KEY", "region": "MLP_TRACKING_REGION"}
    return {argument: os.environ[name] for argument, name in names.items()}
