"""All errors that rltrain raises on purpose.

RltrainError                  exit code
├── ConfigError               2     a key, a value, or two keys that contradict each other
├── DataError                 2     a file, row or field that cannot be used
├── RewardError               2     a reward function that is missing, wrong, or failing on most responses
├── CheckpointError           2     a checkpoint that is incomplete, damaged, or of another run
├── NonFiniteError            70    NaN or infinity in a loss, gradient or reward
├── DiskError                 74    not enough space, or a write that the system refuses
├── WorkerError               1     a worker raised: a bug in rltrain or in the user's code
├── SyncError                 75    the rollout engine does not have the trainer's weights: safe to run again
├── AgentError                75    tools, environments or agents fail, not the policy: safe to run again
│   └── AgentBug              1     an exception in the agent's code ended every trajectory, and would occur again
├── JudgeError                75    a judge that does not reply, or whose replies are not scores: safe to run again
├── StorageError              75    storage that does not respond to a read or a write: safe to run again
├── WorkerLost                75    a worker process or node is gone, hung or out of memory: safe to run again
│   └── NodesMissing          75    a timeout of waiting for nodes or devices: they may still join
└── Interrupted               75    stopped by SIGTERM, 130 by Ctrl-C (SIGINT): the same command resumes the run
"""

import errno
import io
import re
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from rltrain.common.attempt import report_to_supervisor
from rltrain.common.secrets import masked_text

# Errors of storage that cannot be reached, mostly network storage. Other write errors, such as a full disk, would occur
# again on a retry.
_NO_ANSWER = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ENETRESET, errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ESHUTDOWN,
    errno.EPIPE, errno.EAGAIN, errno.EINTR, errno.ENXIO, errno.ENODEV,
    *(getattr(errno, name) for name in ("EREMOTEIO", "ECOMM", "ENOLINK") if hasattr(errno, name)),  # not on macOS
}  # fmt: skip
# Error numbers that only file operations raise (`_FULL`). An error with a number in `_NOT_GIVEN` concerns a file only
# if it has a file name.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
_NOT_GIVEN = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR}
# Messages of Ray, the C library, torch, Python, C++, the library loader and Pillow.
_NO_HOST_MEMORY = (
    "low on memory", "cannot allocate memory", "can't allocate memory", "not enough memory", "memoryerror", "bad_alloc",
    "mmap error", "failed to map segment", "out of memory error when reading",
)  # fmt: skip
# Advice in messages. The last line of a run's error names the step from which a rerun continues (`Stop.kept`).
AGAIN = "Run the same command again."
# C0 and C1 except tab and line feed; line and paragraph separators; direction embeddings, overrides and isolates.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class RltrainError(Exception):
    """Base class. ``str(error)`` is the complete user message: the problem, its location, and the fix."""

    exit_code = 1
    passing = False
    """True if the problem may disappear while the program waits."""

    def __str__(self) -> str:
        return masked_text(super().__str__())


class ConfigError(RltrainError):
    """One or more configuration problems, reported together."""

    exit_code = 2


class DataError(RltrainError):
    """Input data that cannot be trained on."""

    exit_code = 2


class RewardError(RltrainError):
    """A reward function that cannot be loaded or fails on most responses."""

    exit_code = 2


class CheckpointError(RltrainError):
    """A checkpoint that cannot be loaded as requested."""

    exit_code = 2


class NonFiniteError(RltrainError):
    """A loss, gradient or reward is NaN or infinite. No optimizer step was taken with it."""

    exit_code = 70


class DiskError(RltrainError):
    """A file could not be written, and a retry would fail too."""

    exit_code = 74


class WorkerError(RltrainError):
    """A worker raised an exception. The message contains role, rank and the worker's traceback."""

    exit_code = 1


class WorkerLost(RltrainError):
    """A worker process died, hung or ran out of memory."""

    exit_code = 75


class NodesMissing(WorkerLost):
    """Nodes or devices are missing, or have not joined yet."""

    passing = True


class StorageError(RltrainError):
    """Storage does not allow reading or writing a file. The state of the file is unknown."""

    exit_code = 75
    passing = True


class SyncError(RltrainError):
    """The rollout engine does not use the trainer's weights. Restarting the process, with a new engine, may help."""

    exit_code = 75


class AgentError(RltrainError):
    """Most trajectories of a step failed, because tools, environments or agents currently do not work."""

    exit_code = 75


class AgentBug(AgentError):
    """All trajectories of a step ended by an exception in the agent's code."""

    exit_code = 1


class JudgeError(RltrainError):
    """The judge (``reward.judge.url``) does not reply now, or most of its replies in a step are not scores."""

    exit_code = 75


