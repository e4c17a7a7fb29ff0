"""Scorer that uses a judge on the run's devices: creates the judge's prompts and parses its replies.

The devices generate the replies. This process neither requests nor waits for them: `Scoring` collects the prompts and
delivers the replies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from rltrain.common.errors import RltrainError
from rltrain.config.schema import ScoringConfig
from rltrain.rewards.judge.message import QuestionMaker
from rltrain.rewards.judge.reply import Reply
from rltrain.rewards.processes.judging import MAX_REPLIES, Judging
from rltrain.rewards.processes.score import NO_PROMPT, PendingScore, Score, ScorerCall


def max_replies(temperature: float) -> int:
    """Return the maximum number of replies per response; a greedy judge would only repeat an unreadable reply."""
    return MAX_REPLIES if temperature else 1


class DeviceJudge:
    """Scores responses by ``reward.judge`` if a generative reward model writes the replies."""

    def __init__(self, cfg: ScoringConfig) -> None:
        self._judging, self._has_function = Judging(cfg), cfg.reward.judge.function is not None
        self._counts: Counter[str] = Counter()
        self._max_replies = max_replies(cfg.reward_model.rollout.temperature)

    def request(
        self, calls: Sequence[ScorerCall], questions: Sequence[QuestionMaker]
    ) -> tuple[list[Score | PendingScore], list[str]]:
        """Return the scores of responses that need no judge, requests for the others, and the judge's prompts."""
        scores: list[Score | PendingScore] = []
        messages: list[str] = []
        for call, question, rule in zip(calls, questions, self._judging.rules(calls), strict=True):
            if not self._judging.needs_judge(rule):
                scores.append(cast(Score, rule))
                continue
            try:
                messages.append(self._judging.message(call, question()))
                scores.append(PendingScore(rule, len(messages) - 1, len(messages[-1])))
            except RltrainError as error:
                scores.append(Score(None, "rejected", str(error), kind=NO_PROMPT).with_call(call))
        return scores, messages

    def read(
        self, calls: Sequence[ScorerCall], pending: Sequence[PendingScore], replies: Sequence[Reply], *, again: bool
    ) -> list[Score | PendingScore]:
        """Return the scores from the judge's replies. again: request unreadable replies once more."""
        scores: list[Score | PendingScore] = []
        for call, pending_score, reply in zip(calls, pending, replies, strict=True):
            if reply.no_prompt:
                scores.append(Score(None, "rejected", reply.no_prompt, kind=NO_PROMPT).with_call(call))
                continue
            score = self._judging.read(reply, call)
            if score.status == "ok":
                scores.append(self._judging.combine(pending_score.rule, score))
                continue
            self._counts["parse_failures"] += 1
            if again:
                scores.append(pending_score)
                continue
            times = f" (after {self._max_replies} replies)" if self._max_replies > 1 else ""
            scores.append(replace(score, status="rejected", error=f"{score.error}{times}").with_call(call))
        return scores

    def score_truth(self, call: ScorerCall, question: QuestionMaker) -> Score | None:
        """Return the part of a ground truth's score that is known without a judge: the scorer's score and names of
        extras.

        Returns None if a user's function parses replies, because it may add extras. Raises RewardError for a prompt
        that cannot be created.
        """
        rule = self._judging.rule_of_truth(call)
        self._judging.message(call, question())
        if self._has_function:
            return None
        return self._judging.combine(rule, Score(0.0, "ok", None, {"judge": 0.0}))

    def take_counts(self) -> Counter[str]:
        """Return and reset the number of unreadable replies."""
        counts, self._counts = self._counts, Counter()
        return counts

    def take_printed(self) -> str:
        """Return and clear the output that scorer and function have printed."""
        return self._judging.take_printed()

    def close(self) -> None:
        """End the slots' processes."""
        self._judging.close()
