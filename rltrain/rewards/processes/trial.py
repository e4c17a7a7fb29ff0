"""Trial of a scorer: rows whose response is their ground truth. Runs and dry runs use it."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rltrain.common.errors import RewardError
from rltrain.data.rows import PromptRow, Rows
from rltrain.rewards.custom import CustomReward
from rltrain.rewards.processes.score import Score


def truth_of(row: PromptRow) -> str:
    """Return the ground truth of a row as a response; of several the first."""
    truths = row.ground_truth
    return str(truths[0] if isinstance(truths, list) and truths else truths)


def try_truths(
    scorer: Any, rows: Rows, numbers: Iterable[int], question: Callable[[int], Any] | None = None
) -> Iterator[tuple[PromptRow, Score, float]]:
    """Yield rows, the scores of their ground truths, and seconds.

    question: creates the question of a row, for a judge. A judge on the devices gives no score if a user's function
    reads its replies. Raises RewardError if nothing can be scored.
    """
    for number in numbers:
        row, started = rows[number], time.perf_counter()
        call = row.data_source, truth_of(row), row.ground_truth, row.extra_info
        if score := scorer.score_truth(call, question(number)) if question else scorer.score_truth(call):
            yield row, score, time.perf_counter() - started


def refuse_without_number(custom: CustomReward | None, scores: list[Score]) -> None:
    """Raise RewardError if a user's function returned no number in any trial."""
    if custom and scores and all(score.status in ("crashed", "rejected") for score in scores):
        raise RewardError(
            f"{custom.name!r} in {custom.path!r} returns no number for any trial response: the ground "
            f"truth of each data source, alone and in the usual forms. The first failure:\n{scores[0].report()}\n"
            f"Try it: python -m rltrain.rewards.try {custom.path} DATA.parquet"
        )
