"""Functions that block, out of the way of the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

# Threads are started as they are needed, and as many calls may be under way as trajectories wait.
_MOST_THREADS = 1024
# Calls that nobody waits for any more, and that no thread can be made to end.
_abandoned: set[Future[Any]] = set()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_THREADS)


async def in_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a function returns, which may block meanwhile. A call that is cancelled goes on, and nobody hears of it."""
    future = _threads().submit(function, *arguments, **named)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if not future.done():
            _abandoned.add(future)
            future.add_done_callback(_abandoned.discard)
        raise


def num_abandoned() -> int:
    """Threads of this process that still work on a call which was given up."""
    return len(_abandoned)
