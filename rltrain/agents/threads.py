"""Functions that block, out of the way of the event loop."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

# Threads are started as they are needed: a call of a trajectory that waits has one.
_MOST_THREADS = 1024
# Address space of a process is bounded, and by itself a thread takes 8 MB of it.
_STACK_BYTES = 1 << 20
# Calls that nobody waits for any more, and that no thread can be made to end; since when.
_abandoned: dict[Future[Any], float] = {}


@cache
def _threads() -> ThreadPoolExecutor:
    threading.stack_size(_STACK_BYTES)
    return ThreadPoolExecutor(_MOST_THREADS)


async def in_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a function returns, which may block meanwhile. A call that is cancelled goes on, and nobody hears of it."""
    future = _threads().submit(function, *arguments, **named)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if not future.done():
            _abandoned[future] = time.monotonic()
            future.add_done_callback(lambda done: _abandoned.pop(done, None))
        raise


def abandoned_s() -> float:
    """Since when a thread of this process works on a call that was given up; 0 where none does."""
    return max((time.monotonic() - since for since in list(_abandoned.values())), default=0.0)
