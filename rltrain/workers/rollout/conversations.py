"""Conversations: the layer between the jobs of a task and the engine that runs them.

A response is a conversation of the policy with tools, an environment or an agent: tokens that are only ever appended,
some of them sampled. An engine knows only jobs and turns. This module appends ended turns to their conversation and
decides if another turn follows. Without tools a conversation ends with its first turn. With tools (`Answering`),
`Conversations.on_turn_end` requests the reply, `next_jobs` returns next turns before the jobs of the queue (a `Job` of
one sample, ``given`` all its tokens so far), and `wait` waits for replies.

A response carried over from an earlier step (``carry_over``) is a conversation that already has tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rltrain.agents.chat import Message
from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.data.images import EncodedPrompt, PromptImages
from rltrain.workers.rollout.answering import Answering, Reply
from rltrain.workers.rollout.contract import Job, Key, Turn
from rltrain.workers.rollout.queue import JobQueue

# Longest wait for a tool in seconds, after which an idle engine checks for a stop.
_WAIT_S = 0.05


@dataclass
class Conversation:
    """One response to a prompt, so far."""

    prompt_index: int
    """Prompt index in the task."""
    sample: int
    """Sample number of the prompt."""
    prompt: NDArray[np.int32]
    """Token ids [p]."""
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """[t]: tokens after the prompt."""
    mask: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """[t]: True if the policy sampled the token."""
    log_probs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """[mask.sum()]: log-probs of the sampled tokens (`Turn.log_probs`)."""
    experts: list[NDArray[np.integer[Any]]] = field(default_factory=list)
    """Routing of the computed tokens of prompt and response (`Turn.experts`)."""
    images: PromptImages | None = None
    """Images in ``tokens``, from tools, an environment or an agent."""
    truncated: bool = False
    """True if its last turn ended at the length limit, not with an end token."""
    aborted: bool = True
    """True if its last turn is incomplete."""
    seconds: float = 0.0
    """End of its last turn, in seconds since the engine's call."""

    num_turns: int = 0
    """Turns that the policy has ended."""
    counts: Counter[str] = field(default_factory=Counter)
    """`Reply.counts`, summed."""
    rewards: list[float] = field(default_factory=list)
    """`Reply.rewards` of all replies."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """Sum of the rewards by turn, numbered from 1. Turns without rewards are missing."""
    messages_after: list[list[Message]] = field(default_factory=list)
    """Messages between each turn and the following one."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Joined `Reply.numbers`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Joined `Reply.extra`."""
    failed: str = ""
    """`Reply.failed`: error that ended the trajectory."""

    def on_reply(self, reply: Reply) -> None:
        """Record a reply to a turn."""
        self.counts += reply.counts
        self.rewards += reply.rewards
        self.turn_rewards[self.num_turns] = self.turn_rewards.get(self.num_turns, 0.0) + sum(reply.rewards)
        self.numbers, self.extra, self.failed = reply.numbers, reply.extra, reply.failed

    def add_context(self, context: EncodedPrompt, messages: list[Message]) -> None:
        """Append tokens that the policy did not sample."""
        self.messages_after.append(messages)
        self._append(context)
        self.mask = np.concatenate([self.mask, np.zeros(len(context.tokens), dtype=np.bool_)])

    def _append(self, text: EncodedPrompt) -> None:
        whole = EncodedPrompt(self.tokens, self.images).followed_by(text)
        self.tokens, self.images = whole.tokens, whole.images

    def is_in_first_turn(self, waiting: Container[Key]) -> bool:
        """Return True if no reply was requested yet. waiting: conversations that wait for one."""
        return bool(self.mask.all()) and (self.prompt_index, self.sample) not in waiting

    def reset(self) -> None:
        """Reset to the start of the response."""
        empty = Conversation(self.prompt_index, self.sample, self.prompt)
        self.tokens, self.images, self.mask, self.log_probs = empty.tokens, None, empty.mask, empty.log_probs
        self.experts = []

    def record_experts(self, turn: Turn) -> None:
        """Record the routing of the tokens that a turn has computed, replacing earlier entries for them."""
        if turn.experts:
            before = np.concatenate(self.experts)[: turn.num_reused] if turn.num_reused else None
            self.experts = [*([] if before is None else [before]), *turn.experts]

    @property
    def last_turn(self) -> NDArray[np.int32]:
        """Token ids of the last turn, including its tokens from an earlier step."""
        context = np.flatnonzero(~self.mask)
        return self.tokens[context[-1] + 1 if len(context) else 0 :]

    def add_sampled(self, tokens: NDArray[np.int32], log_probs: NDArray[np.float32]) -> None:
        """Append tokens that the policy sampled."""
        self._append(EncodedPrompt(tokens))
        self.mask = np.concatenate([self.mask, np.ones(len(tokens), dtype=np.bool_)])
        self.log_probs = np.concatenate([self.log_probs, log_probs])


