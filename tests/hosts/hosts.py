"""Several hosts on one machine, for tests of multi-node runs."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.clock import eventually

ROOT = Path(__file__).parent.parent.parent
_UNSHARE = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
WAIT_S = 300.0


@functools.cache
def forbidden() -> str:
    """Return the reason why hosts cannot be created here; empty if they can."""
    try:
        command = [*_UNSHARE, "ip", "link", "add", "docker0", "type", "bridge"]
        process = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"hosts on one machine need unshare, nsenter and ip: {error}"
    return f"this kernel gives no namespaces to this user: {process.stderr.strip()}" if process.returncode else ""


class Job:
    """A command on a host. returncode: None while it runs. output: its output so far."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        # A file and not a pipe: daemons that the command leaves behind keep it open.
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def returncode(self) -> int | None:
        code = self._process.poll()
        return None if code is None else code if code >= 0 else 128 - code

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Return the exit code. Raises AssertionError with the output if the command does not end."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.log}: not done after {timeout_s:.0f} s:\n{self.output}") from None
        code = self.returncode
        assert code is not None
        return code

    def wait_for(self, words: str, timeout_s: float = WAIT_S) -> None:
        """Wait until the output contains ``words``. Raises AssertionError if the command ends before."""
        eventually(lambda: words in self.output or self.returncode is not None, f"'{words}' in {self.log}", timeout_s)
        assert words in self.output, f"it ended with {self.returncode} before it said '{words}':\n{self.output}"

    def kill(self) -> None:
        """Kill the command and all processes of its session."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Space:
    """Namespaces with a first process, which ends with its input. shared: folders that it sees below /tmp, in addition
    to the repository and Python."""

    def __init__(self, name: str, own: Path, *shared: Path) -> None:
        needed = {Path(each).resolve() for each in (*shared, ROOT, sys.prefix, sys.base_prefix)}
        visible = [each for each in needed if each.is_relative_to("/tmp")]
        command = [
            *_UNSHARE,
            sys.executable,
            "-IS",
            str(ROOT / "tests/hosts/init.py"),
            name,
            str(own),
            *map(str, visible),
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        assert self.process.stdout.readline() == "ready\n"
        at = f"/proc/{self.process.pid}/ns"
        # The first process is a child of this one, and so alone in the new process namespace.
        kinds = {"net": "net", "mount": "mnt", "uts": "uts", "ipc": "ipc", "pid": "pid_for_children"}
        self.enter = ["nsenter", *(f"--{kind}={at}/{file}" for kind, file in kinds.items())]

    def ip(self, *arguments: str) -> None:
        """Run `ip` in the network namespace only, with the machine's process ids."""
        process = subprocess.run([self.enter[0], self.enter[1], "ip", *arguments], capture_output=True, text=True)
        assert process.returncode == 0, f"ip {' '.join(arguments)}: {process.stderr}"

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


