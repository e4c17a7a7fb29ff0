"""``python -m rltrain.supervise -- COMMAND``: run a command again for as long as that may help.

Problem: in a week something ends a run that only has to be typed again (exit code 75, a kill), and nobody is there to
type it. Choice: a small parent process of the standard library alone, which is no part of the run, so that nothing that
ends the run ends it. It adopts what the command leaves behind, because Ray's processes may still hold devices, and ends
it. The run tells its pid, its folder and its error through a file. Left out: watching a run that is alive, which has
deadlines of its own, and starting processes on other nodes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from rltrain.base.env import ATTEMPT, told_supervisor
from rltrain.base.errors import ConfigError, command

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
WITHOUT_A_WORD = "the program has ended without a word (exit code 1)"
_AGAIN = 75
# Waiting doubles while no checkpoint is made, up to this.
_MAX_WAIT_S = 300.0
# How long what the command has left behind may take to end by itself.
_LEAVE_S = 5.0
# What outlives even SIGKILL for so long waits in the kernel for storage or a driver.
_LEFT_S = 60.0
_POLL_S = 0.1
# Storage and nodes may be away for so long: until then that is no crash loop.
_AWAY_S = 1800.0
# So many times --give-up ends without a new checkpoint, at whatever steps, are a crash loop too.
_IN_VAIN = 3
# Linux: processes whose parent has ended become children of this one, and not of the first process of the machine.
_PR_SET_CHILD_SUBREAPER = 36
# More than one line of metrics.
_TAIL_BYTES = 1 << 18


@dataclass
class Attempt:
    """How one start of the command has ended; a line of attempts.jsonl."""

    attempt: int
    started: str
    seconds: float
    exit_code: int
    """As a shell gives it: 128 and the number of the signal that has killed it."""
    step: int | None
    """The last that has metrics; None where no run folder is known."""
    cause: str
    """First line of the error; empty where the program has told of itself, but not of an error."""
    checkpoint: int | None = None
    """The newest there is (0: none, so that the command starts anew); None where no run folder is known."""
    passing: bool = False
    """Waiting may mend the cause."""
    uptime: float = 0.0
    """Of the machine, when it ended."""
    then: str = ""
    """What the supervisor does about it."""

    @property
    def kept(self) -> str:
        """What of its steps is saved."""
        if not self.step or self.checkpoint is None or self.checkpoint >= self.step:
            return ""
        steps = f"step {self.step} is" if self.step == self.checkpoint + 1 else (
            f"steps {self.checkpoint + 1} to {self.step} are"
        )  # fmt: skip
        return f" ({'nothing is saved: ' * (not self.checkpoint)}{steps} lost)"

    def same_as(self, other: Attempt, place: str = "step") -> bool:
        """Whether it got no further than another attempt (in steps or ``checkpoint``), and ended by the same cause."""
        # Pids and times differ between two ends of one cause.
        cause, other_cause = (re.sub(r"\d+", "0", attempt.cause) for attempt in (self, other))
        # Nodes other than the head know neither; the head decides for them.
        is_known = bool(self.cause) or self.step is not None
        at, other_at = getattr(self, place), getattr(other, place)
        return is_known and (at, self.exit_code, cause) == (other_at, other.exit_code, other_cause)


class Supervisor:
    """Runs ``words`` until they end for good, or ``max_restarts`` restarts are used up, or ``give_up`` attempts in a
    row end at the same step by the same cause (or `_IN_VAIN` times as many without a new checkpoint)."""

    def __init__(self, words: list[str], max_restarts: int, wait_s: float, give_up: int) -> None:
        self._words, self._max_restarts, self._wait_s, self._give_up = words, max_restarts, wait_s, give_up
        self._attempts: list[Attempt] = []
        self._file = Path(tempfile.mkdtemp(prefix="rltrain_attempt_")) / "told"
        self._folder: Path | None = None
        self._written = 0
        self._child: subprocess.Popen[bytes] | None = None
        # The signal that asks for an end.
        self._asked = 0

    def run(self) -> int:
        """Returns the exit code of the last attempt."""
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # one that was ignored (nohup) stays so
                signal.signal(number, self._hand_on)
        try:
            while True:
                last = self._attempt()
                self._attempts.append(last)
                verdict, wait_s = self._verdict(), self._waiting()
                last.then = verdict or f"again in {wait_s:.0f} s"
                self._tell(last)
                if verdict:
                    return last.exit_code
                self._pause(wait_s)
                if self._asked:
                    _say(f"stopped by {signal.Signals(self._asked).name} before attempt {last.attempt + 1}")
                    return 130 if self._asked == signal.SIGINT else _AGAIN
        finally:
            shutil.rmtree(self._file.parent, ignore_errors=True)

    def _attempt(self) -> Attempt:
        with suppress(OSError):  # without it the cause is not known, and no more
            # Machines clean their temporary folders of what is older than some days.
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_text("", encoding="utf-8")
        started, clock = time.strftime("%Y-%m-%d %H:%M:%S"), time.monotonic()
        environment = os.environ | {ATTEMPT: str(self._file)}
        try:
            # A group of its own: a terminal would send Ctrl-C to the run too, which `_hand_on` does already.
            self._child = subprocess.Popen(self._words, env=environment, start_new_session=True)
        except OSError as error:
            raise ConfigError(f"the command cannot be started: {error}") from error
        if self._asked:  # by a signal that came while it was started
            self._hand_on(self._asked, None)
        code = self._wait_for(self._child)
        self._child = None
        if code:
            self._end_what_is_left()
        report = self._told()
        if "folder" in report:
            self._folder = Path(report["folder"])
        code, cause = interpret_exit(code, report)
        cause = cause.partition("\n")[0]
        if code > 128 and not cause:
            with suppress(ValueError):
                cause = f"killed by {signal.Signals(code - 128).name}"
        if code and not report["pids"] and not cause:
            cause = "the command has told the supervisor nothing"
        # A run that was killed by the signal that we have handed on has stopped as it was asked to.
        code = _AGAIN if code == 128 + signal.SIGTERM and self._asked else code
        return Attempt(
            len(self._attempts) + 1, started, round(time.monotonic() - clock, 1), code, self._step(), cause,
            self._checkpoint(), bool(report.get("passing")), time.monotonic(),
        )  # fmt: skip

    def _wait_for(self, child: subprocess.Popen[bytes]) -> int:
        pid = 0
        while pid != child.pid:
            # All children: the first process of a container has to bury those that it has adopted.
            pid, status = os.waitpid(-1, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        return child.returncode if child.returncode >= 0 else 128 - child.returncode

    def _verdict(self) -> str:
        """Why the command is not run again, or nothing."""
        last, code = self._attempts[-1], self._attempts[-1].exit_code
        if code == 0:
            return "finished"
        if self._asked:
            return f"stopped by {signal.Signals(self._asked).name}"
        if self._told().get("stopped"):
            return "stopped: another node was asked to"
        if code != _AGAIN and (code <= 128 or code == 128 + signal.SIGINT):
            return "stopped: running it again would not help"
        step = "before its first step" if last.step is None else f"at step {last.step}"
        rules = ("step", step, self._give_up), ("checkpoint", "without a new checkpoint", _IN_VAIN * self._give_up)
        for place, where, most in rules:
            loop = list(takewhile(partial(last.same_as, place=place), reversed(self._attempts)))
            if len(loop) >= most and not (last.passing and last.uptime - loop[-1].uptime < _AWAY_S):
                return f"stopped: it has ended {len(loop)} times {where} by the same cause, which needs mending first"
        if len(self._attempts) > self._max_restarts:
            return f"stopped: {self._max_restarts} restarts are used up (--max-restarts)"
        return ""

    def _waiting(self) -> float:
        """Seconds until the next attempt."""
        # Steps that no checkpoint holds are made again.
        saved = [attempt.checkpoint or 0 for attempt in self._attempts]
        in_vain = 0
        while in_vain < len(saved) - 1 and saved[-1 - in_vain] <= max(saved[: -1 - in_vain]):
            in_vain += 1
        return min(self._wait_s * 2**in_vain, max(self._wait_s, _MAX_WAIT_S))

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._asked and time.monotonic() < until:
            time.sleep(min(_POLL_S, seconds))

    def _hand_on(self, number: int, _frame: object) -> None:
        """The signal handler. The run gets the signal, and not its whole group: Ray's processes, which have to live
        until it has saved, are of the same group."""
        runs = [pid for pid in self._told().get("pids", ()) if _is_below(pid, os.getpid())]
        if number == signal.SIGUSR1:
            # It would kill a program that does not listen to it, such as the shell around the run.
            for run in runs:
                if _catches(run, number):
                    os.kill(run, number)
            return
        self._asked = number
        if self._child:
            with suppress(ProcessLookupError):
                # A terminal that is closed takes nothing with it: the run saves.
                os.kill(runs[0] if runs else self._child.pid, signal.SIGTERM if number == signal.SIGHUP else number)

    def _told(self) -> dict[str, Any]:
        return told_supervisor(self._file)

    def _step(self) -> int | None:
        if not self._folder:
            return None
        with suppress(OSError), open(self._folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            for line in reversed(file.read().splitlines()):
                with suppress(ValueError, KeyError, TypeError):
                    return int(json.loads(line)["step"])
        return 0

    def _checkpoint(self) -> int | None:
        if not self._folder:
            return None
        try:
            matches = [re.fullmatch(r"global_step_(\d+)", name) for name in os.listdir(self._folder)]
        except OSError:  # as before
            return self._attempts[-1].checkpoint if self._attempts else None
        return max((int(match[1]) for match in matches if match), default=0)

    def _tell(self, last: Attempt) -> None:
        code = last.exit_code
        end = "finished" if code == 0 else f"ended with exit code {code}"
        step = "" if last.step is None else f" at step {last.step}{last.kept * bool(code)}"
        cause = f": {last.cause}" if last.cause else ""
        _say(f"attempt {last.attempt} {end} after {last.seconds:.0f} s{step}{cause}" + f" | {last.then}" * bool(code))
        if not self._folder:
            return
        try:
            with open(self._folder / "attempts.jsonl", "a", encoding="utf-8") as file:
                # With those of before, where the run had not got as far as its folder.
                for attempt in self._attempts[self._written :]:
                    file.write(json.dumps(asdict(attempt)) + "\n")
            self._written = len(self._attempts)
        except OSError as error:
            _say(f"{self._folder / 'attempts.jsonl'} cannot be written: {error}")

    def _end_what_is_left(self) -> None:
        """End what the command has left behind: it may hold devices, ports and the run folder."""
        started = time.monotonic()
        while left := _below(os.getpid()):
            waited = time.monotonic() - started
            if waited > (2 * _LEAVE_S if self._asked else _LEFT_S):
                # It never runs another line of its own. What it still holds, the next attempt says by itself.
                pids = ", ".join(map(str, left))
                _say(f"these do not end by SIGKILL (stuck storage or driver?) and are left: pid {pids}")
                return
            for pid in left if waited > _LEAVE_S else ():
                with suppress(OSError):  # it is gone, or another user's
                    os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(_POLL_S)


def interpret_exit(code: int, told: dict[str, Any]) -> tuple[int, str]:
    """Exit code and cause of a program that has ended with ``code``. A library may have ended it below Python with
    another than it was about to end with, as Ray does where its own processes are gone."""
    cause = str(told.get("error", ""))
    if code != 1 or not told["pids"] or "ended" in told:
        return code, cause
    return (told.get("ends", code), cause) if cause else (_AGAIN, WITHOUT_A_WORD)


def _parents() -> dict[int, int]:
    """The parent of every process."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(process.parent.name)] = int(process.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    return parents


