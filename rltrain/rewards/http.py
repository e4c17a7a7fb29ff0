"""Requests to a server that scores or judges: a client that goes nowhere else, and replies of bounded size.

Redirects and proxies are not followed: an answer goes to the address that the user gave, or nowhere. There are no
timeouts here: httpx would begin its own anew for every read, and whoever asks has a deadline of its own.
"""

import ssl
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

import httpx

MAX_REPLY_BYTES = 1 << 20
# Statuses of a server that may answer later.
TRY_AGAIN = (408, 429, 500, 502, 503, 504)


def client(headers: Mapping[str, str], concurrency: int) -> httpx.AsyncClient:
    """A client of so many connections, which are kept from request to request."""
    # Without compression the size of a reply is bounded by counting the bytes that come.
    defaults = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    return httpx.AsyncClient(
        headers=defaults | dict(headers),
        verify=ssl.create_default_context(),
        trust_env=False,
        timeout=None,
        limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
    )


async def fetch(asking: httpx.AsyncClient, url: str, body: bytes | None = None) -> tuple[httpx.Response, bytes]:
    """POST ``body``, or GET without one. Of a reply over `MAX_REPLY_BYTES` a little more than those come back."""
    async with asking.stream("GET" if body is None else "POST", url, content=body) as response:
        reply = b""
        async for part in response.aiter_raw():
            reply += part
            if len(reply) > MAX_REPLY_BYTES:
                break
        return response, reply


def too_long(after_s: float, deadline_s: float) -> str:
    """Return what to say of a server that asks for a longer wait than ``deadline_s`` allows; "" where it does not."""
    if after_s <= deadline_s:
        return ""
    return f"it asks to wait {after_s:,.0f} s (Retry-After), longer than the deadline of {deadline_s:g} s"


def retry_after_s(header: str) -> float:
    """Seconds until the time that a server names, as a number of seconds or as a date; 0 for anything else."""
    if header.isdecimal():
        return float(header[:12])
    with suppress(TypeError, ValueError, OverflowError):
        return (parsedate_to_datetime(header) - datetime.now(timezone.utc)).total_seconds()
    return 0.0
