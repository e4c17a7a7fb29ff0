"""Which prompts a step starts, and what happens to unfinished ones when it has enough (`rollout.tail`).

Problem: the longest answers keep all engines waiting. Choice: a step starts more prompts than it needs and stops when
enough are complete. Unfinished prompts wait in a line, in front of new ones: ``oversample`` answers them anew,
``carry_over`` continues their answers. An age limit forces completion, so that long answers are not lost from the
data. Line and answers are part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rltrain.base.columns import names as c
from rltrain.config.schema import Config
from rltrain.controller.samples import Request, Samples
from rltrain.trainer.balance import Ids
from rltrain.trainer.metrics import Metrics
from rltrain.trainer.plan import Plan
from rltrain.workers.rollout.waiting import KEPT

State = list[list[int]]


@dataclass(frozen=True)
class Prompt:
    """A prompt that was drawn and not yet learnt from."""

    row: int
    """Its place in the data."""
    draw: int
    """Its draw (from 1), which decides its random numbers in every attempt."""
    age: int = 0
    """The number of steps that have ended without it."""
    answers: Samples | None = None
    """Complete and begun ones, with the numbers of `KEPT` (carry_over)."""


class PromptLine:
    """Prompts on their way into a batch, oldest first. With ``tail=off`` none ever waits."""

    def __init__(self, cfg: Config, plan: Plan) -> None:
        rollout = cfg.actor_rollout_ref.rollout
        self.stops_early = rollout.stops_early
        self._carries = rollout.tail == "carry_over"
        self._max_age = rollout.tail_max_age
        self._num_started = plan.prompts_started
        self._wanted = plan.prompts_per_step
        self._n = plan.answers_per_prompt
        self._waiting: list[Prompt] = []

    def next_prompts(self, draw: Callable[[], list[Prompt]]) -> list[Prompt]:
        """The prompts of a step: waiting ones, then new ones."""
        # Whole draws are added, because a sampler is asked once per draw; what is too much waits for the next step.
        while len(self._waiting) < self._num_started:
            self._waiting += draw()
        started, self._waiting = self._waiting[: self._num_started], self._waiting[self._num_started :]
        return started

    def terms(self, started: Sequence[Prompt]) -> dict[str, Any]:
        """Fields of the `GenerateTask`: when to stop, and which answers are still missing."""
        if not self.stops_early:
            return {}
        todo = np.ones((len(started), self._n), dtype=bool)
        for place, prompt in enumerate(started):
            if prompt.answers:
                todo[place] = ~prompt.answers[c.COMPLETE]
        # With 0 no replica would begin a job, and the step would have no answer to place or to measure.
        enough = max(1, self._wanted - int((~todo.any(1)).sum()))
        return {"enough": enough, "must": self._num_waited_for(started), "todo": todo if self._carries else None}

    def _num_waited_for(self, started: Sequence[Prompt]) -> int:
        """How many (of the first) prompts the step must wait for.

        carry_over: the prompts over the age limit. oversample: if any prompt is over it, all prompts thrown away
        before, since a step that lasts long anyway may as well complete them.
        """
        # The line is oldest first, so these are the first prompts and their number says which they are.
        old = [prompt for prompt in started if prompt.age >= self._max_age]
        if old and not self._carries:
            old = [prompt for prompt in started if prompt.age]
        return min(len(old), self._wanted)

    def begun(self, started: Sequence[Prompt]) -> Request | None:
        """Payload and ``slot`` (place * n + sample) of the answers to continue."""
        # Only answers that have tokens and lack some: complete ones need no engine, and those without a token start as
        # if new.
        pieces, ids = [], []
        for place, prompt in enumerate(started):
            if prompt.answers:
                open_ids = np.flatnonzero(~prompt.answers[c.COMPLETE] & (prompt.answers[c.RESPONSE_LENGTH] > 0))
                pieces.append((prompt.answers, open_ids))
                ids.append(place * self._n + open_ids)
        if not sum(map(len, ids)):
            return None
        answers = Samples.join(pieces)
        answers.update({c.SLOT: np.concatenate(ids)})
        return answers.request(np.arange(len(answers)), c.ANSWER, [c.SLOT])

    def collect_complete(self, started: Sequence[Prompt], samples: Samples) -> tuple[Samples, Ids, Metrics]:
        """The batch (the first prompts in line that are complete), the ids of its samples, and metrics.

        The other prompts go to the front of the line.
        """
        n = self._n
        if self._carries:
            self._add_earlier(started, samples)
        complete = np.flatnonzero(samples[c.COMPLETE].reshape(-1, n).all(1))
        # First in line and not first to end, so that among complete prompts the oldest are learnt from first.
        chosen = complete[: self._wanted]
        left = np.setdiff1d(np.arange(len(started)), chosen)
        ids, left_ids = ((places[:, None] * n + np.arange(n)).ravel() for places in (chosen, left))
        batch = Samples.join([(samples, ids)])
        batch.update({c.GROUP: np.arange(len(chosen)).repeat(n)})
        metrics = {"rollout/tail/age_max": float(max(started[place].age for place in chosen.tolist()))}
        served = samples[c.SERVED]
        new_tokens = np.where(served, samples[c.POLICY_TOKENS], 0)
        if self._carries:
            metrics |= _staleness(batch)
            new_tokens -= np.where(served, samples[c.CARRIED_LENGTH], 0)
            metrics["rollout/tail/prompts_carried_over"] = float(len(left))
        else:
            metrics["rollout/tail/prompts_thrown_away"] = float(len(left))
            metrics["rollout/tail/tokens_thrown_away"] = float(new_tokens[left_ids].sum())
        metrics["rollout/tail/tokens_generated"] = float(new_tokens.sum())
        back = []
        for place in left.tolist():
            answers = self._aged(samples, place) if self._carries else None
            back.append(replace(started[place], age=started[place].age + 1, answers=answers))
        # In front, and in their order, so that the line stays oldest first.
        self._waiting = back + self._waiting
        return batch, ids, metrics

    def _add_earlier(self, started: Sequence[Prompt], samples: Samples) -> None:
        """Add the answers of earlier steps to those of this one."""
        nothing = np.zeros(len(samples), dtype=np.int64)
        # A copy for each: they are written to below, one by one.
        samples.update({name: nothing.copy() for name in (c.CARRIED_LENGTH, c.TOKEN_AGES, c.OLDEST)})
        for place, prompt in enumerate(started):
            if prompt.answers:
                ids = place * self._n + np.arange(self._n)
                for name in (c.TOKEN_AGES, c.OLDEST):
                    samples[name][ids] = prompt.answers[name]
                samples[c.CARRIED_LENGTH][ids] = prompt.answers[c.POLICY_TOKENS]
                unserved = np.flatnonzero(~samples[c.SERVED][ids])
                of_turns = [name for name in c.OF_SEVERAL_TURNS if name in samples.numbers]
                samples.adopt(prompt.answers, unserved, ids[unserved], [*KEPT, *of_turns])
        # A trajectory that was given up behind its first turn begins anew.
        anew = samples[c.SERVED] & (samples[c.POLICY_TOKENS] < samples[c.CARRIED_LENGTH])
        for name in (c.CARRIED_LENGTH, c.TOKEN_AGES, c.OLDEST):
            samples[name][anew] = 0

    def _aged(self, samples: Samples, place: int) -> Samples:
        """The answers of one prompt as the next step finds them, every token a step older."""
        answers = Samples.join([(samples, place * self._n + np.arange(self._n))])
        lengths = answers[c.POLICY_TOKENS]
        oldest = np.where(lengths > 0, answers[c.OLDEST] + 1, 0)
        answers.update({c.TOKEN_AGES: answers[c.TOKEN_AGES] + lengths, c.OLDEST: oldest})
        return answers

    def state(self) -> State:
        """Row, draw and age of every waiting prompt, for a checkpoint."""
        return [[prompt.row, prompt.draw, prompt.age] for prompt in self._waiting]

    def answers(self) -> Samples | None:
        """What waiting prompts have of answers, with ``slot``: place in the line * n + sample."""
        pieces, slots, places = [], [], np.arange(self._n)
        for place, prompt in enumerate(self._waiting):
            if prompt.answers:
                pieces.append((prompt.answers, places))
                slots.append(place * self._n + places)
        if not pieces:
            return None
        answers = Samples.join(pieces)
        answers.update({c.SLOT: np.concatenate(slots)})
        return answers

    def restore(self, state: State, answers: Samples | None = None) -> None:
        """Go on from ``state`` and `answers`."""
        answers_of = {}
        # Only carry_over continues answers, and a run may go on with another mode.
        if answers and self._carries:
            for ids in np.arange(len(answers)).reshape(-1, self._n):
                answers_of[int(answers[c.SLOT][ids[0]]) // self._n] = Samples.join([(answers, ids)])
        self._waiting = [Prompt(row, draw, age, answers_of.get(i)) for i, (row, draw, age) in enumerate(state)]


def _staleness(batch: Samples) -> Metrics:
    """Tokens that earlier policies sampled. staleness: age of a token in steps, mean over tokens and largest."""
    carried = batch[c.CARRIED_LENGTH]
    return {
        "rollout/tail/carried_tokens": float(carried.sum()),
        "rollout/tail/carried_samples": float((carried > 0).sum()),
        "rollout/tail/staleness/mean": float(batch[c.TOKEN_AGES].sum() / max(batch[c.POLICY_TOKENS].sum(), 1)),
        "rollout/tail/staleness/max": float(batch[c.OLDEST].max()),
    }