def _below(top: int) -> list[int]:
    """Processes that descend from ``top``."""
    parents = _parents()
    return [pid for pid in parents if _leads_to(top, pid, parents)]


def _is_below(pid: int, top: int) -> bool:
    return bool(pid) and _leads_to(top, pid, _parents())


def _leads_to(top: int, pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == top:
            return True
    return False


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with suppress(OSError):
        match = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text("utf-8", "replace"), re.MULTILINE)
        return bool(match and int(match[1], 16) >> (number - 1) & 1)
    return False


def _say(text: str) -> None:
    # A terminal that is gone must not end the supervision.
    with suppress(OSError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} supervise: {text}\n")
        sys.stderr.flush()


@command
def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        usage="python -m rltrain.supervise [OPTION ...] -- COMMAND ...", allow_abbrev=False,
        description="Runs COMMAND again when it ends with exit code 75 (try again) or is killed by a signal. Ends with "
        "its exit code; SIGTERM and SIGINT (it saves and ends) and SIGUSR1 (it saves) are handed on to it.",
    )  # fmt: skip
    parser.add_argument(
        "--max-restarts", type=_at_least(0, int), default=50, metavar="N", help="run it again so often at most (50)"
    )
    parser.add_argument(
        "--wait-s", type=_at_least(0, float), default=10.0, metavar="S",
        help="seconds before a restart, doubled while attempts make no new checkpoint, up to 300 (10)",
    )  # fmt: skip
    parser.add_argument(
        "--give-up", type=_at_least(2, int), default=3, metavar="K",
        help="stop after K ends in a row at the same step by the same cause, or 3 K without a new checkpoint (3)",
    )  # fmt: skip
    options = parser.parse_args(words[:at])
    if not words[at + 1 :]:
        parser.error("say the command behind --, for example: -- python -m rltrain.main_ppo key=value ...")
    return Supervisor(words[at + 1 :], options.max_restarts, options.wait_s, options.give_up).run()


def _at_least(least: int, kind: type[int] | type[float]) -> Any:
    def number(word: str) -> float:
        with suppress(ValueError):
            if (value := kind(word)) >= least:
                return value
        raise argparse.ArgumentTypeError(f"{word} is no {'whole ' * (kind is int)}number from {least} on")

    return number


if __name__ == "__main__":
    sys.exit(main())
