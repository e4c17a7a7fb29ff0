"""Find the processes of a run, kill one, and check that none is left."""

import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from rltrain.common.clock import Clock
from rltrain.run.report.table import read_metrics
from tests.clock import PATIENCE_S
from tests.faults.nursery import begin
from tests.ranks import MARK, STAND_IN


def wait_while_running(process: subprocess.Popen, condition: Callable[[], object], what: str) -> None:
    """Return once condition() is true. Raises AssertionError with the output of the run if it ends before."""

    def come_or_over() -> object:
        return condition() or process.poll() is not None

    if not Clock().poll(come_or_over, PATIENCE_S) or not condition():
        process.kill()
        raise AssertionError(f"{what} did not come; the run says:\n{process.communicate()[0]}")


def over(process: subprocess.Popen, code: int = 0) -> str:
    """Wait for the end of the run with this exit code, and return its output."""
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, output
    assert code == 0 or "Traceback" not in output, output
    return output


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    """Return once metrics.jsonl has that step."""

    def come() -> bool:
        return (folder / "metrics.jsonl").exists() and any(line["step"] >= step for line in read_metrics(folder))

    wait_while_running(process, come, f"step {step}")


def wait_for_line(process: subprocess.Popen, words: str) -> str:
    """Read the run's output up to ``words``."""
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"'{words}' was not said: {said}")


def error_of(output: str) -> str:
    """Return the text after "error:" at the start of a line."""
    match = re.search("^error:", output, re.MULTILINE)
    assert match, output
    return output[match.start() :]


def below(driver: int) -> dict[int, str]:
    """Return pid -> command line of all processes below ``driver``."""
    listing = subprocess.run(["ps", "-eww", "-o", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()[1:]]
    parents = {int(pid): _stands_in(pid) or int(parent) for pid, parent, _ in rows}

    def is_below(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == driver:
                return True
        return False

    return {int(pid): args for pid, _, args in rows if is_below(int(pid))}


def _stands_in(pid: str) -> int:
    """Return the process that started this one and forked it from another (`nursery`); else 0."""
    try:
        match = re.search(rf"\b{STAND_IN}=(\d+)".encode(), Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return 0
    return int(match[1]) if match else 0


def pids(driver: int, words: str) -> list[int]:
    """Return the processes below ``driver`` whose command line contains ``words``, sorted by pid."""
    return sorted(pid for pid, args in below(driver).items() if words in args)


def worker_pids(driver: int) -> list[int]:
    """Return the training workers below ``driver``: Ray actors that have a process of ours open."""
    return pids(driver, "ray::_Host")


def alive(pids: Iterable[int]) -> list[int]:
    """Return the processes that still run. A zombie does not count."""

    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return [pid for pid in pids if runs(pid)]


def processes_of(folder: Path) -> list[str]:
    """Return the running processes that were started with `start`, found by their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name + " " + (process / "cmdline").read_text().replace("\0", " ")[:200])
        except OSError:  # it has ended meanwhile, or belongs to another user
            continue
    return found


def ended(pids: Iterable[int]) -> None:
    """Wait until none of these processes runs."""
    pids = list(pids)
    Clock().poll(lambda: not alive(pids), PATIENCE_S)
    assert not (left := alive(pids)), left


def gone(folder: Path) -> None:
    """Wait until no process that was started with `start` is left."""
    Clock().poll(lambda: not processes_of(folder), PATIENCE_S, 0.3)  # it reads all of /proc
    assert not (left := processes_of(folder)), left


class Trap:
    """Hurts the first process of a run that is found in a phase, see `trapping.py`."""

    # Phase -> (file, function).
    PHASES = {  # noqa: RUF012 - read only
        "load": ("workers/actor_ref.py", "_load_models"),
        "sync": ("workers/state/weight_sync.py", "run"),
        "generate": ("embedded/engine.py", "generate"),
        "log_probs": ("workers/actor_ref.py", "log_probs"),
        "update": ("workers/updates/updater.py", "forward_backward"),
        "stage": ("workers/actor_ref.py", "stage"),
        "save": ("workers/actor_ref.py", "write"),
    }
    # Of a run with a critic.
    TRAINED = {  # noqa: RUF012 - read only
        "values": ("workers/critic.py", "values"),
        "update_critic": ("workers/critic.py", "update"),
        "ref": ("workers/actor_ref.py", "ref_log_probs"),
        "update_actor": ("workers/actor_ref.py", "update"),
        "save": PHASES["save"],
    }
    EXPORT = {"export": ("models/weights/export.py", "write")}  # noqa: RUF012 - read only
    # Of vLLM: the process that inspects the model's class while the engine starts, and the loop of its steps.
    ENGINE = {"vllm_start": ("models/registry.py", "_run"), "vllm_generate": ("vllm/engine.py", "generate")}  # noqa: RUF012

    # For "memory": one heap, and large blocks that are requested from the kernel one by one.
    MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(3 << 19)}  # noqa: RUF012 - read only

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environment = begin() | {"RLTRAIN_TRAP": str(folder)}

    def lay(self, phase: str, how: int | str, rank: int | None = None) -> None:
        """Set the trap, also for running processes. how: a signal, or "memory". rank: only this worker; None: the first
        one."""
        words = [
            *(self.PHASES | self.TRAINED | self.EXPORT | self.ENGINE)[phase],
            how if isinstance(how, str) else str(int(how)),
        ]
        words += [] if rank is None else [str(rank)]
        (self._folder / "laid").write_text(" ".join(words))
        (self._folder / "laid").rename(self._folder / "trap")

    def wait(self, process: subprocess.Popen) -> str:
        """Return the pid of the caught process, once there is one."""
        wait_while_running(process, lambda: self.caught, "the trap")
        return self.caught

    @property
    def caught(self) -> str:
        """Return the pid of the caught process."""
        file = self._folder / "caught"
        return file.read_text() if file.exists() else ""
