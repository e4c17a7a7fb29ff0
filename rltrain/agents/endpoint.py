"""A local server that offers the policy under OpenAI's API, for agents of any library.

A library sends the whole conversation with every request. But a trajectory is one append-only conversation. So the
beginning of a request is compared with the previous messages, and the rest is appended. It does not support several
conversations per trajectory, or sampling parameters, which the run sets.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import cache, partial
from threading import Lock
from typing import Any

from rltrain.agents import http
from rltrain.agents.chat import Address, Chat, Message, Over, ToolCall, TrajectoryFailed, Turn
from rltrain.agents.http import HttpError, Request, Response

_OVER = "trajectory_over"
_MODEL = "policy"
# Request fields that are allowed because they have no effect. Fields that change the form of a reply are accepted only
# with supported values (`_ONLY`). All other fields are sampling parameters.
_WITHOUT_EFFECT = {
    *("messages", "metadata", "model", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "service_tier", "store", "stream", "stream_options", "tools", "user"),
}
_ONLY: dict[str, list[Any]] = {
    "n": [1],
    "logprobs": [False],
    "response_format": [{"type": "text"}],
    "tool_choice": ["auto"],
    "modalities": [["text"]],
    "stop": [[]],
    "functions": [[]],
    "function_call": [],
    "audio": [],
    "prediction": [],
}


@dataclass(frozen=True)
class _PlainMessage:
    """A message in normalised form, for comparison."""

    role: str
    content: str
    tool_calls: tuple[tuple[str, str, str], ...] = ()
    """id, name, and arguments as JSON with sorted keys."""
    tool_call_id: str = ""

    @classmethod
    def of(cls, message: Any) -> _PlainMessage:
        """Normalise a message. Raises HttpError for a message without text."""
        try:
            role = {"developer": "system"}.get(message["role"], message["role"])
            calls = tuple(
                (call.get("id", ""), call["function"]["name"], _sorted(call["function"]["arguments"]))
                for call in message.get("tool_calls") or ()
            )
            content = message.get("content") or ""
            if not isinstance(content, str):
                content = "".join(part["text"] for part in content)
        except (AttributeError, KeyError, TypeError, ValueError):
            text = f"{message!r:.200} is not a text message: role, content, tool_calls, tool_call_id."
            raise HttpError(400, "no_message", text) from None
        # Texts are stripped for the comparison, because libraries strip the model's text.
        content = content.strip() if role == "assistant" else content
        return cls(str(role), content, calls, message.get("tool_call_id") or "")

    def __str__(self) -> str:
        return f"{json.dumps({name: value for name, value in asdict(self).items() if value}, ensure_ascii=False):.400}"


def _sorted(arguments: Any) -> str:
    return json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments, sort_keys=True)


class _Conversation:
    """The endpoint's state of a trajectory."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._messages = [_PlainMessage.of(message) for message in chat.messages]
        self._last_request: list[_PlainMessage] = []
        self._reply: asyncio.Task[tuple[Message, str]] | None = None

    def close(self) -> None:
        """Cancel the pending request."""
        if self._reply:
            self._reply.cancel()

    async def reply(self, request: Mapping[str, Any], *, again: bool) -> tuple[Message, str]:
        """Return the next turn as a message, and its finish_reason.

        again: whether this is a retry of a request that may have been lost. Raises HttpError, and the exceptions of
        `Chat.reply`.
        """
        if self._reply and self._reply.done() and self._reply.exception():
            return self._reply.result()  # its exception is raised for every later request
        messages = request.get("messages")
        if not isinstance(messages, list):
            raise HttpError(400, "no_messages", "messages must be the list of all messages so far.")
        normalised = [_PlainMessage.of(message) for message in messages]
        if not (again and self._reply and normalised == self._last_request):
            if self._reply and not self._reply.done():
                raise HttpError(409, "busy", "another request of this trajectory is being answered.")
            self._check_tools(request.get("tools") or [])
            added = self._added(normalised)
            results = self._results(added)
            self._messages, self._last_request = normalised, normalised
            self._reply = asyncio.ensure_future(self._next(added, results))
        # The call is shielded, so that a disconnect does not cancel the turn.
        return await asyncio.shield(self._reply)

    def _check_tools(self, tools: Sequence[Any]) -> None:
        try:
            names = sorted(tool["function"]["name"] for tool in tools)
        except (KeyError, TypeError):
            text = f"tools={tools!r:.200}: each tool must be a function with a name."
            raise HttpError(400, "other_tools", text) from None
        if tools and names != sorted(self._chat.tools):
            shown = ", ".join(sorted(self._chat.tools)) or "none"
            raise HttpError(
                400,
                "other_tools",
                f"the request has the tools {', '.join(names)}, but the prompt of the policy shows {shown}. They are "
                "the tools of rollout.multi_turn.function_tool_path, tool_config_path and environment: pass the same "
                "tools.",
            )

    def _added(self, normalised: Sequence[_PlainMessage]) -> Sequence[_PlainMessage]:
        rule = "A trajectory is one conversation: a request repeats all messages so far, as they are, and adds some."
        for place, (own, other) in enumerate(zip(self._messages, normalised, strict=False)):
            if own != other:
                text = f"message {place} differs from the conversation: it is {other} instead of {own}. {rule}"
                raise HttpError(409, "another_conversation", text)
        if len(normalised) < len(self._messages):
            text = f"the request has {len(normalised)} of the {len(self._messages)} messages so far. {rule}"
            raise HttpError(409, "another_conversation", text)
        added = normalised[len(self._messages) :]
        if bool(added) != bool(self._chat.turns):
            text = "the first request is the row's prompt alone" if added else "the request adds no message"
            raise HttpError(409, "another_conversation", f"{text}. {rule}")
        return added

    def _results(self, added: Sequence[_PlainMessage]) -> dict[int, str]:
        """Return the results by index of the call. Raises HttpError unless each call has one and only user messages
        follow."""
        if not added:
            return {}
        places = {_id(len(self._chat.turns), place): place for place, _ in self._shown(self._chat.turns[-1])}
        results, others = added[: len(places)], added[len(places) :]
        if sorted(message.tool_call_id for message in results if message.role == "tool") != sorted(places):
            text = f"the last turn has the calls {', '.join(places)}: one message of role tool must follow for each."
            raise HttpError(400, "no_results", text)
        for message in others:
            if message.role != "user":
                text = f"{message} cannot be added: add results of the turn's calls and messages of the user."
                raise HttpError(400, "no_message", text)
        return {places[message.tool_call_id]: message.content for message in results}

    def _shown(self, turn: Turn) -> list[tuple[int, ToolCall]]:
        """Return the calls that the library runs, with their indices: calls of known tools, up to the limit."""
        calls = list(enumerate(turn.calls))[: self._chat.max_parallel_calls]
        return [(place, call) for place, call in calls if call.name in self._chat.tools]

    async def _next(self, added: Sequence[_PlainMessage], results: dict[int, str]) -> tuple[Message, str]:
        chat = self._chat
        if added:
            if results:
                await chat.answer_calls(chat.turns[-1], results)
            for message in added[len(results) :]:
                chat.add("user", message.content)
        turn = await chat.reply()
        # Libraries cannot represent unreadable calls or unknown tools, so their errors are returned to the policy here.
        while turn.finish == "stop" and chat.tools and (turn.calls or turn.problems) and not self._shown(turn):
            await chat.answer_calls(turn)
            turn = await chat.reply()
        reply, finish = self._message(turn)
        self._messages = [*self._messages, _PlainMessage.of(reply)]
        return reply, finish

    def _message(self, turn: Turn) -> tuple[Message, str]:
        message: Message = {"role": "assistant", "content": turn.text, "refusal": None}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if calls := self._shown(turn):
            message["tool_calls"] = [
                {
                    "id": _id(len(self._chat.turns), place),
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for place, call in calls
            ]
        return message, "length" if turn.finish == "length" else "tool_calls" if calls else "stop"


def _id(turn: int, place: int) -> str:
    """Return the id of a call, which is the same after a restart of the agent."""
    return f"call_{turn}_{place}"


class Endpoint:
    """The server of a process. After the first `address` call it listens on 127.0.0.1 and a free port."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._lock = loop, Lock()
        self._base_url = ""
        self._server: Future[asyncio.Server] | None = None
        # Conversations by key. The keys cannot be guessed.
        self._conversations: dict[str, _Conversation] = {}
        self._keys: dict[Chat, str] = {}

    def address(self, chat: Chat) -> Address:
        """Return the address of a trajectory. May be called in any thread."""
        with self._lock:
            self._base_url = self._base_url or self._listen()
            key = self._keys[chat] = secrets.token_urlsafe(32)
            self._conversations[key] = _Conversation(chat)
        return {"base_url": self._base_url, "api_key": key}

    def close(self, chat: Chat) -> None:
        """Remove a trajectory that ended."""
        if conversation := self._conversations.pop(self._keys.pop(chat, ""), None):
            conversation.close()

    def shut(self) -> None:
        """Stop listening."""
        if self._server and self._server.done():
            self._server.result().close()

    def _listen(self) -> str:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        serve = partial(http.serve, admit=self._admit, answer=self._answer)
        server = asyncio.start_server(serve, sock=listener, limit=http.MAX_HEAD_BYTES, backlog=1024)
        self._server = asyncio.run_coroutine_threadsafe(server, self._loop)
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

    def _conversation(self, request: Request) -> _Conversation:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key not in self._conversations:
            text = "no trajectory has this api_key (chat.endpoint): it has ended or never existed."
            raise HttpError(401, "unknown_trajectory", text)
        return self._conversations[key]

    def _admit(self, request: Request) -> None:
        http.check_host(request, self._base_url.split("/")[2])
        self._conversation(request)

    async def _answer(self, request: Request, body: bytes) -> Response:
        if (request.method, request.path) == ("GET", "/v1/models"):
            return Response.of({"object": "list", "data": [_model()]})
        if request.method == "GET" and request.path.startswith("/v1/models/"):
            return Response.of(_model())
        if (request.method, request.path) != ("POST", "/v1/chat/completions"):
            text = f"{request.method} {request.path:.100}: the paths are POST /v1/chat/completions and GET /v1/models."
            raise HttpError(404, "not_found", text)
        fields = _parsed(body)
        conversation = self._conversation(request)
        again = request.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            message, finish = await conversation.reply(fields, again=again)
        except Over as over:
            # The reason is in the text and in the code, because some libraries show only one of them.
            text = f"{_OVER}: no turn follows: no tokens are left, or max_assistant_turns is reached."
            raise HttpError(400, _OVER, text) from over
        except TrajectoryFailed as broken:
            raise HttpError(500, "broken", str(broken)) from broken
        except asyncio.CancelledError:
            self._conversation(request)  # raises HttpError if the trajectory has ended meanwhile
            raise
        return _completion(fields, message, finish)


def _model() -> dict[str, Any]:
    return {"id": _MODEL, "object": "model", "created": 0, "owned_by": "rltrain"}


def _parsed(body: bytes) -> dict[str, Any]:
    """Parse a request. Raises HttpError for an unsupported form of reply; other unused parameters are logged once."""
    try:
        fields = json.loads(body)
        items = fields.items()
    except (ValueError, AttributeError, RecursionError):
        raise HttpError(400, "no_json", "the body is not a JSON object.") from None
    parameters = {name: value for name, value in items if value is not None}
    for name, value in parameters.items():
        if name in _ONLY and value not in _ONLY[name]:
            forms = "".join(f" or use {form!r}" for form in _ONLY[name])
            raise HttpError(400, "not_here", f"{name}={value!r:.100} is not supported; remove it{forms}.")
        if name not in _ONLY and name not in _WITHOUT_EFFECT:
            _log_unused(name)
    return parameters


@cache
def _log_unused(name: str) -> None:
    text = f"chat.endpoint: {name!r} of requests has no effect: sampling follows the run (rollout.*)."
    print(text)  # noqa: T201 - agents.log


def _completion(fields: Mapping[str, Any], message: Message, finish: str) -> Response:
    """Return the reply in OpenAI's format. Token counts are 0, because the run counts tokens."""
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": fields.get("model", _MODEL)}
    if not fields.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        return Response.of({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    # A turn is known only at its end, so the stream has one chunk.
    calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    choices: list[list[dict[str, Any]]] = [
        [{"index": 0, "delta": delta, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": finish}],
    ]
    pieces = [{**head, "object": "chat.completion.chunk", "choices": choice} for choice in choices]
    if (fields.get("stream_options") or {}).get("include_usage"):
        pieces.append({**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
    events = [*map(json.dumps, pieces), "[DONE]"]
    return Response("".join(f"data: {event}\n\n" for event in events).encode(), "text/event-stream")


def ended_by_endpoint(error: BaseException) -> bool:
    """Return True if an agent was ended by the endpoint's "no turn follows", inside a library's exception.

    An error raised while handling that one, without naming it as its cause, is the agent's.
    """
    return any(_OVER in str(cause) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    remaining: list[BaseException | None] = [error]
    while remaining:
        if (cause := remaining.pop()) is not None and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            remaining += [cause.__cause__, *getattr(cause, "exceptions", ())]
