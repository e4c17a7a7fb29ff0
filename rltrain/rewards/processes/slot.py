"""Slot that runs scorers and returns scores."""

from collections.abc import Sequence
from typing import Any

from rltrain.common.errors import RewardError
from rltrain.config.schema import ScoringConfig
from rltrain.rewards.custom import CustomReward, custom_reward
from rltrain.rewards.processes.load_scorer import ScorerLoader
from rltrain.rewards.processes.score import Score, ScorerCall
from rltrain.rewards.scorers.registry import FORMS
from rltrain.runtime.slots.limits import Limits
from rltrain.runtime.slots.service import Outcome, Service
from rltrain.runtime.slots.slot import Slot


class ScoringSlot(Slot):
    """Scores responses in a separate process with at most ``timeout_s`` per response, even if a reward function hangs.

    If the process exceeds ``memory_limit_mb`` (0: unlimited), the response counts as crashed.
    """

    def __init__(
        self,
        custom: CustomReward | None = None,
        timeout_s: float = 5.0,
        memory_limit_mb: int = 4096,
        allow_code_execution: bool = False,
        allow_unsandboxed_code: bool = False,
    ):
        self._custom = custom
        words = ("the reward function", "reward.timeout_s", "reward.memory_limit_mb")
        service = Service(ScorerLoader(custom), *words, result="score", call="answer", error=RewardError)
        super().__init__(service, Limits(timeout_s, memory_limit_mb, allow_code_execution, allow_unsandboxed_code))

    @classmethod
    def of(cls, cfg: ScoringConfig, custom: CustomReward | None = None) -> "ScoringSlot":
        """Return the slot of ``custom`` (None: the user's function, or else the scorers of the data sources)."""
        reward = cfg.reward
        allowed = reward.allow_code_execution, reward.allow_unsandboxed_code
        return cls(custom or custom_reward(cfg), reward.timeout_s, reward.memory_limit_mb, *allowed)

    def score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
        """Score one response. Raises RewardError only if no response can be scored: no scorer, or failing imports."""
        return self.score_all([(data_source, solution_str, ground_truth, extra_info)])[0]

    def score_all(self, calls: Sequence[ScorerCall]) -> list[Score]:
        """Score responses one by one; with an ``async`` function, several concurrently.

        A function that takes lists gets all responses in one call, with the sum of their time limits.
        """
        if self._custom is None:
            outcomes = [self.call(call[0], *call) for call in calls]
        else:
            outcomes = (self.call_list if self._custom.batch else self.call_all)(calls[0][0], calls)
        return [_score_of(outcome, call) for outcome, call in zip(outcomes, calls, strict=True)]

    def score_truth(self, call: ScorerCall) -> Score:
        """Score a ground truth as the response. If that fails, try the other `FORMS` until one succeeds; a built-in
        scorer returns the best score of all.

        Raises RewardError only if nothing can be scored, as `score`.
        """
        score = self.score(*call)
        for form in FORMS[1:]:
            # After a timeout no other form is tried, because each could cost another timeout. A user's function may
            # cost money.
            if score.status == "timeout" or (score.value is not None and (self._custom or score.value >= 1)):
                break
            of_form = self.score(call[0], form.format(call[1]), *call[2:])
            if of_form.value is not None and (score.value is None or of_form.value > score.value):
                score = of_form
        return score


def _score_of(outcome: Outcome, call: ScorerCall) -> Score:
    if outcome.status == "ok":
        return Score(float(outcome.value["score"]), "ok", None, outcome.value["extras"])
    return Score(None, outcome.status, outcome.error, kind=outcome.kind).with_call(call)
