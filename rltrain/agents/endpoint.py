"""A local server that offers the policy under OpenAI's API, for agents of any library.

A library sends the whole conversation with every request. But a trajectory is one conversation to which tokens are only
appended. So the beginning of a request is compared with the previous messages, and the rest is added. Not included:
several conversations per trajectory, and sampling parameters, which the run sets.
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
from rltrain.agents.chat import Address, Broken, Chat, Message, Over, ToolCall, Turn
from rltrain.agents.http import Refused, Request, Response

_OVER = "trajectory_over"
_MODEL = "policy"
# Fields that a request may have because they have no effect. Fields that change the form of a reply are accepted only
# with the values that are supported (`_ONLY`). Any other field would be a sampling parameter.
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
class _Said:
    """A message in normalised form, for comparison."""

    role: str
    content: str
    tool_calls: tuple[tuple[str, str, str], ...] = ()
    """id, name, and arguments as JSON with sorted keys."""
    tool_call_id: str = ""

    @classmethod
    def of(cls, message: Any) -> _Said:
        """Normalise a message. Raises Refused for a message without text."""
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
            text = f"{message!r:.200} is no message of text: role, content, tool_calls, tool_call_id."
            raise Refused(400, "no_message", text) from None
        # Libraries strip the model's text.
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
        self._said = [_Said.of(message) for message in chat.messages]
        self._asked: list[_Said] = []
        self._reply: asyncio.Task[tuple[Message, str]] | None = None

    def close(self) -> None:
        """Cancel the pending request."""
        if self._reply:
            self._reply.cancel()

    async def ask(self, request: Mapping[str, Any], *, again: bool) -> tuple[Message, str]:
        """Return the next turn as a message, and its finish_reason.

        again: the library retries, because its first request may have been lost. Raises Refused, and the exceptions of
        `Chat.reply`.
        """
        if self._reply and self._reply.done() and self._reply.exception():
            return self._reply.result()  # its exception is permanent
        messages = request.get("messages")
        if not isinstance(messages, list):
            raise Refused(400, "no_messages", "messages is the list of all messages so far.")
        said = [_Said.of(message) for message in messages]
        if not (again and self._reply and said == self._asked):
            if self._reply and not self._reply.done():
                raise Refused(409, "busy", "another request of this trajectory is being answered.")
            self._check_tools(request.get("tools") or [])
            added = self._added(said)
            results = self._results(added)
            self._said, self._asked = said, said
            self._reply = asyncio.ensure_future(self._next(added, results))
        # A library that disconnects does not cancel the turn.
        return await asyncio.shield(self._reply)

    def _check_tools(self, tools: Sequence[Any]) -> None:
        try:
            names = sorted(tool["function"]["name"] for tool in tools)
        except (KeyError, TypeError):
            raise Refused(400, "other_tools", f"tools={tools!r:.200}: functions with a name are.") from None
        if tools and names != sorted(self._chat.tools):
            shown = ", ".join(sorted(self._chat.tools)) or "none"
            raise Refused(
                400,
                "other_tools",
                f"the request has the tools {', '.join(names)}, and the policy was shown {shown}. The prompt shows "
                "those of rollout.multi_turn.function_tool_path, tool_config_path and environment: give the same.",
            )

    def _added(self, said: Sequence[_Said]) -> Sequence[_Said]:
        rule = "A trajectory is one conversation: a request repeats all messages so far, as they are, and adds some."
        for place, (own, other) in enumerate(zip(self._said, said, strict=False)):
            if own != other:
                text = f"message {place} is not what was said: {other} stands in the place of {own}. {rule}"
                raise Refused(409, "another_conversation", text)
        if len(said) < len(self._said):
            text = f"the request has {len(said)} of the {len(self._said)} messages so far. {rule}"
            raise Refused(409, "another_conversation", text)
        added = said[len(self._said) :]
        if bool(added) != bool(self._chat.turns):
            text = "the first request is the row's prompt alone" if added else "the request adds no message"
            raise Refused(409, "another_conversation", f"{text}. {rule}")
        return added

    def _results(self, added: Sequence[_Said]) -> dict[int, str]:
        """Return the results by index of the call. Raises Refused unless each call has one and only user messages
        follow."""
        if not added:
            return {}
        places = {_id(len(self._chat.turns), place): place for place, _ in self._shown(self._chat.turns[-1])}
        results, others = added[: len(places)], added[len(places) :]
        if sorted(message.tool_call_id for message in results if message.role == "tool") != sorted(places):
            text = f"the last turn has the calls {', '.join(places)}: a message of role tool follows for each, first."
            raise Refused(400, "no_results", text)
        for message in others:
            if message.role != "user":
                text = f"{message} cannot be added: results of the turn's calls and messages of the user can."
                raise Refused(400, "no_message", text)
        return {places[message.tool_call_id]: message.content for message in results}

    def _shown(self, turn: Turn) -> list[tuple[int, ToolCall]]:
        """Return the calls that the library runs, with their indices: calls of known tools, up to the limit."""
        calls = list(enumerate(turn.calls))[: self._chat.max_parallel_calls]
        return [(place, call) for place, call in calls if call.name in self._chat.tools]

    async def _next(self, added: Sequence[_Said], results: dict[int, str]) -> tuple[Message, str]:
        chat = self._chat
        if added:
            if results:
                await chat.answer_calls(chat.turns[-1], results)
            for message in added[len(results) :]:
                chat.add("user", message.content)
        turn = await chat.reply()
        # No library represents calls that are unreadable or name an unknown tool, so the policy gets their errors here.
        while turn.finish == "stop" and chat.tools and (turn.calls or turn.problems) and not self._shown(turn):
            await chat.answer_calls(turn)
            turn = await chat.reply()
        reply, finish = self._message(turn)
        self._said = [*self._said, _Said.of(reply)]
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
    """The server of a process. It listens on 127.0.0.1 and a free port from the first `address` on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._lock = loop, Lock()
        self._base_url = ""
        self._server: Future[asyncio.Server] | None = None
        # By unguessable keys.
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
            text = "no trajectory has this api_key (chat.endpoint): it has ended, or there was none."
            raise Refused(401, "unknown_trajectory", text)
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
            text = f"{request.method} {request.path:.100}: there are POST /v1/chat/completions and GET /v1/models."
            raise Refused(404, "not_found", text)
        asked = _parsed(body)
        conversation = self._conversation(request)
        again = request.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            message, finish = await conversation.ask(asked, again=again)
        except Over as over:
            # In text and code, because libraries show one or the other.
            text = f"{_OVER}: no turn follows, as there is no room for another, or were as many as may be."
            raise Refused(400, _OVER, text) from over
        except Broken as broken:
            raise Refused(500, "broken", str(broken)) from broken
        except asyncio.CancelledError:
            self._conversation(request)  # raises Refused if the trajectory has ended meanwhile
            raise
        return _completion(asked, message, finish)


