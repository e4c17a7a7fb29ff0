"""Reward worker: a scorer and the rows of every split, in a Ray actor."""

import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from rltrain.common.columns.answer import AnswerText
from rltrain.common.env import adopt
from rltrain.config.schema import ScoringConfig
from rltrain.data.rows import Rows
from rltrain.rewards.custom import TOLD, custom_reward
from rltrain.rewards.judge.message import Ask
from rltrain.rewards.judge.reply import Reply
from rltrain.rewards.processes.asking import AskingScorer
from rltrain.rewards.processes.grader import Questions
from rltrain.rewards.processes.judged import JudgedScorer
from rltrain.rewards.processes.remote import RemoteScorer
from rltrain.rewards.processes.score import Asked, Score, ScorerCall, read_returned
from rltrain.rewards.processes.slot import ScoringSlot
from rltrain.runtime.stacks import stacks_here

Scorer = ScoringSlot | RemoteScorer | JudgedScorer | AskingScorer
CallNumber = tuple[int, int]  # (batch, index of the call in the batch)
# Call number, scores, seconds, a judge's costs, (source, printed output), and a reference of prompts for a judge.
Scored = tuple[CallNumber, list[Score | Asked], float, Counter[str], tuple[str, str], Any]


def make_scorer(cfg: ScoringConfig, num_sharing: int = 1) -> Scorer:
    """Return this process's scorer by the config. num_sharing: number of such processes in the run."""
    reward = cfg.reward
    if cfg.reward_model.judges:
        return AskingScorer(cfg)
    if reward.judge.url is not None:
        return JudgedScorer(cfg, num_sharing)
    if reward.url is not None:
        return RemoteScorer(reward.url, reward.timeout_s, reward.url_concurrency, reward.url_headers)
    return rule_scorer(cfg)


def rule_scorer(cfg: ScoringConfig) -> ScoringSlot:
    """Return the user's function, or else the scorers of the data sources."""
    reward = cfg.reward
    allowed = (reward.allow_code_execution, reward.allow_unsandboxed_code)
    return ScoringSlot(custom_reward(cfg), reward.timeout_s, reward.memory_limit_mb, *allowed)


