"""Conversations: what stands between the jobs of a task and the engine that works on them.

An answer is a conversation of the policy with whatever answers back: tokens that are only ever appended, of which some
were sampled and the others were not. An engine knows jobs and turns alone; here a turn that has ended becomes part of
its conversation, and here it is decided what follows. Without tools nothing does: a conversation is over with its
first turn. Where tools answer (`Answering`), `Conversations.ended` asks them, `take` hands out the next turn of a
conversation in front of the queue's jobs (a `Job` of one sample, ``given`` all its tokens so far), and `wait` waits for
one.

An answer that an earlier step has begun (``carry_over``) is a conversation that is already some tokens long.
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
from rltrain.base.columns import names as c
from rltrain.base.columns.batch import Batch, DictionaryColumn
from rltrain.base.columns.ragged import Ragged
from rltrain.data.images import EncodedPrompt, PromptImages
from rltrain.workers.rollout.answering import Answering, Reply
from rltrain.workers.rollout.contract import Job, Key, Turn
from rltrain.workers.rollout.queue import JobQueue

# How long an engine with nothing to do waits for a tool before it looks whether it is to stop.
_WAIT_S = 0.05


@dataclass
class Conversation:
    """One answer to a prompt, as far as it is."""

    place: int
    """Of the prompt in the task."""
    sample: int
    """Its number among the answers to the prompt."""
    prompt: NDArray[np.int32]
    """Token ids [p]."""
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """[t]: what follows the prompt."""
    mask: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """[t]: the policy sampled it."""
    log_probs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """[mask.sum()]: of the sampled tokens (`Turn.log_probs`)."""
    experts: list[NDArray[np.integer[Any]]] = field(default_factory=list)
    """Where the tokens of prompt and answer went, as far as an engine has computed them (`Turn.experts`)."""
    images: PromptImages | None = None
    """Those among ``tokens``, which have come from tools, an environment or an agent."""
    truncated: bool = False
    """Its last turn ended for want of room, not by an end token."""
    aborted: bool = True
    """Its last turn has not ended by itself."""
    seconds: float = 0.0
    """When its last turn ended, since the call of the engine."""

    num_turns: int = 0
    """That the policy has ended."""
    counts: Counter[str] = field(default_factory=Counter)
    """`Reply.counts`, added up."""
    rewards: list[float] = field(default_factory=list)
    """`Reply.rewards`, of all replies."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """Their sum by turn, from 1; a turn that nobody has paid for has none."""
    said: list[list[Message]] = field(default_factory=list)
    """Behind each turn that another has followed."""
    numbers: dict[str, float] = field(default_factory=dict)
    """`Reply.numbers`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """`Reply.extra`."""
    failed: str = ""
    """`Reply.failed`."""

    def hear(self, reply: Reply) -> None:
        """Note what was said to a turn."""
        self.counts += reply.counts
        self.rewards += reply.rewards
        self.turn_rewards[self.num_turns] = self.turn_rewards.get(self.num_turns, 0.0) + sum(reply.rewards)
        self.numbers, self.extra, self.failed = reply.numbers, reply.extra, reply.failed

    def add_context(self, context: EncodedPrompt, messages: list[Message]) -> None:
        """Append what the policy did not sample."""
        self.said.append(messages)
        self._append(context)
        self.mask = np.concatenate([self.mask, np.zeros(len(context.tokens), dtype=np.bool_)])

    def _append(self, text: EncodedPrompt) -> None:
        whole = EncodedPrompt(self.tokens, self.images).followed_by(text)
        self.tokens, self.images = whole.tokens, whole.images

    def is_in_first_turn(self, waiting: Container[Key]) -> bool:
        """Whether nobody has been asked yet. waiting: those of which somebody is."""
        return bool(self.mask.all()) and (self.place, self.sample) not in waiting

    def forget(self) -> None:
        """Be as before the first token."""
        empty = Conversation(self.place, self.sample, self.prompt)
        self.tokens, self.images, self.mask, self.log_probs = empty.tokens, None, empty.mask, empty.log_probs
        self.experts = []

    def went_to(self, turn: Turn) -> None:
        """Note where the tokens that a turn has computed went, in the place of what was noted of them before."""
        if turn.experts:
            before = np.concatenate(self.experts)[: turn.num_reused] if turn.num_reused else None
            self.experts = [*([] if before is None else [before]), *turn.experts]

    @property
    def last_turn(self) -> NDArray[np.int32]:
        """Token ids of the last turn, an earlier step's among them."""
        context = np.flatnonzero(~self.mask)
        return self.tokens[context[-1] + 1 if len(context) else 0 :]

    def add_sampled(self, tokens: NDArray[np.int32], log_probs: NDArray[np.float32]) -> None:
        """Append what the policy sampled."""
        self._append(EncodedPrompt(tokens))
        self.mask = np.concatenate([self.mask, np.ones(len(tokens), dtype=np.bool_)])
        self.log_probs = np.concatenate([self.log_probs, log_probs])