@dataclass
class _Started:
    """Job that an engine has taken."""

    job: Job
    """The job without its images: it is kept until the call ends, and pixels are large."""
    conversations: list[Conversation]
    num_running: int


class Conversations:
    """`Source` of an engine: jobs of ``queue``, whose responses are kept.

    begun: conversations to continue, by prompt index and sample. vocabulary: number of token ids. finished: called when
    the last conversation of a job ends, unless one was aborted (a later step restarts or continues it). answering:
    replies to turns (None: single turn), with the maximum tokens of a response. images: function that returns the
    images of a prompt, by its index, while one of its jobs runs.

    A turn with a token outside the vocabulary or a non-finite log-prob is not appended; its conversation ends, and it
    is counted.
    """

    def __init__(
        self,
        queue: JobQueue,
        vocabulary: int,
        begun: Mapping[tuple[int, int], Conversation] | None = None,
        finished: Callable[[Job, list[Conversation]], None] | None = None,
        answering: tuple[Answering, int] | None = None,
        images: Callable[[int], PromptImages | None] = lambda prompt_index: None,
    ) -> None:
        self.num_damaged = 0
        """Turns that were not appended."""
        self.num_unknown = 0
        """Tokens outside the vocabulary."""
        self.num_follow_up_tokens = 0
        """Context tokens at the start of turns after the first, including prompts."""
        self.num_reused_tokens = 0
        """Follow-up tokens that the engine did not recompute."""
        self.waited_s = 0.0
        """Seconds in which the engine was idle because its conversations waited for replies."""
        self.all: list[Conversation] = []
        """All conversations, in the order in which the engine took them."""
        self._queue = queue
        self._vocabulary = vocabulary
        self._begun = begun or {}
        self._finished = finished
        self._images = images
        self._answering = answering[0] if answering else None
        self._max_tokens = answering[1] if answering else 0
        # Conversations that wait for a tool, and the keys of conversations whose reply has arrived, in order of
        # arrival.
        self._waiting: dict[Key, tuple[_Started, Conversation]] = {}
        self._ready: list[Key] = []
        self._running: dict[Key, tuple[_Started, Conversation]] = {}

    def next_jobs(self, most: int) -> list[Job]:
        """Return next turns of conversations, then new jobs from `JobQueue.next_jobs`."""
        self._listen()
        ready, self._ready = self._ready[:most], self._ready[most:]
        return [*map(self._next_turn, ready), *self._take_new(most - len(ready))]

    def _take_new(self, most: int) -> list[Job]:
        jobs = self._queue.next_jobs(most)
        for job in jobs:
            keys = [(job.prompt_index, sample) for sample in job.samples.tolist()]
            conversations = [self._begun.get(key) or Conversation(*key, job.prompt) for key in keys]
            self.all += conversations
            started = _Started(replace(job, images=None), conversations, len(keys))
            self._running.update((key, (started, answer)) for key, answer in zip(keys, conversations, strict=True))
        return jobs

    def on_turn_end(self, turn: Turn) -> None:
        """Append the turn to its conversation."""
        started, conversation = self._running.pop((turn.prompt_index, turn.sample))
        if conversation.num_turns:
            self.num_follow_up_tokens += len(conversation.prompt) + len(conversation.tokens)
            self.num_reused_tokens += turn.num_reused
        tokens, log_probs = np.array(turn.tokens, dtype=np.int32), np.array(turn.log_probs, dtype=np.float32)
        unknown = (tokens < 0) | (tokens >= self._vocabulary)
        damaged = bool(unknown.any()) or not np.isfinite(log_probs).all()
        if damaged:
            self.num_damaged += 1
            self.num_unknown += int(unknown.sum())
        else:
            conversation.add_sampled(tokens, log_probs)
        conversation.truncated, conversation.aborted = turn.reason == "length", turn.aborted
        conversation.seconds = turn.seconds
        conversation.record_experts(turn)
        conversation.num_turns += 1
        if not self._is_answered(started, conversation, turn, whole=not (turn.aborted or damaged)):
            self._over(started)

    def _is_answered(self, started: _Started, conversation: Conversation, turn: Turn, *, whole: bool) -> bool:
        """Request a reply. Returns True if the conversation continues or still has to report its end."""
        if self._answering is None:
            return False
        key = turn.prompt_index, turn.sample
        if not whole:
            self._answering.discard(key)
            return False
        if not self._answering.request_reply(key, conversation, turn.reason):
            return False
        # If the engine stops before the reply, the conversation is incomplete.
        conversation.aborted = True
        self._waiting[key] = started, conversation
        return True

    def _listen(self, wait_s: float = 0.0) -> None:
        for key, reply in self._answering.arrived(wait_s) if self._answering else ():
            started, conversation = self._waiting[key]
            conversation.on_reply(reply)
            if reply.tokens is not None and len(reply.tokens) < self._room(conversation):
                conversation.add_context(EncodedPrompt(reply.tokens, reply.images), reply.messages)
                self._ready.append(key)
                continue
            # The reply is dropped, because a response must end with a token of the policy.
            conversation.truncated |= reply.tokens is not None
            if reply.tokens is None or not self._answering.end_without_room(key):  # type: ignore[union-attr]
                del self._waiting[key]
                conversation.aborted = False
                self._over(started)

    def is_pending(self, prompt_index: int, sample: int) -> bool:
        """Return True if a conversation waits for its next turn."""
        _, conversation = self._waiting.get((prompt_index, sample), (None, None))
        # After a truncated turn, or a reply that leaves no room, the conversation only waits for the report of its end.
        return conversation is not None and not conversation.truncated

    def _room(self, conversation: Conversation) -> int:
        """Return the number of tokens that may still be appended to the response."""
        assert self._answering
        most = min(self._max_tokens, self._answering.max_model_len - len(conversation.prompt))
        return most - len(conversation.tokens)

    def _next_turn(self, key: Key) -> Job:
        started, conversation = self._running[key] = self._waiting.pop(key)
        seeds = started.job.seeds[started.job.samples == conversation.sample]
        samples = np.array([conversation.sample])
        images, given = self._images(conversation.prompt_index), (conversation.tokens,)
        turn_images = (images, conversation.images, True)
        return Job(conversation.prompt_index, samples, conversation.prompt, seeds, given, *turn_images)

    def _over(self, started: _Started) -> None:
        started.num_running -= 1
        if not started.num_running and not any(answer.aborted for answer in started.conversations):
            self._queue.on_job_end(started.job)
            if self._finished:
                self._finished(started.job, started.conversations)

    def wait(self) -> bool:
        """Wait up to _WAIT_S for a reply. Returns True if conversations wait for tools."""
        if not self._waiting or self._queue.stopped():
            return False
        if not self._ready:
            started = time.perf_counter()
            self._listen(_WAIT_S)
            self.waited_s += time.perf_counter() - started
        return bool(self._waiting)

    def discard_interrupted(self) -> int:
        """Reset trajectories that were aborted after their first turn, because their tools and environments are not
        kept. Returns their number."""
        gone = [answer for answer in self.all if answer.aborted and not answer.is_in_first_turn(self._waiting)]
        for answer in gone:
            answer.reset()
        return len(gone)

    @property
    def may_stop(self) -> bool:
        """See `JobQueue.may_stop`."""
        return self._queue.may_stop

    def stopped(self) -> bool:
        """See `JobQueue.stopped`."""
        return self._queue.stopped()


