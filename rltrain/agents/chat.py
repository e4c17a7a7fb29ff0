"""The agent's view of a conversation with the policy: request a turn, add messages, request the next turn.

Turns and messages cannot be changed later, so that the tokens of a trajectory are the sampled ones. If an agent is
restarted because its process died, `Chat.reply` returns its previous turns again at once.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar

from rltrain.agents.content import (
    MOST_IMAGE_BYTES,
    NO_IMAGES,
    Content,
    content_of,
    image_bytes,
    images_in,
    with_texts,
)
from rltrain.common.columns import names as c
from rltrain.common.errors import replace_surrogates
from rltrain.common.plugin import user_traceback

if TYPE_CHECKING:
    from rltrain.config.schema.rollout import MultiTurnConfig

Message = dict[str, Any]
Result = TypeVar("Result")
# Log fields of a result: arguments (JSON) and seconds of its call. Policy and agent do not see them.
_LOG_FIELDS = ("arguments", "seconds")
# Time limits are counted in small steps. A call that blocks the event loop then does not use up the time of other
# calls.
_BEATS = 20


class Over(Exception):
    """Raised after the last turn of a trajectory: no tokens are left, or the maximum number of turns is reached."""


class CallTimeout(Exception):
    """A call has timed out."""


class TrajectoryFailed(Exception):
    """The trajectory failed for a reason other than the policy."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call of a turn."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """One uninterrupted generation of the policy."""

    text: str
    """Text without calls, reasoning and special tokens."""
    calls: Sequence[ToolCall] = ()
    problems: Sequence[str] = ()
    """One error message per tool call that could not be parsed."""
    reasoning: str = ""
    finish: Literal["stop", "length", "turns"] = "stop"
    """Finish reason: normal end, length limit, or normal end at the turn limit. Only "stop" allows another turn."""


@dataclass(frozen=True)
class TrajectoryStart:
    """The start of a trajectory."""

    prompt: list[Message]
    row: dict[str, Any]
    """data_source, ground_truth, extra_info."""
    seed: int
    agent: str | None = None
    """FILE.py:NAME; None: tools and environment reply to every turn."""
    tools: tuple[str, ...] = ()
    """The tools in the row's prompt."""


class Address(TypedDict):
    """Address of a conversation for a library. The fields are named as arguments of OpenAI's clients."""

    base_url: str
    api_key: str


class Tools(Protocol):
    """The tools of a trajectory, see `toolbox.Session`."""

    names: list[str]
    stateless: bool

    def alone(self, name: str) -> AbstractAsyncContextManager[None]:
        """Lock the object that a tool changes."""

    async def call(self, name: str, arguments: dict[str, Any]) -> Mapping[str, Any]:
        """Call a tool. Return ``content``, ``reward`` and ``metrics``."""


@dataclass(frozen=True)
class TurnLimits:
    """Limits of tools and results, from `rollout.multi_turn`."""

    timeout_s: float
    """Seconds per call."""
    trajectory_timeout_s: float | None
    """Seconds of a trajectory, without waiting for the policy."""
    max_parallel_calls: int
    max_result_length: int
    """Characters."""
    truncate_side: str
    images: bool = False
    """True if the policy may read images between its turns."""

    @classmethod
    def of(cls, turns: MultiTurnConfig, *, images: bool = False) -> TurnLimits:
        """Return the limits of the configuration. images: see `TurnLimits.images`; it also depends on the model and the
        prompts."""
        return cls(
            turns.tool_timeout_s,
            turns.trajectory_timeout_s,
            turns.max_parallel_calls,
            turns.max_tool_response_length,
            turns.tool_response_truncate_side,
            images,
        )


@dataclass
class NewMessages:
    """Messages of an agent since the last turn, for the policy or for the trajectory's record."""

    messages: list[Message] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """`columns.OF_TURNS`, and ``tool_ms``: milliseconds of the slowest call."""
    rewards: list[float] = field(default_factory=list)


