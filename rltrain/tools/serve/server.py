"""The server itself: which request is answered how, from its first byte to its last."""

from __future__ import annotations

import asyncio
import hmac
import json
import signal
import socket
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache
from threading import Thread
from typing import Any, NamedTuple, Protocol

import numpy as np

from rltrain.base import http
from rltrain.base.errors import ConfigError, DataError
from rltrain.base.http import Refused, Request, Response
from rltrain.data.chat import ChatEncoder
from rltrain.data.images import EncodedPrompt
from rltrain.tools.serve.answers import Answer, AnswerQueue, Asked, Piece
from rltrain.tools.serve.replies import Replies
from rltrain.tools.serve.requests import Wanted, parsed, read_chat, read_completion, with_images
from rltrain.tools.serve.settings import ServeSettings

# A step of the engine takes no longer; and then replies are on their way.
_END_S, _LAST_WORDS_S = 30.0, 0.2


class Runs(Protocol):
    """Whoever answers what is in the queue."""

    def run(self) -> None:
        """Until the queue is closed."""


class Prompt(NamedTuple):
    """As the engine takes it, and its text where a request has one."""

    encoded: EncodedPrompt
    text: str | None = None


def listener_of(settings: ServeSettings) -> socket.socket:
    """The socket of the server. Raises ConfigError where the address cannot be had."""
    host, port = settings.host, settings.port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        way_out = f"Give another port={port + 1}, or port=0 for a free one; host= is an address of this machine."
        raise ConfigError(f"host={host} port={port} cannot be listened on: {error}. {way_out}") from error