def _model() -> dict[str, Any]:
    return {"id": _MODEL, "object": "model", "created": 0, "owned_by": "rltrain"}


def _parsed(body: bytes) -> dict[str, Any]:
    """Parse a request. Raises Refused for an unsupported form of reply; other unused parameters are logged once."""
    try:
        asked = json.loads(body)
        items = asked.items()
    except (ValueError, AttributeError, RecursionError):
        raise Refused(400, "no_json", "the body is no JSON object.") from None
    given = {name: value for name, value in items if value is not None}
    for name, value in given.items():
        if name in _ONLY and value not in _ONLY[name]:
            forms = "".join(f" or {form!r}" for form in _ONLY[name])
            raise Refused(400, "not_here", f"{name}={value!r:.100} is not in this version; leave it out{forms}.")
        if name not in _ONLY and name not in _WITHOUT_EFFECT:
            _say_unused(name)
    return given


@cache
def _say_unused(name: str) -> None:
    text = f"chat.endpoint: {name!r} of requests is not used: the policy samples as the run does (rollout.*)."
    print(text)  # noqa: T201 - agents.log


def _completion(asked: Mapping[str, Any], message: Message, finish: str) -> Response:
    """Return the reply in OpenAI's format. Token counts are 0, because the run counts tokens."""
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": asked.get("model", _MODEL)}
    if not asked.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        return Response.of({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    # A turn is only known at its end, so the stream has one chunk.
    calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    choices: list[list[dict[str, Any]]] = [
        [{"index": 0, "delta": delta, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": finish}],
    ]
    pieces = [{**head, "object": "chat.completion.chunk", "choices": each} for each in choices]
    if (asked.get("stream_options") or {}).get("include_usage"):
        pieces.append({**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
    events = [*map(json.dumps, pieces), "[DONE]"]
    return Response("".join(f"data: {event}\n\n" for event in events).encode(), "text/event-stream")


def ended_by_endpoint(error: BaseException) -> bool:
    """Return True if an agent was ended by the endpoint's "no turn follows", inside a library's exception.

    An error that was raised while that one was handled, and does not name it as its cause, is the agent's.
    """
    return any(_OVER in str(each) for each in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    open_ends: list[BaseException | None] = [error]
    while open_ends:
        if (each := open_ends.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            open_ends += [each.__cause__, *getattr(each, "exceptions", ())]
