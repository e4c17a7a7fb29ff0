"""HTTP client for a remote scorer or judge, with replies of bounded size.

Redirects and proxies are not followed: a response is sent only to the address that the user gave. The client has no
timeout, because httpx restarts its timeout with every read; callers set their own deadline.
"""

import ssl
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

import httpx

MAX_REPLY_BYTES = 1 << 20
# HTTP statuses after which a retry may succeed.
TRY_AGAIN = (408, 429, 500, 502, 503, 504)


def client(headers: Mapping[str, str], concurrency: int) -> httpx.AsyncClient:
    """Return a client with at most ``concurrency`` connections, which are reused between requests."""
    # Compression is off, so that counting the received bytes bounds the size of a reply.
    defaults = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    return httpx.AsyncClient(
        headers=defaults | dict(headers),
        verify=ssl.create_default_context(),
        trust_env=False,
        timeout=None,
        limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
    )


async def fetch(http_client: httpx.AsyncClient, url: str, body: bytes | None = None) -> tuple[httpx.Response, bytes]:
    """POST ``body``, or GET without one. A reply is cut shortly after `MAX_REPLY_BYTES`."""
    async with http_client.stream("GET" if body is None else "POST", url, content=body) as response:
        reply = b""
        async for part in response.aiter_raw():
            reply += part
            if len(reply) > MAX_REPLY_BYTES:
                break
        return response, reply


def wait_problem(after_s: float, deadline_s: float) -> str:
    """Return an error message if the wait ``after_s`` exceeds ``deadline_s``, otherwise ""."""
    if after_s <= deadline_s:
        return ""
    return f"it asks to wait {after_s:,.0f} s (Retry-After), longer than the deadline of {deadline_s:g} s"


def retry_after_s(header: str) -> float:
    """Return the seconds to wait from a Retry-After header (a number of seconds or a date); 0 for anything else."""
    if header.isdecimal():
        return float(header[:12])
    with suppress(TypeError, ValueError, OverflowError):
        return (parsedate_to_datetime(header) - datetime.now(timezone.utc)).total_seconds()
    return 0.0