@dataclass
class _Started:
    """A job that an engine has taken."""

    job: Job
    """Without its images: it is known until the call ends, and pixels are large."""
    conversations: list[Conversation]
    num_running: int


class Conversations:
    """The `Source` of an engine: jobs of ``queue``, whose answers are kept.

    begun: conversations that go on, by place and sample. vocabulary: the number of token ids. finished: called when
    the last conversation of a job is over, if none of them was given up: those that were are begun anew or go on in a
    later step. A turn with a token outside the vocabulary or a log-prob that is not finite is left out of its
    conversation, which ends, and counted. answering: who answers a turn (None: nobody), with the most tokens of an
    answer. images: of a prompt, by its place, while a job of it runs.
    """

    def __init__(
        self,
        queue: JobQueue,
        vocabulary: int,
        begun: Mapping[tuple[int, int], Conversation] | None = None,
        finished: Callable[[Job, list[Conversation]], None] | None = None,
        answering: tuple[Answering, int] | None = None,
        images: Callable[[int], PromptImages | None] = lambda place: None,
    ) -> None:
        self.num_damaged = 0
        """Turns that were left out."""
        self.num_unknown = 0
        """Tokens outside the vocabulary."""
        self.num_follow_up_tokens = 0
        """With which turns behind the first began, prompts included."""
        self.num_reused_tokens = 0
        """Of these, those that the engine did not compute again."""
        self.waited_s = 0.0
        """In which the engine had nothing running, because its conversations waited to be answered."""
        self.all: list[Conversation] = []
        """In the order in which the engine took them."""
        self._queue = queue
        self._vocabulary = vocabulary
        self._begun = begun or {}
        self._finished = finished
        self._images = images
        self._answering = answering[0] if answering else None
        self._max_tokens = answering[1] if answering else 0
        # Those that a tool is at work for, and of them those whose next turn may begin, the first to be answered first.
        self._waiting: dict[Key, tuple[_Started, Conversation]] = {}
        self._ready: list[Key] = []
        self._running: dict[Key, tuple[_Started, Conversation]] = {}

    def take(self, most: int) -> list[Job]:
        """The next turns of conversations, then as `JobQueue.take`."""
        self._listen()
        ready, self._ready = self._ready[:most], self._ready[most:]
        return [*map(self._next_turn, ready), *self._take_new(most - len(ready))]

    def _take_new(self, most: int) -> list[Job]:
        jobs = self._queue.take(most)
        for job in jobs:
            keys = [(job.place, sample) for sample in job.samples.tolist()]
            conversations = [self._begun.get(key) or Conversation(*key, job.prompt) for key in keys]
            self.all += conversations
            started = _Started(replace(job, images=None), conversations, len(keys))
            self._running.update((key, (started, answer)) for key, answer in zip(keys, conversations, strict=True))
        return jobs

    def ended(self, turn: Turn) -> None:
        """Append the turn to its conversation."""
        started, conversation = self._running.pop((turn.place, turn.sample))
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
        conversation.went_to(turn)
        conversation.num_turns += 1
        if not self._is_answered(started, conversation, turn, whole=not (turn.aborted or damaged)):
            self._over(started)

    def _is_answered(self, started: _Started, conversation: Conversation, turn: Turn, *, whole: bool) -> bool:
        """Whether somebody answers the turn, so that the conversation goes on or its end is still to be told."""
        if self._answering is None:
            return False
        key = turn.place, turn.sample
        if not whole:
            self._answering.give_up(key)
            return False
        if not self._answering.ask(key, conversation, turn.reason):
            return False
        # Where the engine is stopped meanwhile, it has not ended.
        conversation.aborted = True
        self._waiting[key] = started, conversation
        return True

    def _listen(self, wait_s: float = 0.0) -> None:
        for key, reply in self._answering.arrived(wait_s) if self._answering else ():
            started, conversation = self._waiting[key]
            conversation.hear(reply)
            if reply.tokens is not None and len(reply.tokens) < self._room(conversation):
                conversation.add_context(EncodedPrompt(reply.tokens, reply.images), reply.messages)
                self._ready.append(key)
                continue
            # An answer ends with a token of the policy.
            conversation.truncated |= reply.tokens is not None
            if reply.tokens is None or not self._answering.no_room(key):  # type: ignore[union-attr]
                del self._waiting[key]
                conversation.aborted = False
                self._over(started)

    def goes_on(self, place: int, sample: int) -> bool:
        """Whether a conversation waits for its next turn."""
        _, conversation = self._waiting.get((place, sample), (None, None))
        # Behind a turn that was cut off, and words that leave no room, only the end is waited for.
        return conversation is not None and not conversation.truncated

    def _room(self, conversation: Conversation) -> int:
        """Tokens that the answer may still get, as engines count them."""
        assert self._answering
        most = min(self._max_tokens, self._answering.max_model_len - len(conversation.prompt))
        return most - len(conversation.tokens)

    def _next_turn(self, key: Key) -> Job:
        started, conversation = self._running[key] = self._waiting.pop(key)
        seeds = started.job.seeds[started.job.samples == conversation.sample]
        samples = np.array([conversation.sample])
        images, given = self._images(conversation.place), (conversation.tokens,)
        said = (images, conversation.images, True)
        return Job(conversation.place, samples, conversation.prompt, seeds, given, *said)

    def _over(self, started: _Started) -> None:
        started.num_running -= 1
        if not started.num_running and not any(answer.aborted for answer in started.conversations):
            self._queue.ended(started.job)
            if self._finished:
                self._finished(started.job, started.conversations)

    def wait(self) -> bool:
        """Whether a conversation waits for tools. A little of the wait is spent here."""
        if not self._waiting or self._queue.stopped():
            return False
        if not self._ready:
            started = time.perf_counter()
            self._listen(_WAIT_S)
            self.waited_s += time.perf_counter() - started
        return bool(self._waiting)

    def begin_anew(self) -> int:
        """Take the tokens of trajectories that were given up behind their first turn: nobody keeps their tools and
        environments. How many there are."""
        gone = [answer for answer in self.all if answer.aborted and not answer.is_in_first_turn(self._waiting)]
        for answer in gone:
            answer.forget()
        return len(gone)

    @property
    def may_stop(self) -> bool:
        """See `JobQueue.may_stop`."""
        return self._queue.may_stop

    def stopped(self) -> bool:
        """See `JobQueue.stopped`."""
        return self._queue.stopped()


