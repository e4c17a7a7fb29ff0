"""Supervisor, ``python -m rltrain.supervise -- COMMAND``: restart a command after exit code 75 or death by a signal.

It is a small parent process that uses only the standard library and is not part of the run, so that errors of the run
cannot end it. It adopts and ends leftover processes of the command, because Ray's processes may still hold devices. The
run reports its pid, its folder and its error through a file (`common.attempt.report_to_supervisor`). It does not
monitor a live run, which has deadlines, or processes on other nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from rltrain.common.attempt import ATTEMPT, interpret_exit, read_reports, shell_code
from rltrain.common.clock import SYSTEM, Clock
from rltrain.common.errors import command
from rltrain.runtime.slots.limits import adopt_orphans, send
from rltrain.runtime.slots.proc import catches, descendants
from rltrain.runtime.slots.process import start

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_AGAIN = 75
# The wait doubles while no checkpoint is written, up to the second value.
_POLL_S, _MAX_WAIT_S = 0.1, 300.0
# Seconds until leftover processes are killed, and until they are reported. A process that survives SIGKILL for that
# long waits in the kernel for storage or a driver.
_LEAVE_S, _LEFT_S = 5.0, 60.0
# Seconds that storage and nodes may be unavailable before repeated failures by that cause count as a crash loop.
_AWAY_S = 1800.0


@dataclass
class Attempt:
    """One start of the command, as a line of attempts.jsonl."""

    attempt: int
    started: str
    seconds: float
    exit_code: int
    """Exit code as reported by a shell: 128 plus the number of the signal that killed it."""
    step: int | None
    """Newest step with metrics; None if no run folder is known."""
    checkpoint: int | None
    """Newest checkpoint (0: none); None if no run folder is known."""
    cause: str
    """First line of the error; empty if the program reported itself but no error."""
    passing: bool
    """True if waiting may resolve the cause."""
    uptime: float
    """Uptime of the machine at the end of the command."""
    then: str = ""
    """Decision of the supervisor."""


class Supervisor:
    """Loop that runs ``command`` until an attempt is final or the restarts are used up.

    It also ends after ``give_up`` consecutive attempts with the same cause and no new checkpoint. file: the commands
    report through it.
    """

    def __init__(self, command: list[str], options: argparse.Namespace, file: Path, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._command, self._options, self._file = command, options, file
        self._attempts: list[Attempt] = []
        self._folder: Path | None = None
        # Pid of the running command, the signal that requested a stop, and the lines in attempts.jsonl.
        self._child = self._stop_signal = self._num_written = 0

    def run(self) -> int:
        """Return the exit code of the last attempt."""
        adopt_orphans()
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # an ignored signal (nohup) stays ignored
                signal.signal(number, self._forward_signal)
        while True:
            self._attempts.append(last := self._attempt())
            reason_to_stop, wait_s = self._reason_to_stop(), self._options.wait_s
            wait_s = min(wait_s * 2 ** (len(stalled(self._attempts)) - 1), max(wait_s, _MAX_WAIT_S))
            last.then = reason_to_stop or f"again in {wait_s:.0f} s"
            self._report(last)
            if reason_to_stop:
                return last.exit_code
            if self._clock.poll(lambda: self._stop_signal, wait_s, min(_POLL_S, wait_s)):
                _say(f"stopped by {signal.Signals(self._stop_signal).name} before attempt {last.attempt + 1}")
                return 130 if self._stop_signal == signal.SIGINT else _AGAIN

    def _attempt(self) -> Attempt:
        # Create the folder again, because temporary folders may be cleaned up after some days. If it fails, only the
        # cause is unknown.
        with suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_text("", encoding="utf-8")
        started, clock = time.strftime("%Y-%m-%d %H:%M:%S"), self._clock.monotonic()
        environment = os.environ | {ATTEMPT: str(self._file)}
        # The command has a separate session, so it gets Ctrl-C only from `_forward_signal`.
        process = start(self._command, environment)
        self._child = process.pid
        if self._stop_signal:  # a signal arrived during the start
            self._forward_signal(self._stop_signal, None)
        pid = 0
        while pid != process.pid:  # the first process of a container must reap adopted processes
            pid, status = os.waitpid(-1, 0)
        self._child, process.returncode = 0, os.waitstatus_to_exitcode(status)
        if status:
            self._end_processes_left_behind()
        report = read_reports(self._file)
        self._folder = Path(report["folder"]) if "folder" in report else self._folder
        code, cause = interpret_exit(shell_code(process.returncode), report)
        if code > 128 and not cause:
            with suppress(ValueError):
                cause = f"killed by {signal.Signals(code - 128).name}"
        if code and not report["pids"] and not cause:
            cause = "the command has not reported a cause"
        # A run killed by the forwarded signal has stopped as requested.
        code = _AGAIN if code == 128 + signal.SIGTERM and self._stop_signal else code
        return Attempt(
            len(self._attempts) + 1, started, round(self._clock.monotonic() - clock, 1), code, *self._progress(),
            cause.partition("\n")[0], bool(report.get("passing")), self._clock.monotonic(),
        )  # fmt: skip

    def _reason_to_stop(self) -> str:
        """Return the reason not to restart; empty to restart."""
        code = self._attempts[-1].exit_code
        if code == 0:
            return "finished"
        if self._stop_signal:
            return f"stopped by {signal.Signals(self._stop_signal).name}"
        if read_reports(self._file).get("stopped"):
            return "stopped: requested on another node"
        if code != _AGAIN and (code <= 128 or code == 128 + signal.SIGINT):
            return "stopped: a restart would not help"
        if loop := crash_loop(self._attempts, self._options.give_up):
            return f"stopped: {loop}"
        most = self._options.max_restarts
        return f"stopped: {most} restarts are used up (--max-restarts)" if len(self._attempts) > most else ""

    def _forward_signal(self, number: int, _frame: object) -> None:
        """Send a signal to the run, but not to its group: Ray's processes in it must live until the run has saved."""
        below = descendants(os.getpid())
        runs = [pid for pid in read_reports(self._file)["pids"] if pid in below]
        if number == signal.SIGUSR1:  # it would kill a program without a handler, such as a shell
            send((pid for pid in runs if catches(pid, number)), number)
            return
        self._stop_signal = number
        # A closed terminal must not kill the run, which saves.
        send(runs[:1] or [self._child] * bool(self._child), signal.SIGTERM if number == signal.SIGHUP else number)

    def _progress(self) -> tuple[int | None, int | None]:
        """Return the newest step with metrics and the newest checkpoint. Unreachable storage: the earlier values."""
        if not self._folder:
            return None, None
        step, checkpoint = 0, self._attempts[-1].checkpoint if self._attempts else None
        with suppress(OSError, IndexError):
            lines = (self._folder / "metrics.jsonl").read_text("utf-8", "replace")
            # An incomplete line was truncated when the run was killed.
            step = int(re.findall(r'^\{"step": ?(\d+).*\}$', lines, re.MULTILINE)[-1])
        with suppress(OSError):
            matches = [re.fullmatch(r"global_step_(\d+)", name) for name in os.listdir(self._folder)]
            checkpoint = max((int(match[1]) for match in matches if match), default=0)
        return step, checkpoint

    def _report(self, last: Attempt) -> None:
        code = last.exit_code
        end = f"ended with exit code {code}" if code else "finished"
        step = "" if last.step is None else f" at step {last.step} (newest checkpoint: {last.checkpoint or 'none'})"
        cause = f": {last.cause}" if last.cause else ""
        _say(f"attempt {last.attempt} {end} after {last.seconds:.0f} s{step}{cause}" + f" | {last.then}" * bool(code))
        try:
            if self._folder:
                with open(self._folder / "attempts.jsonl", "a", encoding="utf-8") as file:
                    # Includes earlier attempts that ended before the run had a folder.
                    file.writelines(json.dumps(asdict(end)) + "\n" for end in self._attempts[self._num_written :])
                self._num_written = len(self._attempts)
        except OSError as error:
            _say(f"{self._folder}/attempts.jsonl cannot be written: {error}")

    def _end_processes_left_behind(self) -> None:
        """End the processes that the command has left: they may hold devices, ports and the run folder."""
        started = self._clock.monotonic()
        while left := descendants(os.getpid()):
            waited = self._clock.monotonic() - started
            if waited > (2 * _LEAVE_S if self._stop_signal else _LEFT_S):
                # They run no more code. The next attempt reports devices that they still hold.
                pids = ", ".join(map(str, left))
                _say(f"these processes survived SIGKILL (storage or driver hangs?): pid {pids}")
                return
            send(left if waited > _LEAVE_S else (), signal.SIGKILL)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            self._clock.sleep(_POLL_S)