class Host:
    """One host; see the top of this file. number: starts at 1."""

    wire: Callable[..., None]

    def __init__(self, number: int, switch: Space, own: Path, shared: Path) -> None:
        self.number, self.own, self.shared = number, own, shared
        self.name, self.address = f"host{number}", f"192.0.2.{number}"
        self.environment = {
            "HF_HUB_OFFLINE": "1",
            "HOME": "/tmp/home",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._switch, self._jobs = switch, list[Job]()
        (own / "tmp/home").mkdir(parents=True)
        (own / "tmp").chmod(0o1777)
        self.boot()

    def boot(self) -> None:
        """Start the host with its previous files."""
        self._space = space = Space(self.name, self.own, self.shared)
        # The name is new each time, as the card of a host that ended is taken away only some time later.
        self._port = f"p{self.number}.{space.process.pid}"
        space.ip("link", "add", "docker0", "type", "bridge")
        card, pid = f"02:00:00:00:00:{self.number:02x}", str(space.process.pid)
        end = ["peer", "name", "eth0", "address", card, "netns", pid]
        self._switch.ip("link", "add", self._port, "type", "veth", *end)
        self._switch.ip("link", "set", self._port, "master", f"switch{self.number}", "up")
        for line in (
            "link set lo up",
            "addr add 172.17.0.1/16 dev docker0",
            "link set docker0 up",
            f"addr add {self.address}/24 dev eth0",
            "link set eth0 up",
            "route add default via 192.0.2.254 dev eth0",
        ):
            space.ip(*line.split())

    def start(self, command: str, environment: Mapping[str, object] | None = None, cwd: Path = ROOT) -> Job:
        """Start a line of bash. environment: additions to `Host.environment`; the value None removes a variable."""
        given = {**self.environment, **(environment or {})}
        words = [f"{name}={value}" for name, value in given.items() if value is not None]
        line = ["env", "-i", "-C", str(cwd), *words, "bash", "-c", command]
        job = Job([*self._space.enter, "--", *line], self.own / f"job_{len(self._jobs):02}.log")
        self._jobs.append(job)
        return job

    def run(
        self, command: str, environment: Mapping[str, object] | None = None, timeout_s: float = WAIT_S, cwd: Path = ROOT
    ) -> Job:
        """Run a line of bash to its end."""
        job = self.start(command, environment, cwd)
        job.wait(timeout_s)
        return job

    def check(self, command: str, environment: Mapping[str, object] | None = None, timeout_s: float = WAIT_S) -> str:
        """Return the output of a line of bash. Raises AssertionError if it fails."""
        job = self.run(command, environment, timeout_s)
        assert job.returncode == 0, f"{self.name}: {command}: {job.returncode}\n{job.output}"
        return job.output

    def pids(self, words: str) -> list[int]:
        """Return the processes of this host, by its own pids, whose command line contains ``words``."""
        lines = self.check("ps -eww -o pid=,args=").splitlines()
        found = [line.split(maxsplit=1) for line in lines]
        return [int(pid) for pid, *rest in found if rest and words in rest[0]]

    def kill(self, words: str) -> list[int]:
        """Kill (-9) all processes of this host whose command line contains ``words``. Returns their pids."""
        pids = self.pids(words)
        assert pids, f"{self.name} runs nothing with '{words}'"
        self.check(f"kill -9 {' '.join(map(str, pids))}")
        return pids

    def cut(self) -> None:
        """Disconnect the cable."""
        self._switch.ip("link", "set", self._port, "down")

    def power_off(self) -> None:
        """End all processes without closing connections, so no peer is notified."""
        self.cut()
        self.end()

    def end(self) -> None:
        """End all processes."""
        self._space.end()
        for job in self._jobs:
            job.wait()


class Network:
    """Hosts on a switch, or on a wire with a delay of ``delay_ms`` each way and the share ``loss`` of lost frames."""

    def __init__(self, folder: Path, number: int, delay_ms: float | None = None, loss: float = 0) -> None:
        shared, own = folder / "shared", folder / "switch"
        shared.mkdir()
        (own / "tmp").mkdir(parents=True)
        self._wire: subprocess.Popen[str] | None = None
        self.hosts: list[Host] = []
        self._switch = switch = Space("switch", own)
        try:
            self._connect([f"switch{each}" for each in range(1, number + 1)], delay_ms is not None)
            if delay_ms is not None:
                self.wire(delay_ms, loss)
            for each in range(1, number + 1):
                self.hosts.append(Host(each, switch, folder / f"host{each}", shared))
                self.hosts[-1].wire = self.wire
        except BaseException:
            self.end()
            raise

    def _connect(self, names: list[str], wire: bool) -> None:
        switch = self._switch
        switch.ip("link", "set", "lo", "up")
        for name in names:
            switch.ip("link", "add", name, "type", "bridge")
            switch.ip("link", "set", name, "up")
        if wire:
            self._lay_wire(names)
            return
        for name in names[1:]:
            switch.ip("link", "add", f"{name}.up", "type", "veth", "peer", "name", f"{name}.down")
            switch.ip("link", "set", f"{name}.up", "master", names[0], "up")
            switch.ip("link", "set", f"{name}.down", "master", name, "up")

    def _lay_wire(self, names: list[str]) -> None:
        # The kernel cuts large packets and fills in checksums before a card of this kind, so frames are as on a cable.
        cards = [f"{name}.tap" for name in names]
        command = [*self._switch.enter, "--", sys.executable, "-IS", str(ROOT / "tests/hosts/wire.py"), *cards]
        self._wire = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._wire_is_ready()
        for name, card in zip(names, cards, strict=True):
            self._switch.ip("link", "set", card, "master", name, "up")

    def _wire_is_ready(self) -> None:
        assert self._wire
        assert self._wire.stdout
        assert self._wire.stdout.readline() == "ready\n"

    def wire(self, delay_ms: float = 0, loss: float = 0) -> None:
        """Change delay and loss of the wire."""
        assert self._wire, "these hosts are on a switch"
        assert self._wire.stdin
        self._wire.stdin.write(f"{delay_ms} {loss}\n")
        self._wire.stdin.flush()
        self._wire_is_ready()

    def end(self) -> None:
        """End all hosts."""
        for host in self.hosts:
            host.end()
        self._switch.end()
        if self._wire:
            self._wire.communicate()
