"""A conversation with the policy, as an agent sees it: it asks for a turn, adds what answers it, and asks again.

Nothing of it can be taken back, which is what keeps the tokens of a trajectory those that were sampled. An agent that
is begun again, because its process died, is given the turns that it had: `Chat.reply` returns them at once.
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
    TAKES_NONE,
    Content,
    content_of,
    image_bytes,
    images_in,
    with_texts,
)
from rltrain.base.columns import names as c
from rltrain.base.errors import storable
from rltrain.base.plugin import user_traceback

if TYPE_CHECKING:
    from rltrain.config.schema.rollout import MultiTurnConfig

Message = dict[str, Any]
Result = TypeVar("Result")
# What is noted of a result for people: its call's arguments (JSON) and seconds. Neither policy nor agent sees it.
_NOTED = ("arguments", "seconds")
# A call that blocks the event loop must not use up the time of the others, so that time is counted in pieces.
_BEATS = 20


class Over(Exception):
    """The trajectory has had its last turn: it has no room for another, or has had as many as it may."""


class Late(Exception):
    """A call has no result in time."""


class Broken(Exception):
    """The trajectory cannot go on, through no fault of the policy."""


@dataclass(frozen=True)
class ToolCall:
    """A tool that a turn asks for."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What the policy has said without a break."""

    text: str
    """Without calls, reasoning and special tokens."""
    calls: Sequence[ToolCall] = ()
    problems: Sequence[str] = ()
    """One per call that was begun and cannot be read: what is wrong with it."""
    reasoning: str = ""
    finish: Literal["stop", "length", "turns"] = "stop"
    """Why it ended: by itself, for want of room, or by itself as the last that is allowed. None follows but "stop"."""


@dataclass(frozen=True)
class Start:
    """How a trajectory begins."""

    prompt: list[Message]
    row: dict[str, Any]
    """data_source, ground_truth, extra_info."""
    seed: int
    agent: str | None = None
    """FILE.py:NAME; None: tools and environment answer every turn."""
    tools: tuple[str, ...] = ()
    """Those that the row's prompt shows."""


class Address(TypedDict):
    """Where a library finds a conversation, named as OpenAI's clients take it."""

    base_url: str
    api_key: str


class Tools(Protocol):
    """The tools of a trajectory, see `toolbox.Session`."""

    names: list[str]
    stateless: bool

    def alone(self, name: str) -> AbstractAsyncContextManager[None]:
        """Hold the object that a tool changes."""

    async def call(self, name: str, arguments: dict[str, Any]) -> Mapping[str, Any]:
        """``content``, ``reward`` and ``metrics``."""


@dataclass(frozen=True)
class Terms:
    """What `rollout.multi_turn` says of tools and results."""

    timeout_s: float
    """Of a call."""
    trajectory_timeout_s: float | None
    """Of all that a trajectory does but wait for the policy."""
    max_parallel_calls: int
    max_result_length: int
    """Characters."""
    truncate_side: str
    images: bool = False
    """The policy may read images between its turns."""

    @classmethod
    def of(cls, turns: MultiTurnConfig, *, images: bool = False) -> Terms:
        """Those of the configuration. images: see `Terms.images`, which depends on the model and the prompts too."""
        return cls(
            turns.tool_timeout_s,
            turns.trajectory_timeout_s,
            turns.max_parallel_calls,
            turns.max_tool_response_length,
            turns.tool_response_truncate_side,
            images,
        )


@dataclass
class Asked:
    """What an agent has said since the last turn, on its way to the policy or into the report of the trajectory."""

    messages: list[Message] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """`columns.OF_TURNS`, and ``tool_ms``: of the slowest call."""
    rewards: list[float] = field(default_factory=list)