def begun_conversations(batch: Batch, prompts: Sequence[NDArray[np.int32]], num_samples: int) -> list[Conversation]:
    """Those of answers that have some tokens already. batch: `columns.ANSWER`, and ``slot`` (place * n + sample).

    prompts: by place.
    """
    columns = [batch.ragged(name).rows() for name in (c.RESPONSE, c.RESPONSE_MASK, c.ROLLOUT_LOG_PROBS)]
    conversations = []
    for slot, *parts in zip(batch.dense(c.SLOT).tolist(), *columns, strict=True):
        place, sample = divmod(slot, num_samples)
        conversations.append(Conversation(place, sample, prompts[place], *(part.numpy() for part in parts)))
    return conversations


def payload_of(conversations: Sequence[Conversation]) -> Batch:
    """Prompts and `columns.ANSWER` of conversations (at least one) that stand in the order of their places."""
    places, prompts = zip(*{answer.place: answer.prompt for answer in conversations}.items(), strict=True)
    index = np.searchsorted(places, [answer.place for answer in conversations])
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
    """`columns.ROUTED_EXPERTS` of conversations. Where one was given up, or damaged, zeros stand for what is not there.

    Raises RuntimeError where an engine has not told of all others.
    """
    told = next((answer.experts[0] for answer in conversations if answer.experts), np.zeros((0, 0, 0), dtype=np.uint8))
    shape, dtype = told.shape[1:], told.dtype
    rows: list[NDArray[np.integer[Any]]] = []
    for answer in conversations:
        needed = len(answer.prompt) + max(len(answer.tokens) - 1, 0)
        row = np.concatenate(answer.experts)[:needed] if answer.experts else None
        have = 0 if row is None else len(row)
        if have < needed and len(answer.tokens) and not answer.aborted:
            raise RuntimeError(f"the rollout engine told where {have} of {needed} tokens of an answer went")
        rows.append(np.zeros((0, *shape), dtype) if row is None else row)
        rows.append(np.zeros((needed - have, *shape), dtype))
    lengths = [len(first) + len(second) for first, second in zip(rows[::2], rows[1::2], strict=True)]
    return Ragged(torch.from_numpy(np.concatenate(rows)), torch.tensor(lengths, dtype=torch.long))


def answer_numbers(conversations: Sequence[Conversation], num_samples: int) -> dict[str, NDArray[Any]]:
    """What the driver gets of every answer, a value per conversation. num_samples: answers per prompt."""
    policy_tokens = np.array([len(answer.log_probs) for answer in conversations], dtype=np.int64)
    return {
        c.SLOT: np.array([answer.place * num_samples + answer.sample for answer in conversations]),
        c.PROMPT_LENGTH: np.array([len(answer.prompt) for answer in conversations]),
        c.RESPONSE_LENGTH: np.array([len(answer.tokens) for answer in conversations]),
        c.POLICY_TOKENS: policy_tokens,
        c.LOSS_TOKENS: policy_tokens,
        c.TRUNCATED: np.array([answer.truncated for answer in conversations]),
        c.ABORTED: np.array([answer.aborted for answer in conversations]),
        c.ENDED_S: np.array([answer.seconds for answer in conversations], dtype=np.float32),
    }


def turn_numbers(conversations: Sequence[Conversation]) -> dict[str, NDArray[Any]]:
    """`columns.OF_SEVERAL_TURNS`, a value per conversation."""
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
