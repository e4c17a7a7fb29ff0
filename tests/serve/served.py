"""A server in this process, on a free port."""

import asyncio
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rltrain.tools.serve.__main__ import words_of
from rltrain.tools.serve.answers import AnswerQueue
from rltrain.tools.serve.engine import load_engine
from rltrain.tools.serve.server import Server, listener_of, serve
from rltrain.tools.serve.settings import ServeSettings


@contextmanager
def serving(path: Path, api_key: str = "", **changes):
    """The address of a server of the model in ``path``, and its engine. changes: of `ServeSettings`."""
    settings = replace(ServeSettings(str(path), port=0, device="cpu", served_model_name="m"), **changes)
    queue = AnswerQueue()
    engine = load_engine(settings, str(path), words_of(settings, str(path)), queue)
    server = Server("m", words_of(settings, str(path)), queue, engine.longest, api_key)
    loop, end = asyncio.new_event_loop(), asyncio.Event()
    with listener_of(settings) as listener:
        port = listener.getsockname()[1]
        served = Future()

        def run():
            try:
                served.set_result(loop.run_until_complete(serve(server, listener, engine, queue, end)))
            except Exception as error:  # noqa: BLE001 - raised where the server is left
                served.set_exception(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/v1", engine
        finally:
            loop.call_soon_threadsafe(end.set)
            thread.join(60)
            loop.close()
    served.result(0)
