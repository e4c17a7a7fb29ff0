"""The server that the endpoint of agents and `rltrain serve` share."""

import asyncio

from rltrain.base import http
from rltrain.base.http import Response


def test_an_answer_that_nobody_waits_for_is_given_up():
    given_up, asked = asyncio.Event(), []

    async def answer(request, body):
        asked.append(body)
        try:
            await asyncio.sleep(60 if body == b"long" else 0)
        except asyncio.CancelledError:
            given_up.set()
            raise
        return Response.of(body.decode())

    async def run():
        server = await asyncio.start_server(
            lambda reader, writer: http.serve(reader, writer, lambda request: None, answer), "127.0.0.1"
        )
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        head = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s"
        writer.write(head % (5, b"short"))
        assert (await reader.readuntil(b'"short"')).startswith(b"HTTP/1.1 200 OK")
        writer.write(head % (4, b"long"))
        while len(asked) < 2:
            await asyncio.sleep(0.01)
        assert not given_up.is_set()
        writer.close()
        await asyncio.wait_for(given_up.wait(), 20)
        server.close()

    asyncio.run(run())