class Server:
    """Reads requests, asks the engine through its queue, and writes replies. longest: tokens of prompt and answer."""

    def __init__(self, name: str, words: ChatEncoder, queue: AnswerQueue, longest: int, api_key: str) -> None:
        self._name, self._words, self._queue, self._longest = name, words, queue, longest
        self._api_key = api_key
        # One, as a tokenizer is for one thread; and not the loop's, which an image would hold up.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="words")
        # Each loads the tokenizer once.
        self._with_arguments = lru_cache(8)(lambda text: replace(words, template_kwargs=json.loads(text)))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection, until it ends."""
        await http.serve(reader, writer, self._admit, self._answer)

    def _admit(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self._api_key and request.path != "/health" and not hmac.compare_digest(given, self._api_key.encode()):
            raise Refused(401, "invalid_api_key", "the api key is another one (RLTRAIN_API_KEY of the server).")

    async def _answer(self, request: Request, body: bytes) -> Response:
        asked_for = request.method, request.path
        if asked_for == ("GET", "/health"):
            return Response.of({"status": "ok"})
        if asked_for == ("GET", "/v1/models"):
            return Response.of({"object": "list", "data": [self._model()]})
        if request.method == "GET" and request.path.startswith("/v1/models/"):
            return Response.of(self._model())
        readers = {"/v1/chat/completions": self._read_chat, "/v1/completions": self._read_completion}
        if request.method != "POST" or request.path not in readers:
            text = "there are POST /v1/chat/completions and /v1/completions, GET /v1/models and /health."
            raise Refused(404, "not_found", f"{request.method} {request.path:.100}: {text}")
        given = parsed(body)
        if given.get("model", self._name) != self._name:
            raise Refused(404, "model_not_found", f"model={given['model']!r:.200}: the model here is {self._name!r}.")
        prompts, wanted = await self._off_loop(readers[request.path], given)
        return await self._reply(prompts, wanted, chat=request.path == "/v1/chat/completions")

    def _model(self) -> dict[str, Any]:
        about = {"id": self._name, "object": "model", "created": 0, "owned_by": "rltrain"}
        return {**about, "max_model_len": self._longest}

    async def _off_loop(self, function: Any, *arguments: Any) -> Any:
        """In the thread that has the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, function, *arguments)

    def _read_chat(self, given: Mapping[str, Any]) -> tuple[list[Prompt], Wanted]:
        messages, arguments, wanted = read_chat(given)
        conversation, images = with_images(messages)
        words = self._with_arguments(json.dumps(arguments)) if arguments else self._words
        try:
            if images:
                prompt = words.encode_prompt(conversation, [{"bytes": image} for image in images])
            else:
                prompt = EncodedPrompt(np.array(words.encode(conversation), dtype=np.int32))
        except DataError as error:
            raise Refused(400, "invalid_value", str(error)) from error
        return [Prompt(prompt)], self._within(wanted, [prompt])

    def _read_completion(self, given: Mapping[str, Any]) -> tuple[list[Prompt], Wanted]:
        prompts, wanted = read_completion(given)
        most = self._words.model_vocab_size or self._words.vocab_size
        encoded = []
        for prompt in prompts:
            tokens = self._words.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            if not all(0 <= token < most for token in tokens):
                raise Refused(400, "invalid_value", f"a token id of the prompt is none of the model's {most:,}.")
            if not len(tokens):
                raise Refused(400, "invalid_value", "the prompt has no token.")
            encoded.append(EncodedPrompt(np.array(tokens, dtype=np.int32)))
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        return list(map(Prompt, encoded, texts)), self._within(wanted, encoded)

    def _within(self, wanted: Wanted, prompts: list[EncodedPrompt]) -> Wanted:
        """With a limit for answers that have none. Raises Refused where there is no room."""
        longest, limit = max(len(prompt.tokens) for prompt in prompts), wanted.sampling.max_tokens
        if longest + (1 if limit < 0 else limit) > self._longest:
            answer = "an answer" if limit < 0 else f"an answer of max_tokens={limit}"
            text = (
                f"a prompt of {longest} tokens and {answer} have no room in max_model_len={self._longest}. Shorten one."
            )
            raise Refused(400, "context_length_exceeded", text)
        return wanted.of_tokens(self._longest - longest) if limit < 0 else wanted

    async def _reply(self, prompts: list[Prompt], wanted: Wanted, *, chat: bool) -> Response:
        loop, number = asyncio.get_running_loop(), wanted.num_choices
        news: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        asked = [
            Asked(prompt.encoded, wanted, place * number, loop, news, prompt.text)
            for place, prompt in enumerate(prompts)
        ]
        replies = Replies(self._name, chat=chat, asked=asked, wanted=wanted, tokenizer=self._words.tokenizer)
        pieces = self._pieces(asked, news, number * len(asked))
        if wanted.stream:
            return Response(b"", "text/event-stream", pieces=self._stream(replies, pieces))
        async with aclosing(pieces):
            answers = [piece.answer async for piece in pieces if piece.ended]
        response: Response = await self._off_loop(replies.whole, answers)
        return response

    async def _pieces(
        self, asked: list[Asked], news: asyncio.Queue[Piece | Exception], left: int
    ) -> AsyncGenerator[Piece, None]:
        """The news of ``left`` answers until the last has ended; whoever leaves earlier gives them up."""
        for each in asked:
            self._queue.put(each)
        try:
            while left:
                piece = await news.get()
                if isinstance(piece, Exception):
                    raise Refused(503, "ends", str(piece))
                left -= piece.ended
                yield piece
        finally:
            for each in asked:
                each.given_up = True

    async def _stream(self, replies: Replies, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[bytes, None]:
        answers: list[Answer] = []
        begun = False
        try:
            async for piece in pieces:
                # The prompt's log-probs are known with the first news.
                for first in [] if begun else await self._off_loop(replies.first_pieces):
                    yield first
                begun = True
                answers += [piece.answer] if piece.ended else []
                yield await self._off_loop(replies.piece, piece)
            for last in replies.last_pieces(answers):
                yield last
        except Refused as refused:
            # The reply has begun: that it is cut off says that it is not whole.
            raise ConnectionError(str(refused)) from refused
        finally:
            await pieces.aclose()


async def serve_until_signal(server: Server, listener: socket.socket, engine: Runs, queue: AnswerQueue) -> None:
    """`serve` until SIGINT or SIGTERM."""
    end = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end.set)
    await serve(server, listener, engine, queue, end)


async def serve(server: Server, listener: socket.socket, engine: Runs, queue: AnswerQueue, end: asyncio.Event) -> None:
    """Serve until ``end`` is set, or the engine fails, whose error is raised. Whoever waits then is told."""
    loop = asyncio.get_running_loop()
    errors: list[Exception] = []

    def work() -> None:
        try:
            engine.run()
        except Exception as error:  # noqa: BLE001 - raised where the server ends
            errors.append(error)
            loop.call_soon_threadsafe(end.set)

    worker = Thread(target=work, name="engine", daemon=True)
    worker.start()
    listening = await asyncio.start_server(server.serve, sock=listener, limit=http.limit(), backlog=1024)
    await end.wait()
    listening.close()
    queue.close()
    await asyncio.to_thread(worker.join, _END_S)
    await asyncio.sleep(_LAST_WORDS_S)
    if errors:
        raise errors[0]