def stalled(attempts: list[Attempt]) -> list[Attempt]:
    """Return the newest attempts, starting with the one that wrote the newest checkpoint."""
    saved = [attempt.checkpoint or 0 for attempt in attempts]
    return attempts[max((i for i in range(1, len(saved)) if saved[i] > max(saved[:i])), default=0) :]


def crash_loop(attempts: list[Attempt], give_up: int) -> str:
    """Return the reason to stop if the newest attempts have the same cause and no new checkpoint; else ""."""
    # Ignore digits: pids and times differ between two ends with the same cause.
    ends = [(end.exit_code, re.sub(r"\d+", "0", end.cause)) for end in stalled(attempts)]
    number, last = len(list(takewhile(ends[-1].__eq__, reversed(ends)))), attempts[-1]
    may_pass = last.passing and last.uptime - attempts[-number].uptime < _AWAY_S
    # Nodes other than the head know neither step nor cause, so the head decides for them.
    if number < give_up or may_pass or (last.step is None and not last.cause):
        return ""
    return f"it ended {number} times with the same cause and no new checkpoint. Fix the cause first"


def _say(text: str) -> None:
    with suppress(OSError):  # a closed terminal must not end the supervisor
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} supervise: {text}\n")
        sys.stderr.flush()


@command
def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        usage="rltrain supervise [OPTION ...] -- COMMAND ...", allow_abbrev=False,
        description="Run COMMAND, and again if it ends with exit code 75 (try again) or is killed by a signal. The "
        "exit code is its last one. SIGTERM and SIGINT (save and end) and SIGUSR1 (save) are passed on to it.",
    )  # fmt: skip
    add = parser.add_argument
    add("--max-restarts", type=int, default=50, metavar="N", help="maximum number of restarts (50)")
    wait = "seconds before a restart, doubled while attempts make no new checkpoint, up to 300 (10)"
    add("--wait-s", type=float, default=10.0, metavar="S", help=wait)
    give_up = "stop after K consecutive ends with the same cause and no new checkpoint (5)"
    add("--give-up", type=int, default=5, metavar="K", help=give_up)
    options = parser.parse_args(arguments[:separator])
    for name, least in (("max_restarts", 0), ("wait_s", 0), ("give_up", 2)):
        if not getattr(options, name) >= least:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: it must be at least {least}")
    if not arguments[separator + 1 :]:
        parser.error("give the command after --, for example: -- python -m rltrain.main_ppo key=value ...")
    with tempfile.TemporaryDirectory(prefix="rltrain_attempt_", ignore_cleanup_errors=True) as folder:
        return Supervisor(arguments[separator + 1 :], options, Path(folder) / "reports").run()


if __name__ == "__main__":
    sys.exit(main())
