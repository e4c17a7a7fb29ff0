"""Every error rltrain raises on purpose.

RltrainError                  exit code
├── ConfigError               2     a key, a value, or two keys that contradict each other
├── DataError                 2     a file, row or field that cannot be used
├── RewardError               2     a reward function that is missing, wrong, or failing on most answers
├── CheckpointError           2     a checkpoint that is incomplete, damaged, or of another run
├── NonFiniteError            70    NaN or infinity in a loss, gradient or reward
├── DiskError                 74    not enough space, or a write that the system refuses
├── WorkerError               1     a worker raised: ours to fix, or the user's own code
├── SyncError                 75    the rollout engine does not have the trainer's weights: safe to run again
├── AgentError                75    tools, environments or agents fail, not the policy: safe to run again
│   └── AgentBug              1     an exception of the agent's own code ended every trajectory: it would come again
├── JudgeError                75    a judge that does not answer, or whose replies are no scores: safe to run again
├── StorageError              75    storage that does not answer now, to a read or a write: safe to run again
├── WorkerLost                75    a worker process or node is gone, hung or out of memory: safe to run again
│   └── NodesMissing          75    nodes or devices that were waited for in vain: they may come
└── Interrupted               75    stopped by SIGTERM, 130 by Ctrl-C (SIGINT): not finished, the same command goes on
"""

import errno
import io
import re
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from rltrain.base.attempt import tell_supervisor
from rltrain.base.secrets import masked_text

# What the system says where it does not get through to storage, network storage above all. All else it says of a write,
# such as that there is no space, would be said again.
_NO_ANSWER = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ENETRESET, errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ESHUTDOWN,
    errno.EPIPE, errno.EAGAIN, errno.EINTR, errno.ENXIO, errno.ENODEV,
    *(getattr(errno, name) for name in ("EREMOTEIO", "ECOMM", "ENOLINK") if hasattr(errno, name)),  # not on macOS
}  # fmt: skip
# Only files raise these. The next ones concern a file if the error has a file name.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
_NOT_GIVEN = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR}
# As Ray, the C library, torch, Python, C++, the loader of libraries and Pillow say it.
_NO_HOST_MEMORY = (
    "low on memory", "cannot allocate memory", "can't allocate memory", "not enough memory", "memoryerror", "bad_alloc",
    "mmap error", "failed to map segment", "out of memory error when reading",
)  # fmt: skip
# What it then does stands in the last line (`Stop.kept`).
AGAIN = "Run the same command again."
# C0 and C1 but for tab and line feed; line and paragraph separators; embeddings, overrides and isolates of direction.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class RltrainError(Exception):
    """Base class. ``str(error)`` is the whole message a user sees: what is wrong, where, and what to type."""

    exit_code = 1
    passing = False
    """Whether waiting may mend it."""

    def __str__(self) -> str:
        return masked_text(super().__str__())


class ConfigError(RltrainError):
    """One or more configuration problems, reported together."""

    exit_code = 2


class DataError(RltrainError):
    """Input data that cannot be trained on."""

    exit_code = 2


class RewardError(RltrainError):
    """A reward function that cannot be loaded or fails on most answers."""

    exit_code = 2


class CheckpointError(RltrainError):
    """A checkpoint that cannot be loaded as asked."""

    exit_code = 2


class NonFiniteError(RltrainError):
    """A loss, gradient or reward is NaN or infinite; no optimizer step was made from it."""

    exit_code = 70


class DiskError(RltrainError):
    """A file could not be written, and will not be as things are."""

    exit_code = 74


class WorkerError(RltrainError):
    """A worker raised an exception; the message carries role, rank and the worker's traceback."""

    exit_code = 1


class WorkerLost(RltrainError):
    """A worker process died, hung or ran out of memory."""

    exit_code = 75


class NodesMissing(WorkerLost):
    """Nodes or devices are not there, or not yet."""

    passing = True


class StorageError(RltrainError):
    """Storage does not let a file be read or written; nothing is known of the file itself."""

    exit_code = 75
    passing = True


class SyncError(RltrainError):
    """The rollout engine does not compute with the trainer's weights. A new process, which starts a new engine, may."""

    exit_code = 75


class AgentError(RltrainError):
    """Most trajectories of a step could not go on: what runs tools, environments or agents does not work now."""

    exit_code = 75


class AgentBug(AgentError):
    """An exception of the agent's own code ended every trajectory of a step."""

    exit_code = 1


class JudgeError(RltrainError):
    """The judge (``reward.judge.url``) does not answer now, or its replies to most answers of a step are no scores."""

    exit_code = 75


