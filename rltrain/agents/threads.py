"""Functions that block, out of the way of the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

# Threads are started as they are needed, and as many calls may be under way as trajectories wait.
_MOST_THREADS = 1024


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_THREADS)


async def in_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a function returns, which may block meanwhile. A call that is cancelled goes on, and nobody hears of it."""
    return await asyncio.get_running_loop().run_in_executor(_threads(), lambda: function(*arguments, **named))
