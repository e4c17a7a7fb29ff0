"""Handling of SIGINT, SIGTERM and SIGUSR1 for the whole lifetime of the program.

An interrupted step is lost, but schedulers send a signal minutes before they kill. Therefore after the first signal the
current step is finished and saved. A second signal ends the run at once, as does the first if nothing would be lost.
The signal handler only records the request or raises, because the program may be anywhere when the signal arrives. If
the time until the kill is known (`Stop.notice_s`), a step that does not fit into it is abandoned, and the run ends when
that time is over.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rltrain.common.attempt import report_to_supervisor
from rltrain.common.clock import SYSTEM, Clock
from rltrain.common.errors import Interrupted, RltrainError, system_error

log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `timeout`, terminals and schedulers send a signal to a process and then to its group; both count as one request.
ONE_REQUEST_S = 0.5
# Maximum time in seconds for ending the workers of a run that stops at once.
_CLEAN_UP_S = 20.0
# Share of the notice that is reserved for ending the workers.
_KEPT_SHARE = 0.1


class StepLeft(Exception):
    """Raised to abandon the current step, which would not be saved before the kill."""


class Stop:
    """Stop requests from signals.

    While ``finishing`` names work to be finished first, a signal only sets ``requested``. A second signal, or the first
    one without such work, raises `Interrupted` in the main thread. Ray may convert that error into another one, so
    ``at_once`` records that it was raised. notice_s: seconds that the process may live after the first signal.
    """

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        # Completed steps, total steps, and last saved step; None until the run is known.
        self._reached: tuple[int, int, int] | None = None
        self._kept = ""
        self._timers: list[threading.Timer] = []
        self.notice_s: float | None = None
        self._why_to_leave: Callable[[], str] = str
        self.reset()

    def reset(self) -> None:
        """Clear all requests."""
        self.requested = False
        self.at_once = False
        self.save_requested = False
        self.finishing = self._expired = ""
        self._received: set[int] = set()
        self._requested_at = 0.0

    def leave_where(self, why: Callable[[], str]) -> None:
        """Set why(): returns the reason why the notice requires the current step to be abandoned, or ""."""
        self._why_to_leave = why

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 75 after SIGTERM, after which a scheduler may restart the run."""
        # A shell reports 130 for Ctrl-C (128 + SIGINT); 75 is EX_TEMPFAIL of sysexits.h: try again later.
        return 130 if signal.SIGINT in self._received else 75

    @property
    def left_s(self) -> float:
        """Seconds until a stopping run is cut off; infinite without a notice."""
        if not self.requested or self.notice_s is None:
            return math.inf
        return self._requested_at + self.notice_s - self._kept_s - self._clock.monotonic()

    @property
    def _kept_s(self) -> float:
        """Seconds at the end of the notice that are reserved for ending the workers."""
        return min(_CLEAN_UP_S, _KEPT_SHARE * (self.notice_s or math.inf))

    def says(self, kept: str) -> None:
        """Set the result of `kept` for a program without steps: the saved state, and the effect of a rerun."""
        self._kept = kept

    def reached(self, step: int, total: int, saved: int) -> None:
        """Record that ``step`` of ``total`` steps are done and ``saved`` are in a checkpoint (0: none)."""
        self._reached = step, total, saved

    def searching(self) -> None:
        """Mark the state as unknown while a checkpoint is being searched for."""
        self._reached = None

    @property
    def loses(self) -> bool:
        """True if completed steps are not in a checkpoint."""
        return bool(self._reached and self._reached[0] != self._reached[2])

    def kept(self) -> str:
        """Describe the saved state and the effect of a rerun; "" while the run is unknown."""
        if self._kept:
            return f"{self._kept[0].upper()}{self._kept[1:]}."
        if not self._reached:
            return ""
        step, total, saved = self._reached
        steps = f"step {step} is" if step == saved + 1 else f"steps {saved + 1} to {step} are"
        lost = f", and {steps} repeated" if self.loses else ""
        if not saved:
            return f"Nothing is saved yet: the same command starts over{lost}."
        return f"Step {saved} of {total} is saved: the same command resumes after it{lost}."

    def interrupted(self) -> Interrupted:
        """Return the error to raise when the run has stopped."""
        if self._kept:
            return Interrupted(f"stopped; {self._kept}", self.exit_code)
        if not self._reached:
            return Interrupted("stopped before training began; the same command starts it again", self.exit_code)
        step, total, saved = self._reached
        then = "the same command resumes" if saved else "nothing is saved yet, so the same command starts over"
        then += f" after step {saved}, the newest that is saved" if saved and self.loses else ""
        # If everything is saved, the reason for the early stop does not matter.
        why = self._expired if self.loses else ""
        return Interrupted(f"stopped after step {step} of {total}; {then}{why}", self.exit_code)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Append the result of `kept` to an error that ends the block."""
        try:
            yield
        except Exception as error:
            raised = system_error(error) or error
            if not (kept := self.kept()) or self.at_once or isinstance(error, Interrupted):
                raise
            if not isinstance(raised, RltrainError):
                if hasattr(raised, "add_note"):  # since Python 3.11
                    raised.add_note(kept)
                raise
            raised.args = (f"{raised}\n{kept}",)
            if raised is error:
                raise
            raise raised from error

    def raise_if_asked(self) -> None:
        """Raise if a signal has requested it and no work has to be finished first. StepLeft: see `leave_where`."""
        if self.at_once or (self.requested and not self.finishing):
            raise self.interrupted()
        if self.requested and (why := self._why_to_leave()):
            raise StepLeft(why)

    def handle(self, number: int, _frame: object) -> None:
        """Handle SIGINT or SIGTERM."""
        now = self._clock.monotonic()
        self._received.add(number)
        # While the run stops, further signals must not interrupt the cleanup.
        if self.at_once or (self.requested and now - self._requested_at < ONE_REQUEST_S):
            return
        if self.finishing and not self.requested:
            self.requested, self._requested_at = True, now
            log.warning("%s: %s, then stopping (again: stop at once)", signal.Signals(number).name, self.finishing)
            if self.notice_s is not None:
                self._after(self.left_s, self._expire)
            return
        self._requested_at = self._requested_at if self.requested else now
        self.requested = self.at_once = True
        # The cleanup may hang in native code, where no exception can be raised. A thread can still end the process.
        self._after(min(_CLEAN_UP_S, max(self.left_s, 0.0) + self._kept_s), self._give_up)
        raise self.interrupted()

    def ask_to_save(self, number: int, _frame: object) -> None:
        """Handle SIGUSR1."""
        self.save_requested = True
        step = "this step" if self.finishing else "the next step"
        log.warning("%s: saving after %s, then continuing", signal.Signals(number).name, step)

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, do)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _expire(self) -> None:
        self._expired = f" (trainer.stop_notice_s={self.notice_s:g} is over)"
        # Send a second signal, because a thread cannot raise in the main thread, but a signal handler can.
        os.kill(os.getpid(), signal.SIGTERM)

    def _give_up(self) -> None:
        report_to_supervisor(error=str(self.interrupted()))
        # Use neither logging nor print here, because the main thread may hold their locks.
        os.write(2, f"{self.interrupted()}\n".encode())
        os._exit(self.exit_code)

    @contextmanager
    def keeping_handlers(self, finishing: str) -> Iterator[None]:
        """Prevent called code (Ray, when it starts) from replacing our signal handlers inside the context.

        A signal does not interrupt the called code.
        """
        # While this is set, a signal only sets `requested`, because an exception during Ray's start would leave parts
        # of it running.
        real, self.finishing = signal.signal, finishing
        # Ray's processes inherit the ignored SIGUSR1, because schedulers send it to all processes of a job.
        saves = signal.getsignal(signal.SIGUSR1) == self.ask_to_save
        if saves:
            real(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal = lambda number, _handler: signal.getsignal(number)  # type: ignore[assignment]
        try:
            yield
        finally:
            signal.signal, self.finishing = real, ""
            if saves:
                signal.signal(signal.SIGUSR1, self.ask_to_save)
            # The handlers must be set again in any case, because Ray has replaced them below Python.
            for number in _SIGNALS:
                if signal.getsignal(number) == self.handle:
                    signal.signal(number, self.handle)
        self.raise_if_asked()

    def end(self) -> None:
        """Cancel all timers at the end of the run."""
        for timer in self._timers:
            timer.cancel()


@contextmanager
def listen(stop: Stop | None = None) -> Iterator[Stop]:
    """Send signals to the yielded `Stop`: ``stop``, after a reset, or a new one.

    Nothing changes if ``stop`` is already listening, or outside the main thread, where Python does not allow handlers.
    """
    stop = stop or Stop()
    # An outer caller may already listen with this `Stop`; the inner block must not remove its handlers.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) == stop.handle:
        yield stop
        return
    stop.reset()
    before: dict[int, Any] = {number: signal.signal(number, stop.handle) for number in _SIGNALS}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, stop.ask_to_save)
    try:
        yield stop
    finally:
        stop.end()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def listed_signals() -> Iterator[list[int]]:
    """Collect termination signals in a list instead of handling them, and ignore SIGUSR1, which is for runs.

    A signal that was ignored (nohup) stays ignored.
    """
    received: list[int] = []
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, lambda signum, _: received.append(signum)) for number in numbers}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
