"""Scoring by a judge on the run's devices: creates the judge's prompts and parses its replies.

The devices generate the replies. This process neither waits for them nor requests them: `Scoring` collects the prompts
and delivers the replies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rltrain.common.errors import RltrainError
from rltrain.config.schema import ScoringConfig
from rltrain.rewards.judge.message import Ask
from rltrain.rewards.judge.reply import Reply
from rltrain.rewards.processes.grader import READINGS, Grader
from rltrain.rewards.processes.judged import of_rule
from rltrain.rewards.processes.score import UNASKED, Asked, Score, ScorerCall


def readings_of(temperature: float) -> int:
    """Return the maximum number of replies per response; a greedy judge would only repeat an unreadable reply."""
    return READINGS if temperature else 1


class AskingScorer:
    """Scores responses by ``reward.judge`` if a generative reward model writes the replies."""

    def __init__(self, cfg: ScoringConfig) -> None:
        self._grader, self._reads_by_function = Grader(cfg), cfg.reward.judge.function is not None
        self._counts: Counter[str] = Counter()
        self._readings = readings_of(cfg.reward_model.rollout.temperature)

    def ask(self, calls: Sequence[ScorerCall], questions: Sequence[Ask]) -> tuple[list[Score | Asked], list[str]]:
        """Return the scores of responses that need no judge, requests for the others, and the judge's prompts."""
        scores: list[Score | Asked] = []
        messages: list[str] = []
        for call, question, rule in zip(calls, questions, self._grader.rules(calls), strict=True):
            if not self._grader.is_asked(rule):
                scores.append(of_rule(rule))
                continue
            try:
                messages.append(self._grader.message(call, question()))
                scores.append(Asked(rule, len(messages) - 1, len(messages[-1])))
            except RltrainError as error:
                scores.append(Score(None, "rejected", str(error), kind=UNASKED).about(call))
        return scores, messages

    def read(
        self, calls: Sequence[ScorerCall], asked: Sequence[Asked], replies: Sequence[Reply], *, again: bool
    ) -> list[Score | Asked]:
        """Return the scores from the judge's replies. again: request unreadable replies once more."""
        scores: list[Score | Asked] = []
        for call, one, reply in zip(calls, asked, replies, strict=True):
            if reply.unasked:
                scores.append(Score(None, "rejected", reply.unasked, kind=UNASKED).about(call))
                continue
            verdict = self._grader.read(reply, call)
            if verdict.status == "ok":
                scores.append(self._grader.together(one.rule, verdict))
                continue
            self._counts["parse_failures"] += 1
            if not again:
                times = f" (asked {self._readings} times)" if self._readings > 1 else ""
                verdict = replace(verdict, status="rejected", error=f"{verdict.error}{times}")
            scores.append(one if again else verdict.about(call))
        return scores

    def score_truth(self, call: ScorerCall, question: Ask) -> Score | None:
        """Return the part of a ground truth's score that is known without a judge: the scorer's score and extras'
        names.

        Returns None if a user's function parses replies, because it may add extras. Raises RewardError for a prompt
        that cannot be created.
        """
        rule = self._grader.rule_of_truth(call)
        self._grader.message(call, question())
        if self._reads_by_function:
            return None
        return self._grader.together(rule, Score(0.0, "ok", None, {"judge": 0.0}))

    def take_counts(self) -> Counter[str]:
        """Return and reset the number of unreadable replies."""
        counts, self._counts = self._counts, Counter()
        return counts

    def take_printed(self) -> str:
        """Return and clear the output that scorer and function have printed."""
        return self._grader.take_printed()

    def close(self) -> None:
        """End the slots' processes."""
        self._grader.close()
