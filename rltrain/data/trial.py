"""Trial of third-party code in a fork of this process, with time and memory limits.

A chat template is a program from a model's folder. If it loops forever or requests all memory in a single expression,
nothing in the process can stop it: signal handlers and threads do not run during the expression. Therefore a fork runs
the code first, and the kernel can kill it. Unlike a new interpreter, a fork already has the tokenizer, template and
conversations, and takes milliseconds. Results are not transferred from the fork: once the code is known to end, it runs
again here.
"""

from __future__ import annotations

import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rltrain.common.clock import SYSTEM, Clock

# Limit for the trial. A real model's template writes hundreds of conversations within a tenth of a second.
CPU_S = 10
MEMORY_BYTES = 2 << 30
# A busy machine may give the fork little CPU time.
_WALL_S_PER_CPU_S = 20
_POLL_S = 0.005
_NO_MEMORY, _TOO_LARGE, _NO_HOST_MEMORY = 3, 4, 5


def problem_in_fork(
    work: Callable[[], int], most: int, cpu_s: int = CPU_S, memory_bytes: int = MEMORY_BYTES, clock: Clock = SYSTEM
) -> str:
    """Return the reason why ``work`` cannot run here, as a phrase, or "".

    work: returns the size of its result, which may be at most ``most``. Its exceptions are ignored, because they will
    be raised here too. memory_bytes: limit beyond the current memory of this process. Raises MemoryError if the host
    itself runs out of memory.
    """
    with warnings.catch_warnings():
        # Python 3.12 warns about a fork with threads. This fork takes no lock that a thread may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _work(work, most, cpu_s, memory_bytes)
    deadline = clock.monotonic() + _WALL_S_PER_CPU_S * cpu_s
    pid, status, pause = 0, 0, _POLL_S / 10
    try:
        while not pid and clock.monotonic() < deadline:
            clock.sleep(pause)
            pause = min(2 * pause, _POLL_S)
            pid, status = os.waitpid(child, os.WNOHANG)
    finally:  # also if a signal handler raises
        if not pid:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status) if pid else -signal.SIGXCPU
    if code in (_NO_HOST_MEMORY, -signal.SIGKILL):  # killed by the kernel, because nothing else kills the fork
        raise MemoryError("not enough memory to try the chat template in a separate process")
    if code == -signal.SIGXCPU:
        return f"does not end within {cpu_s} s"
    if code == _NO_MEMORY:
        return f"asks for more than {memory_bytes >> 20:,} MiB of memory"
    if code == _TOO_LARGE:
        return f"writes more than {most:,} characters"
    return f"ends its process ({signal.Signals(-code).name})" if code < 0 else ""


@contextmanager
def memory_bound(memory_bytes: int = MEMORY_BYTES) -> Iterator[bool]:
    """Limit the memory of this process beyond its current size inside the context. Effective only on Linux.

    Yields whether this limit applies; an earlier, tighter limit is kept.
    """
    before, bounds = resource.getrlimit(resource.RLIMIT_AS), False
    with suppress(OSError, ValueError), open("/proc/self/statm", encoding="utf-8") as file:
        size = int(file.read().split()[0]) * resource.getpagesize() + memory_bytes
        limits = [limit for limit in before if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([size, *limits]), before[1]))
        bounds = size <= min([size, *limits])
    try:
        yield bounds
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _work(work: Callable[[], int], most: int, cpu_s: int, memory_bytes: int) -> None:
    """Run in the fork: never returns, and skips the exit handlers of this process."""
    code, bounded = 0, False
    try:
        for kind in (signal.SIGINT, signal.SIGTERM):  # terminal signals are handled by the parent process, which waits
            signal.signal(kind, signal.SIG_IGN)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        with memory_bound(memory_bytes) as bounded:
            code = _TOO_LARGE if work() > most else 0
    except MemoryError:
        code = _NO_MEMORY if bounded else _NO_HOST_MEMORY
    except BaseException:  # noqa: BLE001 - raised again, and reported, by the waiting process
        pass
    finally:
        os._exit(code)
