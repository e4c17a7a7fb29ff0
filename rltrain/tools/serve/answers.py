"""Answers while they are generated: their tokens, their text so far, when they end; and the queue of those to come.

The engine's thread writes here token by token; whoever asked waits in the server's loop and is told from here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from tokenizers.decoders import DecodeStream

from rltrain.base.seeds import sample_seeds
from rltrain.data.images import EncodedPrompt
from rltrain.tools.serve.requests import Wanted
from rltrain.workers.rollout.contract import Job, Turn

log = logging.getLogger(__name__)
_ENDS = "the server ends"


class TokenLogProb(NamedTuple):
    """A token that was drawn or given, and what else could have stood there."""

    token: int
    log_prob: float | None
    """None: nothing stands before it."""
    top: list[tuple[int, float]]
    """The likeliest tokens, likeliest first, with their log-probs."""


class Piece(NamedTuple):
    """News of an answer: the text that was added, or its end."""

    answer: Answer
    text: str
    log_probs: list[TokenLogProb]
    ended: bool


class Asked:
    """A prompt with the answers to it that are wanted. news: where whoever asked waits, in ``loop``.

    text: of the prompt, where it was one.
    """

    def __init__(
        self,
        prompt: EncodedPrompt,
        wanted: Wanted,
        first_choice: int,
        loop: asyncio.AbstractEventLoop,
        news: asyncio.Queue[Piece | Exception],
        text: str | None = None,
    ) -> None:
        self.text = text
        self.prompt, self.wanted, self._loop, self._news = prompt, wanted, loop, news
        self.first_choice = first_choice
        self.prompt_log_probs: list[TokenLogProb] = []
        self.given_up = False
        # Drawn otherwise than other answers only where this differs.
        self.way = replace(wanted.sampling, max_tokens=0, ignore_eos=False)

    @property
    def wants_prompt_log_probs(self) -> bool:
        """Whether log-probs of the prompt's own tokens are a part of the reply."""
        return self.wanted.echo and self.wanted.num_top is not None

    def tell(self, news: Piece | Exception) -> None:
        """May be called in any thread."""
        # The loop is closed where the server has ended.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.put_nowait, news)

    def jobs(self, most_rows: int) -> list[tuple[Job, list[Answer]]]:
        """Work for the engine, in parts that fit into it."""
        number = self.wanted.num_choices
        seed = secrets.randbits(63) if self.wanted.seed is None else self.wanted.seed % (1 << 63)
        seeds = sample_seeds(seed, 0, [0], number).reshape(-1)
        parts = np.array_split(np.arange(number), -(-number // most_rows))
        prompt = self.prompt
        return [
            (
                Job(0, part, prompt.tokens, seeds[part], images=prompt.images),
                [Answer(self, self.first_choice + choice) for choice in part.tolist()],
            )
            for part in parts
        ]


class Answer:
    """One choice. Whoever reads it after its end sees it whole."""

    def __init__(self, asked: Asked, choice: int) -> None:
        self.asked, self.choice = asked, choice
        self.tokens: list[int] = []
        self.log_probs: list[TokenLogProb] = []
        self.finish = "length"
        self.text = ""
        """All of it at the end; before, only where somebody looks at it token by token."""
        self._follows = asked.wanted.stream or bool(asked.wanted.stop)
        self._decoder = DecodeStream(skip_special_tokens=asked.wanted.skip_special_tokens)
        self._sent = self._sent_log_probs = 0

    def add(self, token: int, log_prob: TokenLogProb | None, is_end: bool, tokenizer: Any) -> bool:
        """Take a token. Returns whether the answer ends with it. tokenizer: of transformers."""
        wanted = self.asked.wanted
        self.tokens.append(token)
        if log_prob:
            self.log_probs.append(log_prob)
        ends = (is_end and not wanted.sampling.ignore_eos) or token in wanted.stop_token_ids
        stop_at = self._follow(token, tokenizer) if self._follows and not ends else None
        if ends or stop_at is not None:
            self.finish = "stop"
        elif len(self.tokens) < wanted.sampling.max_tokens and not self.asked.given_up:
            self._send()
            return False
        self._end(stop_at, tokenizer, without_last=ends)
        return True

    def _follow(self, token: int, tokenizer: Any) -> int | None:
        """Add what the token adds to the text. Returns where a text that ends answers begins, if one does."""
        before = len(self.text)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            self.text = self._whole(self.tokens, tokenizer)
        else:
            self.text += self._piece(backend, token)
        stops = self.asked.wanted.stop
        places = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in stops]
        return min((place for place in places if place >= 0), default=None)

    def _piece(self, backend: Any, token: int) -> str:
        """What a token adds; of bytes that are no text the decoder loses its place, and the end sets the text right."""
        for _ in range(2):
            try:
                return self._decoder.step(backend, token) or ""
            except Exception as error:  # noqa: BLE001 - tokenizers has no class of its own for it
                log.debug("the text of an answer is decoded anew from here: %s", error)
                self._decoder = DecodeStream(skip_special_tokens=self.asked.wanted.skip_special_tokens)
        return ""

    def _whole(self, tokens: Sequence[int], tokenizer: Any) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=self.asked.wanted.skip_special_tokens))

    def _send(self) -> None:
        """Tell what is certain: a text that may be the beginning of one that ends the answer is not."""
        if not self.asked.wanted.stream:
            return
        certain = len(self.text) - held_back(self.text, self.asked.wanted.stop)
        if certain > self._sent:
            self._tell(certain, ended=False)

    def _end(self, stop_at: int | None, tokenizer: Any, *, without_last: bool) -> None:
        if stop_at is not None:
            self.text = self.text[:stop_at]
        else:
            # An end token is no text, whether the tokenizer calls it special or not.
            self.text = self._whole(self.tokens[:-1] if without_last else self.tokens, tokenizer)
        self._tell(len(self.text), ended=True)

    def _tell(self, until: int, *, ended: bool) -> None:
        piece = Piece(self, self.text[self._sent : until], self.log_probs[self._sent_log_probs :], ended)
        self._sent, self._sent_log_probs = until, len(self.log_probs)
        self.asked.tell(piece)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of a text with which one of the others begins."""
    longest = max(map(len, stops), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((length for length in lengths if any(stop.startswith(text[-length:]) for stop in stops)), 0)


@dataclass
class AnswerQueue:
    """The work of the engine: a `workers.rollout.contract.Source` that goes on as long as requests come."""

    most_rows: int = 1
    """Answers that the engine generates at once; known when it stands."""
    _ready: threading.Condition = field(default_factory=threading.Condition)
    _unread: deque[Asked] = field(default_factory=deque)
    """Prompts whose own log-probs are wanted first."""
    _reading: list[Asked] = field(default_factory=list)
    """Those of them that the engine has taken last."""
    _jobs: deque[tuple[Job, list[Answer]]] = field(default_factory=deque)
    _running: list[Answer | None] = field(default_factory=list)
    """By number of the engine's turns; None: it has ended."""
    _drained: bool = False
    _closed: bool = False

    def put(self, asked: Asked) -> None:
        """Ask the engine. May be called in any thread."""
        with self._ready:
            if self._closed:
                asked.tell(ConnectionError(_ENDS))
            elif asked.wants_prompt_log_probs:
                self._unread.append(asked)
            else:
                self.was_read(asked)
            self._ready.notify()

    def close(self) -> None:
        """No more is answered, and whoever waits is told."""
        with self._ready:
            self._closed = True
            left = [*self._unread, *self._reading, *(answers[0].asked for _, answers in self._jobs)]
            left += [answer.asked for answer in self._running if answer]
            self._unread.clear()
            self._jobs.clear()
            self._ready.notify()
        for asked in left:
            asked.tell(ConnectionError(_ENDS))

    def await_work(self) -> bool:
        """Wait until there is work. False: there will be none."""
        with self._ready:
            self._ready.wait_for(lambda: self._closed or self._unread or self._jobs)
            self._running, self._drained = [], False
            return not self._closed

    def take_unread(self, most_tokens: int) -> list[Asked]:
        """Prompts of at most so many tokens together, or one, whose own log-probs are wanted."""
        with self._ready:
            self._reading = taken = list[Asked]()
            while self._unread and (not taken or len(self._unread[0].prompt.tokens) <= most_tokens):
                taken.append(self._unread.popleft())
                most_tokens -= len(taken[-1].prompt.tokens)
        return taken

    def was_read(self, asked: Asked) -> None:
        """The log-probs of a prompt are known, or not wanted: what is wanted behind it follows, if anything is."""
        if asked.wanted.sampling.max_tokens:
            with self._ready:
                self._jobs += asked.jobs(self.most_rows)
            return
        for choice in range(asked.wanted.num_choices):
            asked.tell(Piece(Answer(asked, asked.first_choice + choice), "", [], True))

    def running(self, number: int) -> Answer | None:
        """The answer that the engine's turn of this number is; None where it has ended."""
        return self._running[number]

    def end(self, number: int) -> None:
        """The answer has ended."""
        self._running[number] = None

    def take(self, most: int) -> list[Job]:
        """See `Source`."""
        jobs: list[Job] = []
        with self._ready:
            while not self._drained and self._jobs and len(self._jobs[0][1]) <= most:
                job, answers = self._jobs.popleft()
                if answers[0].asked.given_up:
                    continue
                # The engine numbers its turns in the order in which it takes them.
                self._running += answers
                jobs.append(job)
                most -= len(answers)
        return jobs

    def ended(self, turn: Turn) -> None:
        """See `Source`. Whoever asked was told with the last token."""

    def goes_on(self, place: int, sample: int) -> bool:
        """See `Source`."""
        return False

    def wait(self) -> bool:
        """See `Source`."""
        with self._ready:
            self._drained = not (self._jobs or self._unread) or self._closed
            return not self._drained

    @property
    def may_stop(self) -> bool:
        """See `Source`."""
        return True

    def stopped(self) -> bool:
        """See `Source`."""
        return self._closed
