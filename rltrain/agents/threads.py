"""Execution of blocking functions in threads, outside the event loop."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

# Threads are started on demand, one for each call that waits.
_MOST_THREADS = 1024
# Threads get a small stack, because the address space of a process is bounded and a stack takes 8 MB of it by default.
_STACK_BYTES = 1 << 20
# Start time of cancelled calls whose threads cannot be ended.
_abandoned: dict[Future[Any], float] = {}


@cache
def _threads() -> ThreadPoolExecutor:
    threading.stack_size(_STACK_BYTES)
    return ThreadPoolExecutor(_MOST_THREADS)


async def in_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return the result of a function that may block. A cancelled call keeps running, and its result is discarded."""
    future = _threads().submit(function, *arguments, **named)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if not future.done():
            _abandoned[future] = time.monotonic()
            future.add_done_callback(lambda done: _abandoned.pop(done, None))
        raise


def abandoned_s() -> float:
    """Return the seconds since the oldest cancelled call that is still running; 0 without one."""
    return max((time.monotonic() - since for since in list(_abandoned.values())), default=0.0)