class Interrupted(RltrainError):
    """Stopped by a signal. Exit code 130 after Ctrl-C, 75 after SIGTERM, whose sender may restart the run."""

    def __init__(self, message: str, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def replace_surrogates(text: str) -> str:
    """Return ``text`` in a form that can be encoded: a lone surrogate, as in truncated JSON, is replaced."""
    # A pair whose halves arrived separately becomes one character again.
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def sanitize(text: str) -> str:
    """Return ``text`` without control sequences, which text from a model or data may contain."""
    return _CONTROLS.sub("\ufffd", replace_surrogates(text))


class SanitizedOutput:
    """Standard output or error of a command, with all text converted by `sanitize`, and masked on standard error.

    rich must write control sequences, so it uses the attribute ``rich_proxied_file`` to bypass this class, and
    `logs.SanitizedConsole` sanitizes its text instead. A leading carriage return on standard error is kept, because
    progress bars use it to rewrite their line.
    """

    def __init__(self, stream: Any, is_error: bool = False) -> None:
        self.rich_proxied_file, self._is_error = stream, is_error

    def write(self, text: str) -> int:
        """Write ``text`` (see `io.TextIOBase`)."""
        start = text[:1] if self._is_error and text[:1] == "\r" else ""
        shown = masked_text(text) if self._is_error else text
        self.rich_proxied_file.write(start + sanitize(shown[len(start) :]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write ``lines`` (see `io.IOBase`)."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def lenient_output() -> None:
    """Escape characters that standard output and error cannot encode, and convert both to `SanitizedOutput`.

    By default Python raises an error, so a model's text could end the program.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # A stream without `reconfigure` has been replaced by the program.
        if isinstance(stream, SanitizedOutput) or not hasattr(stream, "reconfigure"):
            continue
        try:
            stream.reconfigure(errors="backslashreplace")
        except OSError:
            # The descriptor was redirected (dup2) from a file to a pipe, which is not seekable.
            raw = io.FileIO(stream.fileno(), "w", closefd=False)
            stream = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, SanitizedOutput(stream, is_error=name == "stderr"))


def write_error(text: str, cause: BaseException, way_out: Callable[[], str] | None = None) -> DiskError | StorageError:
    """Return the error for a file that could not be written: StorageError if the storage is unreachable, else
    DiskError.

    text: the message. way_out(): returns the fix for a full disk.
    """
    if isinstance(cause, StorageError) or (isinstance(cause, OSError) and cause.errno in _NO_ANSWER):
        then = ". The storage does not respond. Check it, and run the same command again." if way_out else ""
        return StorageError(text + then)
    return DiskError(f"{text}. {way_out()}" if way_out else text)


def lacks_memory(error: BaseException, details: str = "") -> bool:
    """Return whether the host, not a device, ran out of memory. details: additional text about the failure."""
    text = f"{error} {details}".lower()
    return isinstance(error, MemoryError) or any(words in text for words in _NO_HOST_MEMORY)


def no_memory(cause: str) -> str:
    """Return the beginning of a message about a host without free memory."""
    return f"the host is out of memory: {cause}. Give the host (or the container) more memory, end other programs on it"


def host_error(error: BaseException) -> RltrainError | None:
    """Return the error if this host is out of memory or its storage does not respond, else None.

    In these cases the data may be intact.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, RltrainError):
        return None
    if lacks_memory(error):
        limit = "or raise its limit (ulimit -v), and run the same command again."
        return WorkerLost(f"{no_memory(first_line(error).rstrip('.'))}, {limit}")
    if number in (errno.EIO, errno.ESTALE) or (number in _NO_ANSWER and _names_file(error)):
        return write_error(first_line(error), error, lambda: "")
    return None


def system_error(error: BaseException) -> RltrainError | None:
    """Return `host_error`, or DiskError if the system does not allow access to a file."""
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL or (number in _NOT_GIVEN and _names_file(error)):
        return DiskError(f"{first_line(error)}. Fix this, and run the same command again.")
    return host_error(error)


def _names_file(error: BaseException) -> bool:
    return getattr(error, "filename", None) is not None


def first_line(error: BaseException) -> str:
    """Return the first line of the error's text, or the name of its type without text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip()


def short(value: object, most: int = 100) -> str:
    """Return the text of a value for a message, truncated to ``most`` characters. Values may be megabytes."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def usage_text(doc: str) -> str:
    """Return the help text of a docstring that begins with ``COMMAND``: and a sentence; other texts unchanged."""
    head, mark, rest = doc.removeprefix("``").partition("``: ")
    return f"usage: {head}\n\n{rest}" if mark and doc.startswith("``") else doc


def command(main: Callable[[list[str] | None], int]) -> Callable[..., int]:
    """Decorate a program's ``main(argv)``: print an RltrainError (see `system_error`) and return its exit code."""

    @wraps(main)
    def guarded(argv: list[str] | None = None) -> int:
        lenient_output()
        try:
            return main(argv)
        except Exception as failure:
            error = failure if isinstance(failure, RltrainError) else system_error(failure)
            if not error:
                raise
            report_to_supervisor(error=str(error), passing=error.passing)
            sys.stderr.write(f"error: {error}\n")
            return error.exit_code

    return guarded