class Chat:
    """A conversation.

    past: the turns so far, at least one; after a restart also the messages and rewards that followed each turn.
    """

    def __init__(
        self,
        prompt: Sequence[Message],
        past: tuple[Sequence[Turn], Sequence[list[Message]], Sequence[list[float]]],
        limits: TurnLimits,
        tools: Tools,
        request: Callable[[NewMessages], None],
        address: Callable[[Chat], Address],
    ) -> None:
        self.messages: list[Message] = list(prompt)
        """All messages so far: the prompt, the policy's turns, and added messages."""
        self.turns: list[Turn] = []
        self.rewards: list[float] = []
        """Total of all turns."""
        turns, self._past_messages, self._past_rewards = past
        self._next_turns, self._limits, self._tools, self._request = list(turns), limits, tools, request
        self._is_over = False
        self._address = address
        self._new = NewMessages()
        self._pending: asyncio.Future[Turn | None] | None = None  # set while the policy's reply is awaited

    @property
    def tools(self) -> Sequence[str]:
        """Names of the tools that the policy was shown."""
        return self._tools.names

    @property
    def max_parallel_calls(self) -> int:
        """Maximum number of calls that are run per turn."""
        return self._limits.max_parallel_calls

    @cached_property
    def endpoint(self) -> Address:
        """``base_url`` and ``api_key`` of this conversation, for a library that uses OpenAI's API.

        See `endpoint.Endpoint`. May be read in any thread. Its user must not call `reply` and `add`.
        """
        return self._address(self)

    async def reply(self) -> Turn:
        """Return the next turn of the policy. The first turn replies to the row's prompt. Raises `Over` if there is
        none.

        Raises TrajectoryFailed if a restarted agent adds different messages than before, or if it is called while the
        turn of a cancelled call is still pending, because the policy would not see messages added since.
        """
        if self.turns:
            await self._request_turn()
        turn = self._next_turns.pop(0)
        self.turns.append(turn)
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in turn.calls
        ]
        self.messages.append({"role": "assistant", "content": turn.text} | ({"tool_calls": calls} if calls else {}))
        return turn

    async def _request_turn(self) -> None:
        """Send the added messages and wait for the next turn."""
        if self._is_over or self.turns[-1].finish != "stop":
            raise Over
        if self._pending:
            raise TrajectoryFailed("chat.reply() is already waiting for a turn: wait for that call")
        new, place, self._new = self._new, len(self.turns) - 1, NewMessages()
        if not new.messages:
            raise ValueError("no message was added since the last turn: call chat.add(role, text) before chat.reply().")
        if place >= len(self._past_messages):
            self._pending = asyncio.get_running_loop().create_future()
            self._request(new)
            self._next_turns += filter(None, [await self._pending])
            self._pending = None
        elif without_log_fields(new.messages) != without_log_fields(self._past_messages[place]):
            raise TrajectoryFailed(
                "after a restart the agent added other messages: it may use only row, seed and turns"
            )
        if not self._next_turns:
            self._is_over = True
            raise Over

    def deliver(self, turn: Turn | None) -> None:
        """Deliver the policy's turn; None: there is none."""
        self._is_over = turn is None
        if self._pending and not self._pending.done():
            self._pending.set_result(turn)

    def add(self, role: str, content: Any) -> None:
        """Add a message after the last turn: a user's, or a tool's result.

        content: a text, or parts of texts and images (`content.content_of`).
        """
        known = content_of(content) if role in ("user", "tool") else None
        if known is None:
            raise ValueError(
                f"chat.add({role!r}, {content!r:.80}): a message is a text of 'user' or 'tool', or a list of parts "
                "{'type': 'text', 'text': ...} and {'type': 'image', 'image': ...}."
            )
        if not self.turns:
            raise ValueError("call chat.add after a turn: the row's prompt has the messages before the first.")
        self._check_images(known)
        self._add({"role": role, "content": known} | ({"name": "tool"} if role == "tool" else {}))

    def _check_images(self, content: Content) -> None:
        """Raise ValueError for images that the run does not accept between turns, or that have too many bytes."""
        if not images_in(content):
            return
        if not self._limits.images:
            raise ValueError(NO_IMAGES)
        size = image_bytes([content, *(message["content"] for message in self._new.messages)])
        if size > MOST_IMAGE_BYTES:
            limit = f"the limit is {MOST_IMAGE_BYTES:,}: scale them down."
            raise ValueError(f"images of {size:,} bytes between two turns, as base64; {limit}")

    def _add(self, message: Message, **log_fields: Any) -> None:
        """Add a message. log_fields: log fields of `_LOG_FIELDS`."""
        message = message | {"content": with_texts(message["content"], replace_surrogates)}
        self._new.messages.append(message | log_fields)
        self.messages += without_log_fields([message])

    def reward(self, value: float) -> None:
        """Add a reward of this turn, a finite number. Scorers get all rewards of a trajectory as ``tool_rewards``."""
        if not math.isfinite(value):
            raise ValueError(f"a reward is a finite number, not {value}.")
        self.rewards.append(float(value))
        self._new.rewards.append(self.rewards[-1])

    async def answer_calls(self, turn: Turn, results: Mapping[int, str] | None = None) -> None:
        """Run the calls of a turn concurrently, and add their results in the order of the calls.

        The error of a call becomes its result. Calls that are not run, or cannot be parsed, get a result too. results:
        results of calls that a library has already run, by index of the call.
        """
        counts = self._new.counts
        counts.update({c.TOOL_CALLS: len(turn.calls), c.UNREADABLE_CALLS: len(turn.problems)})
        place = len(self.turns) - 1
        if self._tools.stateless and not results and place < len(self._past_messages):
            first = len(self._new.messages)
            for message in self._past_messages[place][first : first + len(turn.calls) + len(turn.problems)]:
                self._add(message)
            self.rewards += self._past_rewards[place]
            return
        known, calls = results or {}, turn.calls[: self._limits.max_parallel_calls]
        run = [self._result(call, known.get(place)) for place, call in enumerate(calls)]
        for call, (content, log_fields) in zip(turn.calls, await asyncio.gather(*run), strict=False):
            try:
                self._check_images(content)
            except ValueError as error:
                counts[c.TOOL_ERRORS] += 1
                print(f"the tool {call.name!r} returned {error}")  # noqa: T201 - its prints are its log
                content = "Error: the tool returned an image that cannot be shown"
            log_fields |= {"arguments": _as_text(call.arguments)}
            self._add({"role": "tool", "name": call.name, "content": content}, **log_fields)
        for call in turn.calls[self._limits.max_parallel_calls :]:
            counts[c.CALLS_NOT_RUN] += 1
            text = f"Error: not run: at most {self._limits.max_parallel_calls} calls in a turn"
            self._add({"role": "tool", "name": call.name, "content": text}, arguments=_as_text(call.arguments))
        for problem in turn.problems:
            self._add({"role": "tool", "name": "unreadable", "content": f"Error: {problem}"})

    async def _result(self, call: ToolCall, known: str | None) -> tuple[Content, dict[str, Any]]:
        """Return a call's result for the policy, and its log fields."""
        if known is not None and call.name in self._tools.names:
            return self.truncated(known), {}
        started = time.perf_counter()
        content = await self._content(call)
        seconds = time.perf_counter() - started
        self._new.counts["tool_ms"] = max(self._new.counts["tool_ms"], round(1e3 * seconds))
        return content, {"seconds": round(seconds, 6)}

    async def _content(self, call: ToolCall) -> Content:
        counts = self._new.counts
        if call.name not in self._tools.names:
            counts[c.TOOL_ERRORS] += 1
            return f"Error: there is no tool {call.name!r}; the tools are {', '.join(sorted(self._tools.names))}"
        try:
            async with self._tools.alone(call.name):  # the time limit begins after the wait
                result = await with_timeout(self._tools.call(call.name, call.arguments), self._limits.timeout_s)
        except CallTimeout:
            counts.update({c.TOOL_ERRORS: 1, c.TOOL_TIMEOUTS: 1})
            return f"Error: no result after {self._limits.timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - a tool is the user's code
            counts[c.TOOL_ERRORS] += 1
            # The frames are logged; the policy gets only the last line.
            print(f"the tool {call.name!r} raised:\n{user_traceback(error)}")  # noqa: T201 - its prints are its log
            return f"Error: {user_traceback(error).strip().splitlines()[-1]}"
        self.reward(result["reward"])
        return with_texts(result["content"], self.truncated)

    def truncated(self, text: str) -> str:
        """Return ``text`` truncated to `multi_turn.max_tool_response_length`."""
        most, side = self._limits.max_result_length, self._limits.truncate_side
        if len(text) <= most:
            return text
        if side == "left":
            return f"(truncated)...{text[-most:]}"
        if side == "right":
            return f"{text[:most]}...(truncated)"
        half = most // 2
        return f"{text[:half]}...(truncated)...{text[len(text) - (most - half) :]}"

    def take_new(self) -> NewMessages:
        """Return the messages and counts after the last turn."""
        new, self._new = self._new, NewMessages()
        return new


async def with_timeout(awaitable: Awaitable[Result], timeout_s: float) -> Result:
    """Return the result of ``awaitable``. Raises CallTimeout after ``timeout_s``."""
    task = asyncio.ensure_future(awaitable)
    try:
        for _ in range(_BEATS):
            done, _ = await asyncio.wait({task}, timeout=timeout_s / _BEATS)
            if done:
                if task.cancelled():  # if the trajectory is cancelled, asyncio.wait raises
                    raise RuntimeError("the tool cancelled its own call")
                return task.result()
        raise CallTimeout
    finally:
        task.cancel()


def without_log_fields(messages: Sequence[Message]) -> list[Message]:
    """Return messages without their log fields."""
    return [{name: value for name, value in message.items() if name not in _LOG_FIELDS} for message in messages]


def _as_text(arguments: dict[str, Any]) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False, default=str)
    except (TypeError, ValueError):  # from a user's call format
        return repr(arguments)
