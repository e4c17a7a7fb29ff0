"""Ray and the command of a launch on one node: start, dashboard, address; environment, signals and exit code."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import ray

from rltrain.common.attempt import ATTEMPT, attempt_file, interpret_exit, read_reports, report_to_supervisor, shell_code
from rltrain.common.env import address_towards, devices_here, first_set
from rltrain.common.errors import ConfigError, NodesMissing
from rltrain.runtime.launch.arguments import Launch
from rltrain.runtime.launch.store import MARK, group_is_alive, is_here
from rltrain.runtime.slots.process import start

# Ray rejects a node whose versions of these differ from the head's.
VERSIONS = f"Python {platform.python_version()} and Ray {ray.__version__}"


def ray_start(launch: Launch, address: str, *arguments: str) -> None:
    """Run `ray start`. On failure raise its output: ConfigError for unknown arguments, else NodesMissing."""
    options = [*arguments, *launch.arguments]
    # Ray counts GPUs itself, but NPUs only if CANN's Python package is installed, so pass their number.
    if (devices := devices_here("npu", none=0)) and not any(option.startswith("--resources") for option in options):
        options += ["--resources", f'{{"NPU": {devices}}}']
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        # Output goes to a file, because Ray's processes would keep a pipe open. A new session, so that Ray does not get
        # our signals.
        process = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *options],
            env=os.environ | {MARK: address}, stdout=output, stderr=output, start_new_session=True, check=False,
        )  # fmt: skip
        output.seek(0)
        if process.returncode:
            # Exit code 2 means wrong arguments. Other failures may be temporary, for example while the head is
            # restarting.
            kind = ConfigError if process.returncode == 2 else NodesMissing
            raise kind(f"ray start {' '.join(options)} failed:\n{output.read().strip()}")


def dashboard() -> list[str]:
    """Return arguments of the dashboard. It is off by default, because its clients can start programs.

    DASHBOARD=1 enables it on this machine, DASHBOARD_HOST for others.
    """
    if not first_set("DASHBOARD") or first_set("DASHBOARD") == "0":
        return ["--include-dashboard=false"]
    if error := ray._private.utils.get_dashboard_dependency_error():
        raise ConfigError(f"DASHBOARD=1 needs pip install 'ray[default]=={ray.__version__}' ({error}).")
    return ["--include-dashboard=true", f"--dashboard-host={first_set('DASHBOARD_HOST') or '127.0.0.1'}"]


def own_address(launch: Launch, head: str = "") -> str:
    """Return the address of the network card that leads to the head. Raises ConfigError."""
    host = (head or launch.address).rpartition(":")[0]
    if host and not head and not first_set("NODE_IP") and not is_here(host):
        raise ConfigError(
            f"HEAD_ADDRESS (or MASTER_ADDR) is {host}, which is not this node. Start rank 0 there. If other nodes "
            "reach this node by that address, set NODE_IP to the address of this node."
        )
    address = first_set("NODE_IP") or address_towards(host or None)
    # On the head, its own host name may resolve to 127.0.1.1, which other nodes cannot use.
    if address and address.startswith("127.") and not first_set("NODE_IP") and not head:
        address = address_towards(None)
    if not address:
        raise ConfigError(
            "the address of this node is unknown: no network card has a route. Set NODE_IP to an address that other "
            "nodes can reach."
        )
    return address


_POLL_S = 0.5


def run_command(launch: Launch, address: str, signals: list[int], poll_signals: Callable[[], None]) -> int:
    """Run the command with the Ray of ``address``, forward the signals in ``signals``, and return its exit code.

    Returns 75 if it ended without a report. poll_signals: called periodically.
    """
    # This interpreter's folder is first, so that `python` in the command is this interpreter.
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    variables = {"RAY_ADDRESS": address, MARK: address, "PATH": path}
    variables |= {"RLTRAIN_NNODES": str(launch.num_nodes)} if launch.num_nodes else {}
    with attempt_file() as file:
        code = _run(launch.command, signals, poll_signals, os.environ | variables | {ATTEMPT: file})
        report = read_reports(file)
    report["pids"] = [pid for pid in report["pids"] if pid != os.getpid()]
    exit_code, cause = interpret_exit(code, report)
    if exit_code != code:
        report_to_supervisor(error=cause)
    return exit_code


def _run(command: list[str], signals: list[int], poll_signals: Callable[[], None], environment: dict[str, str]) -> int:
    driver = start(command, environment)
    num_forwarded = 0
    # After a signal, wait for the whole process group, because a script without exec ends first, while its run is still
    # saving.
    while driver.poll() is None or (num_forwarded and group_is_alive(driver.pid)):
        with suppress(ConnectionError):  # without its head the command ends by itself
            poll_signals()
        for signum in signals[num_forwarded:]:
            num_forwarded += 1
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signum)
        time.sleep(_POLL_S)
    if signals:
        report_to_supervisor(stopped=True)
    if group_is_alive(driver.pid):
        print_line("the command has ended; terminating the processes that it has left")
    code = shell_code(driver.returncode)
    return 75 if num_forwarded and code == 128 + signal.SIGTERM else code


def print_line(text: str) -> None:
    """Print a line with the node's name, because schedulers mix the output of all nodes."""
    with suppress(OSError):  # a closed terminal or pipe must not end the launch
        sys.stdout.write(f"{socket.gethostname()}: {text}\n")
        sys.stdout.flush()