class Chat:
    """A conversation. past: the turns so far, one at least; and of those that something has followed, where it is begun
    again, the messages behind them and their rewards."""

    def __init__(
        self,
        prompt: Sequence[Message],
        past: tuple[Sequence[Turn], Sequence[list[Message]], Sequence[list[float]]],
        terms: Terms,
        tools: Tools,
        ask: Callable[[Asked], None],
        address: Callable[[Chat], Address],
    ) -> None:
        self.messages: list[Message] = list(prompt)
        """All so far: the prompt's, turns of the assistant, and what was added."""
        self.turns: list[Turn] = []
        self.rewards: list[float] = []
        """Of all turns."""
        turns, self._said, self._paid = past
        self._coming, self._terms, self._tools, self._ask = list(turns), terms, tools, ask
        self._is_over = False
        self._address = address
        self._asked = Asked()
        self._answer: asyncio.Future[Turn | None] | None = None  # while the policy has been asked and not answered

    @property
    def tools(self) -> Sequence[str]:
        """Names of the tools that the policy was shown."""
        return self._tools.names

    @property
    def max_parallel_calls(self) -> int:
        """Calls of a turn that are run."""
        return self._terms.max_parallel_calls

    @cached_property
    def endpoint(self) -> Address:
        """``base_url`` and ``api_key`` of this conversation, for a library that speaks with OpenAI's servers.

        See `endpoint.Endpoint`. May be read in any thread. Who uses it leaves `reply` and `add` alone.
        """
        return self._address(self)

    async def reply(self) -> Turn:
        """The next turn of the policy. The first answers the row's prompt. Raises `Over` where none follows.

        Raises Broken where an agent that is begun again does not say what it has said before, and where it asks again
        though the turn that it was given up for is still to come: the policy would not hear what was added since.
        """
        if self.turns:
            await self._hear()
        turn = self._coming.pop(0)
        self.turns.append(turn)
        self.messages.append({"role": "assistant", "content": turn.text} | _calls_of(turn))
        return turn

    async def _hear(self) -> None:
        """Say what was added, until the next turn is there."""
        if self._is_over or self.turns[-1].finish != "stop":
            raise Over
        if self._answer:
            raise Broken("chat.reply() was called before the turn of an earlier call was there: wait for that one")
        asked, place, self._asked = self._asked, len(self.turns) - 1, Asked()
        if not asked.messages:
            raise ValueError("nothing was added since the last turn: chat.add(role, text) comes before chat.reply().")
        if place >= len(self._said):
            self._answer = asyncio.get_running_loop().create_future()
            self._ask(asked)
            self._coming += filter(None, [await self._answer])
            self._answer = None
        elif shown(asked.messages) != shown(self._said[place]):
            raise Broken("begun again, the agent said something else: it depends on more than its row and its seed")
        if not self._coming:
            self._is_over = True
            raise Over

    def answered(self, turn: Turn | None) -> None:
        """The policy has answered; None: it will not."""
        self._is_over = turn is None
        if self._answer and not self._answer.done():
            self._answer.set_result(turn)

    def add(self, role: str, content: Any) -> None:
        """Add a message behind the last turn: a user's, or a tool's result. content: a text, or parts of texts and
        images (`content.content_of`).
        """
        known = content_of(content) if role in ("user", "tool") else None
        if known is None:
            raise ValueError(
                f"chat.add({role!r}, {content!r:.80}): a message is a text of 'user' or 'tool', or a list of parts "
                "{'type': 'text', 'text': ...} and {'type': 'image', 'image': ...}."
            )
        if not self.turns:
            raise ValueError("chat.add comes behind a turn: what stands in front of the first is the row's prompt.")
        self._check_images(known)
        self._add({"role": role, "content": known} | ({"name": "tool"} if role == "tool" else {}))

    def _check_images(self, content: Content) -> None:
        """Raise ValueError for images that the run does not take between turns, or are too many bytes."""
        if not images_in(content):
            return
        if not self._terms.images:
            raise ValueError(TAKES_NONE)
        size = image_bytes([content, *(message["content"] for message in self._asked.messages)])
        if size > MOST_IMAGE_BYTES:
            most = f"{MOST_IMAGE_BYTES:,} are taken: scale them down."
            raise ValueError(f"images of {size:,} bytes between two turns, as base64; {most}")

    def _add(self, message: Message, **noted: Any) -> None:
        """noted: of `_NOTED`."""
        message = message | {"content": with_texts(message["content"], storable)}
        self._asked.messages.append(message | noted)
        self.messages += shown([message])

    def reward(self, value: float) -> None:
        """Note a reward of this turn, a finite number: scorers see all of a trajectory as ``tool_rewards``."""
        if not math.isfinite(value):
            raise ValueError(f"a reward is a finite number, not {value}.")
        self.rewards.append(float(value))
        self._asked.rewards.append(self.rewards[-1])

    async def answer_calls(self, turn: Turn, results: Mapping[int, str] | None = None) -> None:
        """Run the calls of a turn at the same time, and add their results in the order of the calls.

        What goes wrong in a call is a result that says so. Each call that is not run, or cannot be read, gets one too.
        results: by place of the call, of those that somebody else has run.
        """
        counts = self._asked.counts
        counts.update({c.TOOL_CALLS: len(turn.calls), c.UNREADABLE_CALLS: len(turn.problems)})
        place = len(self.turns) - 1
        if self._tools.stateless and not results and place < len(self._said):
            first = len(self._asked.messages)
            for message in self._said[place][first : first + len(turn.calls) + len(turn.problems)]:
                self._add(message)
            self.rewards += self._paid[place]
            return
        known, calls = results or {}, turn.calls[: self._terms.max_parallel_calls]
        run = [self._result(call, known.get(place)) for place, call in enumerate(calls)]
        for call, (content, noted) in zip(turn.calls, await asyncio.gather(*run), strict=False):
            try:
                self._check_images(content)
            except ValueError as error:
                counts[c.TOOL_ERRORS] += 1
                print(f"the tool {call.name!r} returned {error}")  # noqa: T201 - its prints are its log
                content = "Error: the tool returned an image that cannot be shown"
            noted |= {"arguments": _as_text(call.arguments)}
            self._add({"role": "tool", "name": call.name, "content": content}, **noted)
        for call in turn.calls[self._terms.max_parallel_calls :]:
            counts[c.CALLS_NOT_RUN] += 1
            text = f"Error: not run: at most {self._terms.max_parallel_calls} calls in a turn"
            self._add({"role": "tool", "name": call.name, "content": text}, arguments=_as_text(call.arguments))
        for why in turn.problems:
            self._add({"role": "tool", "name": "unreadable", "content": f"Error: {why}"})

    async def _result(self, call: ToolCall, known: str | None) -> tuple[Content, dict[str, Any]]:
        """What the policy reads, and what is noted of it."""
        if known is not None and call.name in self._tools.names:
            return self.shortened(known), {}
        started = time.perf_counter()
        content = await self._content(call)
        seconds = time.perf_counter() - started
        self._asked.counts["tool_ms"] = max(self._asked.counts["tool_ms"], round(1e3 * seconds))
        return content, {"seconds": round(seconds, 6)}

    async def _content(self, call: ToolCall) -> Content:
        counts = self._asked.counts
        if call.name not in self._tools.names:
            counts[c.TOOL_ERRORS] += 1
            return f"Error: there is no tool {call.name!r}; there are {', '.join(sorted(self._tools.names))}"
        try:
            async with self._tools.alone(call.name):  # the time limit begins after the wait
                result = await within(self._tools.call(call.name, call.arguments), self._terms.timeout_s)
        except Late:
            counts.update({c.TOOL_ERRORS: 1, c.TOOL_TIMEOUTS: 1})
            return f"Error: no result after {self._terms.timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - a tool is the user's code
            counts[c.TOOL_ERRORS] += 1
            # The frames are for people, and the last line says what happened.
            print(f"the tool {call.name!r} raised:\n{user_traceback(error)}")  # noqa: T201 - its prints are its log
            return f"Error: {user_traceback(error).strip().splitlines()[-1]}"
        self.reward(result["reward"])
        return with_texts(result["content"], self.shortened)

    def shortened(self, text: str) -> str:
        """``text`` as long as `multi_turn.max_tool_response_length` allows."""
        most, side = self._terms.max_result_length, self._terms.truncate_side
        if len(text) <= most:
            return text
        if side == "left":
            return f"(truncated)...{text[-most:]}"
        if side == "right":
            return f"{text[:most]}...(truncated)"
        half = most // 2
        return f"{text[:half]}...(truncated)...{text[len(text) - (most - half) :]}"

    def last_words(self) -> Asked:
        """What was noted and no turn has followed."""
        asked, self._asked = self._asked, Asked()
        return asked


async def within(awaitable: Awaitable[Result], timeout_s: float) -> Result:
    """What ``awaitable`` returns. Raises Late after ``timeout_s``."""
    task = asyncio.ensure_future(awaitable)
    try:
        for _ in range(_BEATS):
            done, _ = await asyncio.wait({task}, timeout=timeout_s / _BEATS)
            if done:
                if task.cancelled():  # by itself: a cancelled trajectory ends at the wait
                    raise RuntimeError("it was cancelled by its own code")
                return task.result()
        raise Late
    finally:
        task.cancel()


def shown(messages: Sequence[Message]) -> list[Message]:
    """Messages without what is noted of them for people."""
    return [{name: value for name, value in message.items() if name not in _NOTED} for message in messages]


def _as_text(arguments: dict[str, Any]) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False, default=str)
    except (TypeError, ValueError):  # of a format of the user's own
        return repr(arguments)


def _calls_of(turn: Turn) -> Message:
    calls = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in turn.calls]
    return {"tool_calls": calls} if calls else {}