class RewardWorker:
    """One scorer and the rows of every split; runs as a Ray actor."""

    def __init__(
        self, cfg: ScoringConfig, name: str, splits: dict[str, Any], environment: dict[str, str], num_workers: int = 1
    ):
        import ray

        adopt(environment)
        self._name = name
        # The tables stay in the node's object store; `Rows` builds rows on demand.
        self._rows: dict[str, Rows] = {split: ray.get(reference) for split, reference in splits.items()}
        self._scorer = make_scorer(cfg, num_workers)
        with_images = cfg.reward.judge.url is not None and cfg.reward.judge.images
        self._questions = {split: Questions(rows, with_images) for split, rows in self._rows.items()}
        self._is_custom = cfg.custom_reward_function.path is not None or cfg.reward.is_elsewhere

    def score(
        self, number: CallNumber, split: str, texts: list[Any], rows: np.ndarray, positions: np.ndarray
    ) -> Scored:
        """Score the texts at ``positions`` of a list (by reference in ``texts``) as responses to ``rows``."""
        import ray

        started = time.perf_counter()
        answers = ray.get(texts[0])
        chosen = [answers[at] for at in positions.tolist()]
        given = [given_score(answer, is_custom=self._is_custom) for answer in chosen]
        asked = [
            (row, self._call(split, row, answer))
            for row, answer, score in zip(rows.tolist(), chosen, given, strict=True)
            if score is None
        ]
        scored, messages = self._scored(number[0], split, *zip(*asked, strict=True)) if asked else ([], [])
        remaining = iter(scored)
        scores = [score or next(remaining) for score in given]
        return self._told(number, scores, started, ray.put(messages) if messages else None)

    def read(
        self,
        number: CallNumber,
        split: str,
        texts: list[Any],
        rows: np.ndarray,
        positions: np.ndarray,
        asked: list[Asked],
        replies: list[tuple[Any, np.ndarray, np.ndarray]],
        again: bool,
    ) -> Scored:
        """Score responses from the replies of a judge on the devices.

        replies: objects by reference, each with indices into ``asked`` and the matching rows of the object. again: see
        `AskingScorer.read`.
        """
        import ray

        started = time.perf_counter()
        assert isinstance(self._scorer, AskingScorer)
        answers = ray.get(texts[0])
        said: dict[int, Reply] = {}
        for reference, places, rows_there in replies:
            found = ray.get(reference)
            said |= {place: found[row] for place, row in zip(places.tolist(), rows_there.tolist(), strict=True)}
        chosen = zip(rows.tolist(), positions.tolist(), strict=True)
        calls = [self._call(split, row, answers[at]) for row, at in chosen]
        scores = self._scorer.read(calls, asked, [said[place] for place in range(len(calls))], again=again)
        return self._told(number, scores, started, None)

    def _told(self, number: CallNumber, scores: list[Score | Asked], started: float, messages: Any) -> Scored:
        seconds = time.perf_counter() - started
        return number, scores, seconds, self.take_counts(), (self._name, self._scorer.take_printed()), messages

    def score_truths(self, split: str, rows: list[int] | None) -> tuple[list[Score], tuple[str, str]]:
        """Score rows with their ground truth as the response (by default the first row per data source)."""
        of_split = self._rows[split]
        chosen = list(of_split.data_sources().values()) if rows is None else rows
        calls = [self._call(split, row, str(of_split[row].ground_truth)) for row in chosen]
        if isinstance(self._scorer, JudgedScorer | AskingScorer):
            asked = zip(chosen, calls, strict=True)
            scores = [self._scorer.score_truth(call, self._question(split, row)) for row, call in asked]
        else:
            scores = [self._scorer.score_truth(call) for call in calls]
        return [score for score in scores if score], (self._name, self._scorer.take_printed())

    def take_counts(self) -> Counter[str]:
        """Return and reset a judge's costs."""
        return self._scorer.take_counts() if isinstance(self._scorer, JudgedScorer | AskingScorer) else Counter()

    def give_up(self, batch: int) -> None:
        """Stop waiting for the judge of a batch; its responses stay unscored."""
        if isinstance(self._scorer, JudgedScorer):
            self._scorer.give_up(batch)

    def who(self) -> tuple[int, str]:
        """Return process id and host."""
        return os.getpid(), socket.gethostname()

    def stacks(self) -> str:
        """Return the stacks, also while a response is scored."""
        return stacks_here()

    def close(self) -> None:
        """End the slot's process."""
        self._scorer.close()

    def _scored(
        self, batch: int, split: str, rows: Sequence[int], calls: Sequence[ScorerCall]
    ) -> tuple[Sequence[Score | Asked], list[str]]:
        """Return scores, and prompts for a judge on the devices."""
        if isinstance(self._scorer, AskingScorer):
            return self._scorer.ask(calls, [self._question(split, row) for row in rows])
        if isinstance(self._scorer, JudgedScorer):
            return self._scorer.score_all(calls, [self._question(split, row) for row in rows], batch=batch), []
        return self._scorer.score_all(calls), []

    def _question(self, split: str, row: int) -> Ask:
        return partial(self._questions[split], row)

    def _call(self, split: str, number: int, answer: str) -> ScorerCall:
        row = self._rows[split][number]
        told = TOLD | answer.trajectory_info if isinstance(answer, AnswerText) else {}
        return row.data_source, str(answer), row.ground_truth, row.extra_info | told


def given_score(answer: str, *, is_custom: bool) -> Score | None:
    """Return the score that a response already has, or None if it must be scored (always so with a user's function)."""
    told = answer.trajectory_info if isinstance(answer, AnswerText) else {}
    if told.get("agent_failed"):
        return Score(0.0, "ok")  # masked in training
    if is_custom or "agent_score" not in told:
        return None
    try:
        value, extras = read_returned({**told.get("agent_numbers", {}), "score": told["agent_score"]})
    except ValueError as error:
        return Score(None, "rejected", str(error))
    return Score(value, "ok", None, extras)
