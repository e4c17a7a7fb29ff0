"""Work of somebody else's code, tried in a fork of this process under limits of time and memory.

Problem: a chat template is a program that comes with a model's folder, and nothing ends one that loops for ever, or
that asks for all memory in a single expression: a signal is not heard inside it, and a thread does not run. Choice: a
fork does the work first, where the kernel ends it. A fork and not a new interpreter, because it has the tokenizer, the
template and the conversations already, and costs milliseconds. Left out: bringing back what the fork has made; the
work is done again here, now that it is known to end.
"""

from __future__ import annotations

import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rltrain.base.clock import SYSTEM, Clock

# Of what was tried. A template of a real model writes hundreds of conversations within a tenth of a second.
CPU_S = 10
MEMORY_BYTES = 2 << 30
# A busy machine may give the fork little of its time.
_WALL_S_PER_CPU_S = 20
_POLL_S = 0.005
_NO_MEMORY, _TOO_LARGE, _NO_HOST_MEMORY = 3, 4, 5


def trouble(
    work: Callable[[], int], most: int, cpu_s: int = CPU_S, memory_bytes: int = MEMORY_BYTES, clock: Clock = SYSTEM
) -> str:
    """Why ``work`` cannot be done here: a phrase, or "" if it can.

    work: returns the size of what it has made, of which ``most`` are allowed; an error that it raises is no trouble,
    as it will be raised here too. memory_bytes: beyond what this process has now. Raises MemoryError where the
    host, and not this bound, has no memory for it.
    """
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork where there are threads. This one takes no lock that a thread may hold.
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
    finally:  # a signal may end this process meanwhile
        if not pid:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status) if pid else -signal.SIGXCPU
    if code in (_NO_HOST_MEMORY, -signal.SIGKILL):  # by the kernel, as nobody else knows of the fork
        raise MemoryError("there was none to try the chat template in a process of its own")
    if code == -signal.SIGXCPU:
        return f"does not end within {cpu_s} s"
    if code == _NO_MEMORY:
        return f"asks for more than {memory_bytes >> 20:,} MiB of memory"
    if code == _TOO_LARGE:
        return f"writes more than {most:,} characters"
    return f"ends its process ({signal.Signals(-code).name})" if code < 0 else ""


@contextmanager
def memory_bound(memory_bytes: int = MEMORY_BYTES) -> Iterator[bool]:
    """Within, this process may take so much memory beyond what it has. Systems other than Linux have no such bound.

    Yields whether this is the bound: a tighter one, which the process has had before, stays.
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
    """The fork: never returns, and runs nothing that this process would run at its end."""
    code, bounded = 0, False
    try:
        for kind in (signal.SIGINT, signal.SIGTERM):  # those of a terminal are for the process that waits
            signal.signal(kind, signal.SIG_IGN)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        with memory_bound(memory_bytes) as bounded:
            code = _TOO_LARGE if work() > most else 0
    except MemoryError:
        code = _NO_MEMORY if bounded else _NO_HOST_MEMORY
    except BaseException:  # noqa: BLE001 - raised again, and told, by the process that waits
        pass
    finally:
        os._exit(code)
