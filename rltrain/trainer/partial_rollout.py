"""Prompts of a step, and prompts left unfinished by earlier steps (`rollout.tail`).

Problem: the longest responses keep all engines waiting. Choice: a step starts more prompts than it needs and stops when
enough are complete. Unfinished prompts are queued in front of new ones: ``oversample`` restarts their responses,
``carry_over`` continues them. An age limit forces completion, so that long responses stay in the training data. Queue
and partial responses are part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rltrain.common.columns import names as c
from rltrain.config.schema.rollout import RolloutConfig
from rltrain.runtime.samples import Request, Samples
from rltrain.trainer.batching.balance import Ids
from rltrain.trainer.metrics.step import Metrics
from rltrain.trainer.plan import Plan
from rltrain.workers.rollout.waiting import KEPT

State = list[list[int]]


@dataclass(frozen=True)
class Prompt:
    """Prompt that was drawn and not yet trained on."""

    row: int
    """Row of the prompt in the data."""
    draw: int
    """Draw number (from 1). It seeds the prompt's random numbers in every attempt."""
    age: int = 0
    """Number of steps that ended without the prompt."""
    answers: Samples | None = None
    """Complete and partial responses, with the columns in `KEPT`. Used by carry_over only."""


class PendingPrompts:
    """Queue of prompts, oldest first. Empty with ``tail=off``."""

    def __init__(self, rollout: RolloutConfig, plan: Plan) -> None:
        self.stops_early = rollout.stops_early
        self._carries = rollout.tail == "carry_over"
        self._max_age = rollout.tail_max_age
        self._num_started = plan.prompts_started
        self._wanted = plan.prompts_per_step
        self._n = plan.answers_per_prompt
        self._waiting: list[Prompt] = []

    def next_prompts(self, draw: Callable[[], list[Prompt]]) -> list[Prompt]:
        """Return the prompts of a step: queued prompts, then new ones."""
        # The sampler returns whole draws. Surplus prompts stay in the queue.
        while len(self._waiting) < self._num_started:
            self._waiting += draw()
        started, self._waiting = self._waiting[: self._num_started], self._waiting[self._num_started :]
        return started

    def terms(self, started: Sequence[Prompt]) -> dict[str, Any]:
        """Return fields of the `GenerateTask`: the stop condition and the missing responses."""
        if not self.stops_early:
            return {}
        pending_mask = np.ones((len(started), self._n), dtype=bool)
        for place, prompt in enumerate(started):
            if prompt.answers:
                pending_mask[place] = ~prompt.answers[c.COMPLETE]
        # The target is at least 1, because with 0 no replica would start a job, and the step would have no response.
        target = max(1, self._wanted - int((~pending_mask.any(1)).sum()))
        mask = pending_mask if self._carries else None
        return {"target_complete": target, "num_required": self._num_waited_for(started), "pending_mask": mask}

    def _num_waited_for(self, started: Sequence[Prompt]) -> int:
        """Return the number of prompts, counted from the first, that the step must complete.

        carry_over: the prompts over the age limit. oversample: if any prompt is over the limit, all prompts whose
        responses were discarded before. They cost little extra time, because the step waits for a long response anyway.
        """
        # The queue is oldest first, so these are the first prompts, and their count identifies them.
        old = [prompt for prompt in started if prompt.age >= self._max_age]
        if old and not self._carries:
            old = [prompt for prompt in started if prompt.age]
        return min(len(old), self._wanted)

    def begun(self, started: Sequence[Prompt]) -> Request | None:
        """Return the payload and ``slot`` (prompt index * n + sample) of the responses to continue."""
        # Only incomplete responses with some tokens: complete ones need no engine, and empty ones start as new.
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
        """Return the batch (first complete prompts of the queue), the ids of its samples, and metrics.

        All other prompts return to the front of the queue.
        """
        n = self._n
        if self._carries:
            self._add_earlier(started, samples)
        complete = np.flatnonzero(samples[c.COMPLETE].reshape(-1, n).all(1))
        # Select prompts in queue order, not in order of completion, so that the oldest complete prompts are trained on
        # first.
        chosen = complete[: self._wanted]
        left = np.setdiff1d(np.arange(len(started)), chosen)
        ids, left_ids = ((places[:, None] * n + np.arange(n)).ravel() for places in (chosen, left))
        batch = Samples.join([(samples, ids)])
        batch.update({c.GROUP: np.arange(len(chosen)).repeat(n)})
        metrics = {"rollout/tail/age_max": float(max(started[place].age for place in chosen.tolist()))}
        served = samples[c.SERVED]
        new_tokens = np.where(served, samples[c.POLICY_TOKENS], 0)
        if self._carries:
            # staleness: age of a token in steps
            carried = batch[c.CARRIED_LENGTH]
            metrics |= {
                "rollout/tail/carried_tokens": float(carried.sum()),
                "rollout/tail/carried_samples": float((carried > 0).sum()),
                "rollout/tail/staleness/mean": float(batch[c.TOKEN_AGES].sum() / max(batch[c.POLICY_TOKENS].sum(), 1)),
                "rollout/tail/staleness/max": float(batch[c.OLDEST].max()),
            }
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
        # Unfinished prompts are prepended in order, so that the queue stays oldest first.
        self._waiting = back + self._waiting
        return batch, ids, metrics

    def _add_earlier(self, started: Sequence[Prompt], samples: Samples) -> None:
        """Merge responses of earlier steps into this step's samples."""
        nothing = np.zeros(len(samples), dtype=np.int64)
        # Each column needs a copy, because it is written separately below.
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
        # A trajectory that was aborted after its first turn has restarted, so it contains no carried-over tokens.
        anew = samples[c.SERVED] & (samples[c.POLICY_TOKENS] < samples[c.CARRIED_LENGTH])
        for name in (c.CARRIED_LENGTH, c.TOKEN_AGES, c.OLDEST):
            samples[name][anew] = 0

    def _aged(self, samples: Samples, place: int) -> Samples:
        """Return the responses of a prompt for the next step, with every token one step older."""
        answers = Samples.join([(samples, place * self._n + np.arange(self._n))])
        lengths = answers[c.POLICY_TOKENS]
        oldest = np.where(lengths > 0, answers[c.OLDEST] + 1, 0)
        answers.update({c.TOKEN_AGES: answers[c.TOKEN_AGES] + lengths, c.OLDEST: oldest})
        return answers

    def state(self) -> State:
        """Return row, draw and age of every queued prompt, for a checkpoint."""
        return [[prompt.row, prompt.draw, prompt.age] for prompt in self._waiting]

    def answers(self) -> Samples | None:
        """Return the partial responses of queued prompts, with ``slot``: queue index * n + sample."""
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
        """Restore from ``state`` and ``answers``."""
        answers_of = {}
        # Only carry_over continues responses, and a run may resume with another mode.
        if answers and self._carries:
            for ids in np.arange(len(answers)).reshape(-1, self._n):
                answers_of[int(answers[c.SLOT][ids[0]]) // self._n] = Samples.join([(answers, ids)])
        self._waiting = [Prompt(row, draw, age, answers_of.get(i)) for i, (row, draw, age) in enumerate(state)]
