"""Answers that a judge on the run's own devices scores: what it is to be asked, and what its replies are worth.

Between the two the devices write the replies, which this process neither waits for nor asks for: `Scoring` hands out
messages and takes replies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rltrain.base.errors import RltrainError
from rltrain.config.schema import Config
from rltrain.rewards.judge.message import Ask
from rltrain.rewards.judge.reply import Reply
from rltrain.rewards.processes.grader import READINGS, Grader
from rltrain.rewards.processes.judged import of_rule
from rltrain.rewards.processes.score import UNASKED, Asked, Score, ScorerCall


def readings_of(cfg: Config) -> int:
    """How often an answer is judged until the reply can be read: a greedy judge says the same again."""
    return READINGS if cfg.reward_model.rollout.temperature else 1


class AskingScorer:
    """Scores answers by ``reward.judge`` where a generative reward model writes the replies."""

    def __init__(self, cfg: Config) -> None:
        self._grader, self._reads_by_function = Grader(cfg), cfg.reward.judge.function is not None
        self._counts: Counter[str] = Counter()
        self._readings = readings_of(cfg)

    def ask(self, calls: Sequence[ScorerCall], questions: Sequence[Ask]) -> tuple[list[Score | Asked], list[str]]:
        """Scores of answers that need no judge; of the others what is to be asked, with the messages."""
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
        """Scores of answers whose replies are there. again: those that cannot be read are to be asked for once more."""
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
        """What is known of a ground truth's score before there is a judge: the scorer's, and the names of its numbers.

        None where a function of the user's, which reads replies, names some. Raises RewardError for a message that
        cannot be made.
        """
        rule = self._grader.rule_of_truth(call)
        self._grader.message(call, question())
        if self._reads_by_function:
            return None
        return self._grader.together(rule, Score(0.0, "ok", None, {"judge": 0.0}))

    def take_counts(self) -> Counter[str]:
        """Replies that could not be read since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    def take_printed(self) -> str:
        """What scorer and function have printed since the last call."""
        return self._grader.take_printed()

    def close(self) -> None:
        """End the slots' processes."""
        self._grader.close()