def begun_conversations(batch: Batch, prompts: Sequence[NDArray[np.int32]], num_samples: int) -> list[Conversation]:
    """Return the conversations of partial responses. batch: `columns.ANSWER`, and ``slot`` (prompt index * n + sample).

    prompts: prompts by prompt index.
    """
    columns = [batch.ragged(name).rows() for name in (c.RESPONSE, c.RESPONSE_MASK, c.ROLLOUT_LOG_PROBS)]
    conversations = []
    for slot, *parts in zip(batch.dense(c.SLOT).tolist(), *columns, strict=True):
        prompt_index, sample = divmod(slot, num_samples)
        conversations.append(
            Conversation(prompt_index, sample, prompts[prompt_index], *(part.numpy() for part in parts))
        )
    return conversations


def payload_of(conversations: Sequence[Conversation]) -> Batch:
    """Return prompts and `columns.ANSWER` of conversations (at least one), which are sorted by prompt index."""
    places, prompts = zip(*{answer.prompt_index: answer.prompt for answer in conversations}.items(), strict=True)
    index = np.searchsorted(places, [answer.prompt_index for answer in conversations])
    rows = _ragged([np.array(prompt, dtype=np.int32) for prompt in prompts])
    return Batch(
        {
            c.PROMPT: DictionaryColumn(rows, torch.from_numpy(index)),
            c.RESPONSE: _ragged([answer.tokens for answer in conversations]),
            c.RESPONSE_MASK: _ragged([answer.mask for answer in conversations]),
            c.ROLLOUT_LOG_PROBS: _ragged([answer.log_probs for answer in conversations]),
        }
    )


