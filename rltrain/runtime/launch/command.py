"""Command of a launch, on the head: its environment, its signals, and its exit code."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rltrain.common.attempt import ATTEMPT, attempt_file, interpret_exit, read_reports, report_to_supervisor, shell_code
from rltrain.common.errors import ConfigError
from rltrain.runtime.launch.arguments import Launch
from rltrain.runtime.launch.store import MARK, group_is_alive

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
    try:
        driver = subprocess.Popen(command, env=environment, start_new_session=True)
    except OSError as error:
        raise ConfigError(f"the command cannot be started: {error}") from error
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