class Interrupted(RltrainError):
    """Stopped by a signal. 130 after Ctrl-C; 75 after SIGTERM, whose sender may start the run again."""

    def __init__(self, message: str, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def storable(text: str) -> str:
    """``text`` that every file takes: half of a surrogate pair, as JSON that was cut has it, is replaced."""
    # A pair whose halves came one by one is one sign again.
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def plain(text: str) -> str:
    """Return ``text`` for a terminal: text of a model or of data may hold sequences that steer one."""
    return _CONTROLS.sub("\ufffd", storable(text))


class PlainOutput:
    """Standard output or error of a command: everything that is written is `plain`, and on standard error masked.

    rich writes its own sequences, and looks for this attribute to find the stream inside; `logs.PlainConsole` makes its
    texts plain. Progress bars of libraries begin what they write to standard error with a carriage return, which stays.
    """

    def __init__(self, stream: Any, is_error: bool = False) -> None:
        self.rich_proxied_file, self._is_error = stream, is_error

    def write(self, text: str) -> int:
        """See `io.TextIOBase`."""
        start = text[:1] if self._is_error and text[:1] == "\r" else ""
        shown = masked_text(text) if self._is_error else text
        self.rich_proxied_file.write(start + plain(shown[len(start) :]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """See `io.IOBase`."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def lenient_output() -> None:
    """Have standard output and error show a sign that their encoding lacks as an escape: by itself Python raises, and
    what a model writes would end the program. Both become `PlainOutput`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # Without it a program has put something of its own there.
        if isinstance(stream, PlainOutput) or not hasattr(stream, "reconfigure"):
            continue
        try:
            stream.reconfigure(errors="backslashreplace")
        except OSError:
            # The descriptor leads elsewhere since Python started (dup2), from a file into a pipe, which has no place.
            raw = io.FileIO(stream.fileno(), "w", closefd=False)
            stream = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, PlainOutput(stream, is_error=name == "stderr"))


def unwritten(what: str, cause: BaseException, way_out: Callable[[], str] | None = None) -> DiskError | StorageError:
    """The error to raise of a file that could not be written, as ``what`` says: StorageError where storage is away.

    way_out(): what a user shall do about the disk.
    """
    if isinstance(cause, StorageError) or (isinstance(cause, OSError) and cause.errno in _NO_ANSWER):
        then = ". The storage does not answer: see to it, and run the same command again." if way_out else ""
        return StorageError(what + then)
    return DiskError(f"{what}. {way_out()}" if way_out else what)


def lacks_memory(error: BaseException, said: str = "") -> bool:
    """Whether a host, and not a device, has had no memory for what has failed. said: what else is known of it."""
    text = f"{error} {said}".lower()
    return isinstance(error, MemoryError) or any(words in text for words in _NO_HOST_MEMORY)


def no_memory(told: str) -> str:
    """The beginning of a sentence about a host that has no memory left."""
    return f"the host has no memory left: {told}. Give it (or the container) more, end other programs there"


def host_error(error: BaseException) -> RltrainError | None:
    """The error to tell where this host has no memory left, or its storage gives no answer: what was read may be as it
    should. None of any other."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, RltrainError):
        return None
    if lacks_memory(error):
        limit = "or raise its limit (ulimit -v), and run the same command again."
        return WorkerLost(f"{no_memory(first_line(error).rstrip('.'))}, {limit}")
    if number in (errno.EIO, errno.ESTALE) or (number in _NO_ANSWER and _names_file(error)):
        return unwritten(first_line(error), error, lambda: "")
    return None


def system_error(error: BaseException) -> RltrainError | None:
    """`host_error`, and the error to tell where the system refuses a file."""
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL or (number in _NOT_GIVEN and _names_file(error)):
        return DiskError(f"{first_line(error)}. Mend that, and run the same command again.")
    return host_error(error)


def _names_file(error: BaseException) -> bool:
    return getattr(error, "filename", None) is not None


def first_line(error: BaseException) -> str:
    """Of its text; the name of its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip()


def short(value: object, most: int = 100) -> str:
    """The text of a value, in the middle of a sentence: its beginning where it is long. Values may be megabytes."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def command(main: Callable[[list[str] | None], int]) -> Callable[..., int]:
    """Decorator of a program's ``main(argv)``: an RltrainError is printed, and its exit code returned; so is what
    `system_error` makes of another."""

    @wraps(main)
    def guarded(argv: list[str] | None = None) -> int:
        lenient_output()
        try:
            return main(argv)
        except Exception as failure:
            error = failure if isinstance(failure, RltrainError) else system_error(failure)
            if not error:
                raise
            tell_supervisor(error=str(error), passing=error.passing)
            sys.stderr.write(f"error: {error}\n")
            return error.exit_code

    return guarded