def routed_experts_of(conversations: Sequence[Conversation]) -> Ragged:
    """Return `columns.ROUTED_EXPERTS` of conversations. Aborted and damaged conversations lack the routing of some
    tokens, which is set to 0.

    Raises RuntimeError if the routing of any other token is missing.
    """
    num_routed = next(
        (answer.experts[0] for answer in conversations if answer.experts), np.zeros((0, 0, 0), dtype=np.uint8)
    )
    shape, dtype = num_routed.shape[1:], num_routed.dtype
    rows: list[NDArray[np.integer[Any]]] = []
    for answer in conversations:
        needed = len(answer.prompt) + max(len(answer.tokens) - 1, 0)
        row = np.concatenate(answer.experts)[:needed] if answer.experts else None
        have = 0 if row is None else len(row)
        if have < needed and len(answer.tokens) and not answer.aborted:
            raise RuntimeError(
                f"the rollout engine returned the experts of {have} of the {needed} tokens of a response"
            )
        rows.append(np.zeros((0, *shape), dtype) if row is None else row)
        rows.append(np.zeros((needed - have, *shape), dtype))
    lengths = [len(first) + len(second) for first, second in zip(rows[::2], rows[1::2], strict=True)]
    return Ragged(torch.from_numpy(np.concatenate(rows)), torch.tensor(lengths, dtype=torch.long))


def answer_numbers(conversations: Sequence[Conversation], num_samples: int) -> dict[str, NDArray[Any]]:
    """Return the numbers of every response for the driver, one value per conversation. num_samples: per prompt."""
    policy_tokens = np.array([len(answer.log_probs) for answer in conversations], dtype=np.int64)
    return {
        c.SLOT: np.array([answer.prompt_index * num_samples + answer.sample for answer in conversations]),
        c.PROMPT_LENGTH: np.array([len(answer.prompt) for answer in conversations]),
        c.RESPONSE_LENGTH: np.array([len(answer.tokens) for answer in conversations]),
        c.POLICY_TOKENS: policy_tokens,
        c.LOSS_TOKENS: policy_tokens,
        c.TRUNCATED: np.array([answer.truncated for answer in conversations]),
        c.ABORTED: np.array([answer.aborted for answer in conversations]),
        c.ENDED_S: np.array([answer.seconds for answer in conversations], dtype=np.float32),
    }


def turn_numbers(conversations: Sequence[Conversation]) -> dict[str, NDArray[Any]]:
    """Return `columns.OF_SEVERAL_TURNS`, one value per conversation."""
    counts = [answer.counts for answer in conversations]
    numbers: dict[str, NDArray[Any]] = {name: np.array([each[name] for each in counts]) for name in c.OF_TURNS}
    seconds = np.array([each["tool_ms"] / 1e3 for each in counts], dtype=np.float32)
    numbers[c.ANSWER_IMAGES] = np.array([len(answer.images or ()) for answer in conversations])
    of_images = [answer.images.num_rows.sum() if answer.images else 0 for answer in conversations]
    numbers[c.ANSWER_IMAGE_ROWS] = np.array(of_images, dtype=np.int64)
    numbers[c.AGENT_FAILED] = np.array([bool(answer.failed) for answer in conversations])
    return numbers | {c.NUM_TURNS: np.array([answer.num_turns for answer in conversations]), c.TOOL_S: seconds}


def _ragged(rows: Sequence[NDArray[np.generic]]) -> Ragged:
    return Ragged(torch.from_numpy(np.concatenate(rows)), torch.tensor([len(row) for row in rows], dtype=torch.long))
