"""Replies to the policy between two turns, in the format of the chat template.

Problem: a turn must be parsed, executed and answered in tokens, with the same result on all processes of a replica.
Choice: every process parses the turn, so all determine if it gets a reply; only the leader calls the executors
(`agents.pool`), and the others receive the tokens of the replies. Left out: the use of these tokens (`Conversations`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rltrain.agents.chat import Message, ToolCall, TrajectoryStart
from rltrain.agents.chat import Turn as Said
from rltrain.agents.content import images_in, without_files
from rltrain.agents.executor import TrajectoryMessage
from rltrain.agents.pool import ExecutorPool
from rltrain.common.columns import names as c
from rltrain.common.errors import DataError
from rltrain.common.images import file_of
from rltrain.common.plugin import is_plugin
from rltrain.config.agents import SINGLE_TURN
from rltrain.config.schema.rollout import MultiTurnConfig
from rltrain.data.chat import ChatEncoder
from rltrain.data.images import PromptImages
from rltrain.data.rows import PromptRow
from rltrain.data.turns.calls import Call, CallFormat, Parsed
from rltrain.data.turns.formats.families import NO_CALLS
from rltrain.data.turns.formats.reading import Schemas
from rltrain.data.turns.turn_delta import TurnDelta
from rltrain.workers.rollout.contract import Key
from rltrain.workers.rollout.queue import Replica

# Number of engine polls between two exchanges of new replies among the processes of a replica. Every exchange costs a
# broadcast.
_ASKS_PER_LOOK = 4


@dataclass(frozen=True)
class Reply:
    """Reply of tools, an environment or an agent to a turn."""

    tokens: NDArray[np.int32] | None
    """Tokens between the turn and the next; None: the trajectory has ended."""
    images: PromptImages | None = None
    """Images in the tokens."""
    messages: list[Message] = field(default_factory=list)
    """Messages without image files."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counts of `columns.OF_TURNS`, and ``tool_ms``: milliseconds of the slowest call."""
    rewards: list[float] = field(default_factory=list)
    """Rewards of the turn from tools and environment."""
    numbers: dict[str, float] = field(default_factory=dict)
    """``score``, if the trajectory scores itself, and other numbers."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Data of verl tools for the scorer."""
    failed: str = ""
    """Error that ended the trajectory, if it was not caused by the policy."""


class Trajectory(Protocol):
    """Trajectory (protocol; see `conversations.Conversation`)."""

    num_turns: int
    counts: Counter[str]

    @property
    def last_turn(self) -> NDArray[np.int32]:
        """Token ids of the last turn."""


@dataclass
class _Open:
    """Trajectory whose last turn waits for a reply."""

    end_token: int | None
    said: Parsed


