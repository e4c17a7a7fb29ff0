"""Start of child processes, except Ray's. Each gets a separate session, so that signals of the terminal do not reach it
and `kill_tree` kills it with all its descendants.

`ChildProcess` is a separate interpreter for code that may run forever; it ends with this process.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rltrain.common.env import slot_environment
from rltrain.common.errors import ConfigError, host_error
from rltrain.runtime.slots.limits import PROGRAMS_FOLDER, has_ended, kill_tree, remove_folder, send
from rltrain.runtime.slots.output import Printed

START_TIMEOUT_S = 120.0
# Time for the subreaper to end the remaining processes and itself, in seconds.
_END_S = 3.0
_LAST_CHARS = 2000
# The parent's sys.path, because the command or a plugin may have changed it. -c instead of -m, so that it is set before
# rltrain is imported.
_COMMAND = "import sys; sys.path[:] = {path!r}; from {module} import main; main({fd}, {parent})"


def start(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **streams: Any
) -> subprocess.Popen[bytes]:
    """Start a command. streams: further arguments of Popen. Raises ConfigError if there is no such program."""
    try:
        return subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    except OSError as error:
        raise host_error(error) or ConfigError(f"the command cannot be started: {error}") from error


def run_within(seconds: float, command: Sequence[str], **streams: Any) -> int | None:
    """Run a command. Return its exit code, or None after the time. No process that it started survives."""
    process = start(command, **streams)
    try:
        in_time = has_ended(process, seconds)
    finally:
        kill_tree(process.pid)
        process.wait()
    return process.returncode if in_time else None


class ChildProcess:
    """A process that runs ``main(descriptor, parent)`` of a module, at the other end of ``channel``.

    opening: the first bytes it receives. printed: gets its output. The process has a separate session and ends with the
    thread that started it.
    """

    def __init__(self, module: str, opening: bytes, printed: Printed) -> None:
        self.channel, far_end = socket.socketpair()
        # Receives the interpreter's first messages and faulthandler's output. The child soon redirects stderr to the
        # pipe, so that prints do not fill this file.
        self._crash_log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._printed, self._folder = printed, tempfile.mkdtemp(prefix="rltrain_programs_")
        printed.renew()
        with far_end:
            code = _COMMAND.format(path=sys.path, module=module, fd=far_end.fileno(), parent=os.getpid())
            self._process = start(
                [sys.executable, "-c", code], slot_environment() | {PROGRAMS_FOLDER: self._folder},
                stdin=subprocess.DEVNULL, stdout=printed.writer, stderr=self._crash_log, pass_fds=[far_end.fileno()],
            )  # fmt: skip
        self.channel.settimeout(START_TIMEOUT_S)
        with suppress(OSError):  # the reader of the channel notices how the process ended
            self.channel.sendall(opening)

    @property
    def pid(self) -> int:
        """Process id of the subreaper above the process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return has_ended(self._process)

    def end(self) -> tuple[str, bool]:
        """Close the process. Return a phrase on how it had ended, and True for SIGKILL or SIGTERM."""
        in_time = has_ended(self._process, _END_S)
        self._crash_log.seek(0)
        last_words = self._crash_log.read(_LAST_CHARS).decode(errors="replace").strip()
        self.close()
        code = self._process.returncode
        if not in_time:
            return " closed the connection to its process", False
        number = next((number.name for number in signal.Signals if number == -code), f"signal {-code}")
        how = f"'s process ended with exit code {code}" if code >= 0 else f"'s process was killed by {number}"
        return how + (f":\n{last_words}" if last_words else ""), code in (-signal.SIGKILL, -signal.SIGTERM)

    def close(self) -> None:
        """End the process and its descendants now."""
        if self.channel.fileno() < 0:
            return
        self.channel.close()
        send([self._process.pid], signal.SIGTERM)
        has_ended(self._process, _END_S)
        # The tree is killed before `wait`, because once the process is reaped, its id may belong to another process.
        kill_tree(self._process.pid)
        self._process.wait()
        remove_folder(self._folder)  # again, because the subreaper may have been killed before it was done
        self._printed.drain()  # read its last output
        self._printed.close()
        self._crash_log.close()
