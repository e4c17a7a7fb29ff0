"""Logs of all processes: console, RUN/train.log, and RUN/logs/rank_00017.log for each worker.

The run folder is known only after the configuration is read, and earlier lines must not be lost. Therefore a session
buffers its lines until `open_train_log` names the file. An error that ends the session is also written to the file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from rltrain.common.background import Appender
from rltrain.common.errors import Interrupted, SanitizedOutput, sanitize
from rltrain.common.secrets import masked_text

TRAIN_LOG = "train.log"
# Logger of the metrics of each step. They are always written to train.log, and to a console without a progress bar.
STEPS = logging.getLogger("rltrain.steps")

# Maximum wait for the last lines at the end of a session, in seconds.
_LAST_S = 5.0


class SanitizedConsole(Console):
    """rich console with `sanitize` texts: only rich's own control sequences reach a terminal."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            each if each.control else Segment(sanitize(each.text), each.style, each.control) for each in buffer
        )


# One console is shared by bars, tables and log lines of this process, so that lines appear above the bar.
console = SanitizedConsole(highlight=False, markup=False, emoji=False)
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red"}


class _Stamped(logging.Formatter):
    """Formatter: time, level if above INFO, message without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        return sanitize(f"{self.formatTime(record, self.datefmt)} {level}{masked_text(super().format(record))}")


class _ConsoleLines(logging.Handler):
    """Handler for unwrapped lines on the shared console."""

    shows_steps = False

    def emit(self, record: logging.LogRecord) -> None:
        if self.shows_steps or record.name != STEPS.name:
            # The format is chosen for each line, because a program may redirect standard output at any time, as tests
            # do.
            self.setFormatter(_Stamped(datefmt="%H:%M:%S" if console.is_terminal else "%Y-%m-%d %H:%M:%S"))
            console.print(self.format(record), style=_STYLES.get(record.levelno), markup=False, soft_wrap=True)


class _Output:
    """Standard output that survives a full disk, a closed terminal or pipe, and unencodable characters.

    train.log has the lines too. Writers without log lines, such as a bar or a callback, also use it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # set while this thread, which a signal handler may interrupt, uses the stream
        self._is_used = threading.local()

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError), self._use() as is_free:
            if not is_free:
                os.write(self._stream.fileno(), text.encode(self._stream.encoding, "backslashreplace"))
                return len(text)
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError), self._use() as is_free:
            if is_free:
                self._stream.flush()

    @contextlib.contextmanager
    def _use(self) -> Iterator[bool]:
        """Yield whether the stream is free: a signal handler may interrupt a line, and Python's buffer is not
        reentrant.
        """
        is_free = not getattr(self._is_used, "now", False)
        self._is_used.now = True
        try:
            yield is_free
        finally:
            self._is_used.now = not is_free

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _File(logging.Handler):
    """Handler that appends to a file. A full or unresponsive disk neither stops a run nor floods the screen."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.lines = Appender(file)
        self.setFormatter(_Stamped())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.add(self.format(record) + "\n")

    def close(self) -> None:
        self.lines.close(_LAST_S)
        super().close()


class _TrainLog(MemoryHandler):
    """Buffer of log records until the run folder exists, then writer to its file."""

    def __init__(self) -> None:
        super().__init__(capacity=10_000)

    def shouldFlush(self, record: logging.LogRecord) -> bool:
        # The capacity is irrelevant: before the file exists nothing is flushed, and afterwards every line is written at
        # once.
        return self.target is not None


class _Session:
    """Log handlers of a driver."""

    def __init__(self) -> None:
        self.lines, self.file = _ConsoleLines(), _TrainLog()


_session: _Session | None = None


@contextlib.contextmanager
def session() -> Iterator[None]:
    """Send log lines to the console inside the context, and after `open_train_log` also to train.log.

    An error that ends the block is also written to train.log.
    """
    global _session
    if _session:  # the caller has already opened a session
        yield
        return
    _session = log_session = _Session()
    root, our_handlers = logging.getLogger(), logging.getLogger("rltrain")
    # Only rltrain's loggers log below warnings; loggers of other packages keep their level.
    level = our_handlers.level
    our_handlers.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for handler in (log_session.lines, log_session.file):
        root.addHandler(handler)
    output = sys.stdout
    inside = _Output(output.rich_proxied_file if isinstance(output, SanitizedOutput) else output)
    sys.stdout = cast(TextIO, SanitizedOutput(inside) if isinstance(output, SanitizedOutput) else inside)
    try:
        yield
    except BaseException as error:
        trace = None if isinstance(error, Interrupted) else sys.exc_info()
        text = str(error) or type(error).__name__
        # The error is written only to the file, because the caller that ends the program prints it on the terminal. A
        # stop by signal needs no traceback.
        log_session.file.handle(logging.LogRecord("rltrain", logging.ERROR, "", 0, text, None, trace))
        raise
    finally:
        _session = None
        sys.stdout = output
        logging.captureWarnings(False)
        our_handlers.setLevel(level)
        for handler in (log_session.lines, log_session.file):
            root.removeHandler(handler)
        # Closing the handler flushes to its target but does not close it.
        if target := log_session.file.target:
            log_session.file.close()
            target.close()


def open_train_log(folder: Path) -> None:
    """Write all lines since the start of the session, and all later lines, to ``folder``/train.log.

    A resumed run appends to the file.
    """
    if _session is None or _session.file.target is not None:
        return
    file = folder / TRAIN_LOG
    again = file.exists() and file.stat().st_size > 0
    target = _File(file)
    if again:
        # This line is written directly, because it has no time, and before the flush, so that it precedes all other
        # lines.
        target.lines.add(f"\n{'=' * 20} started again on {time.strftime('%Y-%m-%d %H:%M:%S')} {'=' * 20}\n")
    _session.file.setTarget(target)
    _session.file.flush()


def show_steps(shown: bool) -> None:
    """Set whether the console prints the line of every step."""
    if _session:
        _session.lines.shows_steps = shown


def open_worker_log(folder: str, rank: int) -> None:
    """Write a worker's log lines, warnings and crash stacks to ``folder``/rank_00017.log.

    Nothing is written if this node cannot write to ``folder``.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        crashes = open(file := Path(folder) / f"rank_{rank:05d}.log", "a", encoding="utf-8")  # noqa: SIM115 - see below
    except OSError:  # checkpoints report storage that not all nodes see
        return
    logging.getLogger().addHandler(_File(file))
    logging.getLogger("rltrain").setLevel(logging.INFO)
    logging.captureWarnings(True)
    # faulthandler writes to the file descriptor, so the file stays open while the worker lives.
    faulthandler.enable(file=crashes)
    logging.getLogger(__name__).info("rank %d: pid %d on %s", rank, os.getpid(), socket.gethostname())


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Log ``text``, and show a spinner on a terminal inside the context."""
    logging.getLogger(__name__).info("%s", text)
    with console.status(Text(text)):  # a path may look like rich markup
        yield


def count(number: int, noun: str) -> str:
    """Return ``1 worker``, ``2,000 workers``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