class Answering:
    """Tools, environments and agents of a run for one engine. executors: on the leader of the replica only."""

    def __init__(
        self,
        cfg: MultiTurnConfig,
        encoder: ChatEncoder,
        call_format: CallFormat,
        replica: Replica,
        executors: ExecutorPool | None,
        max_model_len: int,
    ) -> None:
        self.max_model_len = max_model_len
        self._cfg, self._encoder, self._format = cfg, encoder, call_format
        # If neither tools nor environment have state, a turn without calls ends the trajectory, and no executor is
        # notified.
        self._stateless = not (cfg.environment or cfg.tool_config_path)
        self._replica, self._executors = replica, executors
        self._turn_delta = TurnDelta(encoder, encoder.tools, call_format)
        self.stop_token_ids = self._turn_delta.stop_token_ids
        """All tokens that end a turn."""
        self._row: Callable[[int], PromptRow]
        self._seeds: NDArray[np.uint64]
        # The numbers of the trajectories at the executors, in both directions, and the last turns that wait for a
        # reply.
        self._numbers: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._open: dict[Key, _Open] = {}
        self._num_looks = 0

    def begin(self, row: Callable[[int], PromptRow], seeds: NDArray[np.uint64]) -> None:
        """Start a task. row: returns the row of a prompt index. seeds [prompts]: seeds for environments."""
        # Rows are cached, because every turn needs one, and building a row took longer than parsing a turn.
        self._row, self._seeds = cache(row), seeds
        self.reset()

    def reset(self) -> None:
        """Drop all trajectories."""
        self._open, self._numbers, self._keys = {}, {}, {}
        if self._executors:
            self._executors.close_all()

    def printed(self) -> str:
        """Return the output that tools and agents have printed since the last call."""
        return self._executors.take_printed() if self._executors else ""

    def request_reply(self, key: Key, trajectory: Trajectory, reason: str) -> bool:
        """Request a reply to a turn that has ended. Returns True if a reply will arrive, possibly only to end the
        trajectory.

        reason: `Turn.reason`.
        """
        row = self._row(key[0])
        agent = self._encoder.row_tools.agent_of(row)
        if agent == SINGLE_TURN:
            return False
        tokens, tools = trajectory.last_turn.tolist(), self._encoder.row_tools.of(row)
        said, finish = self._read(tokens, reason, trajectory.num_turns, tools)
        if self._ends_by_itself(agent):
            if finish != "stop":
                trajectory.counts.update({c.TOOL_CALLS: len(said.calls), c.CALLS_NOT_RUN: len(said.calls)})
            if finish != "stop" or not (said.calls or said.problems):
                self.discard(key)
                return False
        # A turn that was ended by a stop text has no end token.
        ended = reason == "stop" and tokens and tokens[-1] in self.stop_token_ids
        self._open[key] = _Open(tokens[-1] if ended else None, said)
        if self._executors:
            calls = [ToolCall(call.name, call.arguments) for call in said.calls]
            self._notify(key, Said(said.text, calls, said.problems, said.reasoning, finish), agent, tools)
        return True

    def _ends_by_itself(self, agent: str) -> bool:
        return self._stateless and not is_plugin(agent)

    def _read(self, tokens: Sequence[int], reason: str, num_turns: int, tools: Schemas) -> tuple[Parsed, Any]:
        (text,) = self._encoder.decode_batch([tokens], special=True)
        call_format = self._format if tools else NO_CALLS
        said, most = call_format.parse(text, tools), self._cfg.max_assistant_turns
        if reason == "length":  # an incomplete call is ignored
            return Parsed([], [], said.text, said.reasoning), "length"
        return said, "turns" if most is not None and num_turns >= most else "stop"

    def _notify(self, key: Key, said: Said, agent: str, tools: Schemas) -> None:
        assert self._executors
        if key in self._numbers:
            self._executors.send_turn(self._numbers[key], said)
        else:
            row = self._row(key[0])
            content = {"data_source": row.data_source, "ground_truth": row.ground_truth, "extra_info": row.extra_info}
            place = agent if is_plugin(agent) else None
            names = tuple(schema["function"]["name"] for schema in tools)
            number = self._executors.start(
                TrajectoryStart(row.prompt, content, int(self._seeds[key[0]]), place, names), said
            )
            self._numbers[key], self._keys[number] = number, key

    def end_without_room(self, key: Key) -> bool:
        """Handle a reply that leaves no room for another turn. Returns True if the trajectory must still report its
        end."""
        if self._ends_by_itself(self._encoder.row_tools.agent_of(self._row(key[0]))):
            self.discard(key)
            return False
        self._open[key] = _Open(None, Parsed([], [], "", ""))
        if self._executors:
            self._executors.send_turn(self._numbers[key], None)
        return True

    def discard(self, key: Key) -> None:
        """Discard the rest of a trajectory."""
        number = self._numbers.pop(key, None)
        if number is not None and self._executors:
            del self._keys[number]
            self._executors.close(number)

    def arrived(self, wait_s: float = 0.0) -> list[tuple[Key, Reply]]:
        """Return the replies that have arrived; all processes of a replica get the same.

        Raises ConfigError if no turn can get a reply because user code cannot be imported.
        """
        self._num_looks += 1
        if not self._open or (self._replica.size > 1 and not wait_s and self._num_looks % _ASKS_PER_LOOK):
            return []
        news = self._executors.poll(wait_s) if self._executors else ()
        replies: list[tuple[Key, Reply]] = self._replica.agree(
            [(self._keys[each.number], self._reply(each)) for each in news if each.number in self._keys]
        )
        for key, reply in replies:
            del self._open[key]
            if reply.tokens is None:
                self._keys.pop(self._numbers.pop(key, -1), None)
        return replies

    def _reply(self, news: TrajectoryMessage) -> Reply:
        line, opened = news.line, self._open[self._keys[news.number]]
        if "failed" in line:
            return Reply(None, failed=str(line["failed"]))
        counts, rewards = Counter(line["counts"]), [float(reward) for reward in line["rewards"]]
        if "end" in line:
            return Reply(None, None, _without_files(line["messages"]), counts, rewards, line["end"], line["extra"])
        try:
            messages, images = self._opened(line["request"], counts)
            shown = _without_files(messages)
            context = self._turn_delta.context(opened.end_token, self._calls(opened.said, shown), shown)
            text = self._encoder.with_images(context, images)
        except DataError as error:
            self._executors.close(news.number)  # type: ignore[union-attr]
            return Reply(None, failed=str(error))
        return Reply(text.tokens, text.images, shown, counts, rewards)

    def _opened(self, messages: Sequence[Message], counts: Counter[str]) -> tuple[list[Message], list[Any]]:
        """Return the messages, and their images as processor input.

        An invalid image of a tool is replaced by an error text. Raises DataError for a user's image.
        """
        kept: list[Message] = []
        images: list[Any] = []
        for message in messages:
            try:
                opened = self._encoder.open_images([file_of(image) for image in images_in(message["content"])])
                for image in opened:
                    self._encoder.media.num_rows(image.size)
                images += opened
            except DataError as error:
                if message["role"] != "tool":
                    raise
                counts[c.TOOL_ERRORS] += 1
                message = message | {"content": f"Error: {error}"}
            kept.append(message)
        return kept, images

    def _calls(self, parsed: Parsed, messages: Sequence[Message]) -> list[Call]:
        """Return the calls to which the results in ``messages`` belong."""
        if not any(message["role"] == "tool" for message in messages):
            return []
        # A call that could not be parsed is replaced by a placeholder, because every result needs a call.
        return [*parsed.calls, *(Call("unreadable", {}) for _ in parsed.problems)]


def _without_files(messages: Sequence[Message]) -> list[Message]:
    return [message | {"content": without_files(message["content"])} for message in messages]
