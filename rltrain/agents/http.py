"""Subset of HTTP/1.1 for libraries that call a model: sequential requests with a Content-Length.

Requests may come from any process of this machine. Therefore sizes and waits are bounded, and the body of a request
that is rejected by its headers is not stored. Before a request with a valid key, a connection may be idle only for
seconds and is closed at the first rejected request. If there are too many of these connections, the oldest is closed,
so that file descriptors are not exhausted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

MAX_HEAD_BYTES = 64 << 10
_MAX_BODY_BYTES = 64 << 20
# A kept-alive connection may be idle for a long time, but not within a request.
_IDLE_S, _REQUEST_S, _UNADMITTED_S = 3600.0, 60.0, 10.0
_MAX_UNADMITTED = 64
_LINGER_S = 1.0


# Connections of this process without an admitted request, oldest first.
_unadmitted: dict[asyncio.StreamWriter, None] = {}


class HttpError(Exception):
    """Error response to a request: HTTP ``status``, machine-readable ``code``, and ``text``. ``leaves_body``: an unread
    body follows on the connection.
    """

    def __init__(self, status: int, code: str, text: str, *, leaves_body: bool = False) -> None:
        super().__init__(text)
        self.status, self.code, self.leaves_body = status, code, leaves_body


@dataclass(frozen=True)
class Request:
    """Request without its body."""

    method: str
    path: str
    """Path without the query."""
    headers: dict[str, str]
    """Headers by lower-case name."""


@dataclass(frozen=True)
class Response:
    """Response to a request."""

    body: bytes
    kind: str = "application/json"
    status: int = 200
    reason: str = "OK"

    @classmethod
    def of(cls, value: Any) -> Response:
        """Return a JSON response."""
        return cls(json.dumps(value).encode())

    @classmethod
    def of_error(cls, error: HttpError) -> Response:
        """Return an error in OpenAI's format. The reason is the code, because some libraries show only the reason."""
        fields = {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.code}
        return cls(json.dumps({"error": fields}).encode(), status=error.status, reason=error.code)


async def serve(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    admit: Callable[[Request], None],
    answer: Callable[[Request, bytes], Awaitable[Response]],
) -> None:
    """Serve the requests of a connection until it ends. reader: its limit must be `MAX_HEAD_BYTES`.

    admit: raises HttpError to reject a request before its body is read. answer: handles request and body; may raise
    HttpError.
    """
    keep_alive = True
    _unadmitted[writer] = None
    if len(_unadmitted) > _MAX_UNADMITTED:
        oldest = next(iter(_unadmitted))
        del _unadmitted[oldest]
        oldest.transport.abort()
    try:
        while keep_alive and (request := await _head(reader, writer)):
            try:
                body = await _body(reader, writer, request, admit)
                response = await answer(request, body)
            except HttpError as error:
                if error.leaves_body:
                    raise
                response = Response.of_error(error)
            except (asyncio.TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                raise
            except Exception as error:  # noqa: BLE001 - the client gets the error instead of a closed connection
                response = Response.of_error(HttpError(500, "error", f"{type(error).__name__}: {error}"))
            closes = request.headers.get("connection", "").lower() == "close" or writer in _unadmitted
            keep_alive = keep_alive and not closes
            await _write(writer, response, keep_alive)
    except HttpError as error:
        await _write(writer, Response.of_error(error), keep_alive=False)
        # Closing a connection with unread data would discard the response.
        await asyncio.wait_for(_discard(reader, _MAX_BODY_BYTES), _LINGER_S)
    except (asyncio.TimeoutError, asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        return  # the client has disconnected, or this task is cancelled, which asyncio would log as an error
    finally:
        _unadmitted.pop(writer, None)
        writer.close()


def check_host(request: Request, host: str) -> None:
    """Raise HttpError for a request with another Host header, which a web page could send through a browser."""
    if request.headers.get("host", host).lower() not in (host, host.replace("127.0.0.1", "localhost")):
        raise HttpError(421, "another_host", f"this server is {host}.")


async def _head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    silent_s, request_s = (_UNADMITTED_S, _UNADMITTED_S) if writer in _unadmitted else (_IDLE_S, _REQUEST_S)
    first = await asyncio.wait_for(reader.read(1), silent_s)
    if not first:
        return None
    try:
        head = first + await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), request_s)
        line, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        method, path, version = line.split(" ")
        pairs = [line.split(":", 1) for line in lines]
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        names = [name.strip().lower() for name, _ in pairs]
        if any(names.count(name) > 1 for name in ("host", "content-length", "authorization")):
            raise ValueError("a header occurs twice")
    except asyncio.LimitOverrunError:
        raise HttpError(431, "headers_too_large", f"headers have at most {MAX_HEAD_BYTES:,} bytes.") from None
    except ValueError:
        raise HttpError(400, "no_http", "this is not an HTTP/1.1 request.") from None
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise HttpError(400, "no_http", f"{version:.20} is not HTTP/1.1.")
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return Request(method, path.partition("?")[0], headers)


async def _body(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request, admit: Callable[[Request], None]
) -> bytes:
    if "transfer-encoding" in request.headers:
        raise HttpError(411, "no_length", "a request needs a Content-Length.", leaves_body=True)
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()) or len(length) > 18:
        raise HttpError(400, "no_http", f"Content-Length is {length:.40}: it must be a number.", leaves_body=True)
    if int(length) > _MAX_BODY_BYTES:
        text = f"a request has at most {_MAX_BODY_BYTES:,} bytes; this one has {int(length):,}."
        raise HttpError(413, "too_large", text, leaves_body=True)
    try:
        admit(request)
    except HttpError:
        await asyncio.wait_for(_discard(reader, int(length)), _UNADMITTED_S if writer in _unadmitted else _REQUEST_S)
        raise
    _unadmitted.pop(writer, None)
    return await asyncio.wait_for(reader.readexactly(int(length)), _REQUEST_S)


async def _discard(reader: asyncio.StreamReader, length: int) -> None:
    while length and (piece := await reader.read(min(length, MAX_HEAD_BYTES))):
        length -= len(piece)


async def _write(writer: asyncio.StreamWriter, response: Response, keep_alive: bool) -> None:
    lines = [
        f"HTTP/1.1 {response.status} {response.reason}",
        f"Content-Type: {response.kind}",
        f"Content-Length: {len(response.body)}",
        f"Connection: {'keep-alive' if keep_alive else 'close'}",
        # A retry would be rejected too, but libraries retry up to three times.
        *(["x-should-retry: false"] if response.status >= 400 else []),
    ]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + response.body)
    if not keep_alive:
        writer.write_eof()
    await asyncio.wait_for(writer.drain(), _REQUEST_S)
