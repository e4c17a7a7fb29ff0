"""Reward worker: a scorer and the rows of every split, in a Ray actor."""

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import ray

from rltrain.common.columns.answer import AnswerText
from rltrain.common.env import adopt
from rltrain.config.schema import ScoringConfig
from rltrain.data.rows import Rows
from rltrain.rewards.custom import DEFAULT_INFO
from rltrain.rewards.judge.message import QuestionMaker
from rltrain.rewards.judge.reply import Reply
from rltrain.rewards.processes.device_judge import DeviceJudge
from rltrain.rewards.processes.judging import Questions
from rltrain.rewards.processes.remote_judge import RemoteJudge
from rltrain.rewards.processes.remote_scorer import RemoteScorer
from rltrain.rewards.processes.score import PendingScore, Score, ScorerCall, parse_result
from rltrain.rewards.processes.slot import ScoringSlot
from rltrain.rewards.processes.trial import try_truths
from rltrain.runtime.actors import ActorProcess

Scorer = ScoringSlot | RemoteScorer | RemoteJudge | DeviceJudge
CallNumber = tuple[int, int]  # (batch, index of the call in the batch)
# Call number, scores, seconds, a judge's costs, (source, printed output), and a reference of prompts for a judge.
Scored = tuple[CallNumber, list[Score | PendingScore], float, Counter[str], tuple[str, str], Any]


def make_scorer(cfg: ScoringConfig, num_sharing: int = 1) -> Scorer:
    """Return this process's scorer by the config. num_sharing: number of such processes in the run."""
    reward = cfg.reward
    if cfg.reward_model.judges:
        return DeviceJudge(cfg)
    if reward.judge.url is not None:
        return RemoteJudge(cfg, num_sharing)
    if reward.url is not None:
        return RemoteScorer(reward.url, reward.timeout_s, reward.url_concurrency, reward.url_headers)
    return ScoringSlot.of(cfg)


class RewardWorker(ActorProcess):
    """One scorer and the rows of every split; runs as a Ray actor."""

    def __init__(
        self, cfg: ScoringConfig, name: str, splits: dict[str, Any], environment: dict[str, str], num_workers: int = 1
    ):
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
        started = time.perf_counter()
        texts_here = ray.get(texts[0])
        answers = [texts_here[place] for place in positions.tolist()]
        known = [known_score(answer, is_custom=self._is_custom) for answer in answers]
        unscored = [
            (row, self._call(split, row, answer))
            for row, answer, score in zip(rows.tolist(), answers, known, strict=True)
            if score is None
        ]
        computed, messages = self._scored(number[0], split, *zip(*unscored, strict=True)) if unscored else ([], [])
        remaining = iter(computed)
        scores = [score or next(remaining) for score in known]
        return self._result(number, scores, started, ray.put(messages) if messages else None)

    def read(
        self,
        number: CallNumber,
        split: str,
        texts: list[Any],
        rows: np.ndarray,
        positions: np.ndarray,
        pending: list[PendingScore],
        replies: list[tuple[Any, np.ndarray, np.ndarray]],
        again: bool,
    ) -> Scored:
        """Score responses from the replies of a judge on the devices.

        replies: objects by reference, each with indices into ``pending`` and the matching rows of the object. again:
        see `DeviceJudge.read`.
        """
        started = time.perf_counter()
        assert isinstance(self._scorer, DeviceJudge)
        texts_here = ray.get(texts[0])
        by_place: dict[int, Reply] = {}
        for reference, places, rows_there in replies:
            stored = ray.get(reference)
            by_place |= {place: stored[row] for place, row in zip(places.tolist(), rows_there.tolist(), strict=True)}
        chosen = zip(rows.tolist(), positions.tolist(), strict=True)
        calls = [self._call(split, row, texts_here[place]) for row, place in chosen]
        scores = self._scorer.read(calls, pending, [by_place[place] for place in range(len(calls))], again=again)
        return self._result(number, scores, started, None)

    def _result(self, number: CallNumber, scores: list[Score | PendingScore], started: float, messages: Any) -> Scored:
        seconds = time.perf_counter() - started
        return number, scores, seconds, self.take_counts(), (self._name, self._scorer.take_printed()), messages

    def score_truths(self, split: str, rows: list[int] | None) -> tuple[list[Score], tuple[str, str]]:
        """Score rows with their ground truth as the response (by default the first row per data source)."""
        chosen = list(self._rows[split].data_sources().values()) if rows is None else rows
        asks = isinstance(self._scorer, RemoteJudge | DeviceJudge)
        tried = try_truths(self._scorer, self._rows[split], chosen, partial(self._question, split) if asks else None)
        return [score for _, score, _ in tried], (self._name, self._scorer.take_printed())

    def take_counts(self) -> Counter[str]:
        """Return and reset a judge's costs."""
        return self._scorer.take_counts() if isinstance(self._scorer, RemoteJudge | DeviceJudge) else Counter()

    def cancel_judging(self, batch: int) -> None:
        """Stop waiting for the judge of a batch; its responses are not scored."""
        if isinstance(self._scorer, RemoteJudge):
            self._scorer.cancel(batch)

    def close(self) -> None:
        """End the slot's process."""
        self._scorer.close()

    def _scored(
        self, batch: int, split: str, rows: Sequence[int], calls: Sequence[ScorerCall]
    ) -> tuple[Sequence[Score | PendingScore], list[str]]:
        """Return scores, and prompts for a judge on the devices."""
        if isinstance(self._scorer, DeviceJudge):
            return self._scorer.request(calls, [self._question(split, row) for row in rows])
        if isinstance(self._scorer, RemoteJudge):
            return self._scorer.score_all(calls, [self._question(split, row) for row in rows], batch=batch), []
        return self._scorer.score_all(calls), []

    def _question(self, split: str, row: int) -> QuestionMaker:
        return partial(self._questions[split], row)

    def _call(self, split: str, number: int, answer: str) -> ScorerCall:
        row = self._rows[split][number]
        info = DEFAULT_INFO | answer.trajectory_info if isinstance(answer, AnswerText) else {}
        return row.data_source, str(answer), row.ground_truth, row.extra_info | info


def known_score(answer: str, *, is_custom: bool) -> Score | None:
    """Return the score that a response already has; None if it must be scored (always with a user's function)."""
    info = answer.trajectory_info if isinstance(answer, AnswerText) else {}
    if info.get("agent_failed"):
        return Score(0.0, "ok")  # masked in training
    if is_custom or "agent_score" not in info:
        return None
    try:
        value, extras = parse_result({**info.get("agent_numbers", {}), "score": info["agent_score"]})
    except ValueError as error:
        return Score(None, "rejected", str(error))
    return Score(value, "ok", None, extras)
