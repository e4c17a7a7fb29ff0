"""Rewards of a step: rule rewards, a reward model, and penalties, combined by configured weights.

Problem: rule rewards are computed while other responses are still being generated, so they arrive in the order of
completion, and some belong to responses that the step does not use. Choice: scorers number responses in the order
received, and `AnswersInScoring` maps these numbers to samples. Left out: overlapping the reward model with generation,
because it shares the devices with the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.common.columns import names as c
from rltrain.common.errors import RewardError
from rltrain.config.schema import ScoringConfig
from rltrain.config.schema.model import OverlongBufferConfig
from rltrain.data.rows import Rows
from rltrain.rewards.judge.server import JUDGE_COUNTS
from rltrain.rewards.processes.pool import RewardPool
from rltrain.rewards.processes.scoring import Scoring
from rltrain.runtime.samples import Samples
from rltrain.trainer.batching.balance import Ids
from rltrain.trainer.judge import Judge
from rltrain.trainer.masked_samples import failed_of
from rltrain.trainer.roles import RewardModel

Floats = NDArray[np.float64]
Column = NDArray[Any]


class Rewards:
    """Reward: weight * model + rule_weight * rule - penalty. Without rule_weight the rule is not computed.

    The scored texts never pass through the driver. max_length: maximum response length.
    """

    def __init__(
        self,
        cfg: ScoringConfig,
        max_length: int,
        rows: dict[str, Rows],
        pool: RewardPool | None,
        model: RewardModel | None,
        judge: Judge | None = None,
    ) -> None:
        self._cfg = cfg.reward_model
        self._overlap = cfg.reward.overlap
        self._weights: dict[str, float] = {name: float(weight) for name, weight in cfg.reward.weights.items()}
        self._max_length = cfg.reward_model.overlong_buffer.max_resp_len or max_length
        # Seconds of the newest rule rewards, summed over all scoring processes, including time hidden by generation.
        self.seconds = 0.0
        # Judge costs of the newest rewards: ``judge/calls`` and others.
        self.judged: dict[str, float] = {}
        # Step time of a judge on the devices, which does not overlap generation.
        self.timing: dict[str, float] = {}
        self._judge_counts = JUDGE_COUNTS if cfg.reward.judge.url or judge else ()
        self._judge = judge
        self._rows = rows
        self._pool = pool
        self._model = model

    @property
    def costs(self) -> dict[str, float]:
        """Metrics of the newest scores."""
        return {"reward/compute_s": self.seconds} | self.judged | self.timing

    @property
    def has_validation(self) -> bool:
        return "val" in self._rows

    def num_rows(self, split: str) -> int:
        return len(self._rows[split])

    def data_sources(self, split: str) -> list[str]:
        return self._rows[split].sources()

    def extra_infos(self, split: str) -> list[dict[str, Any]]:
        return [row.extra_info for row in self._rows[split]]

    def begin_scoring(self, split: str, num_samples: int) -> AnswersInScoring | None:
        """Start rule rewards of responses before they are generated; None if scoring does not overlap generation."""
        return AnswersInScoring(self._pool.begin_scoring(split, num_samples)) if self._pool and self._overlap else None

    def score(
        self, split: str, samples: Samples, begun: AnswersInScoring | None = None, at_once: int | None = None
    ) -> dict[str, Column]:
        """Return ``score``, its parts (``rule_score``, ``model_score``, ``overlong``), failures, ``scorer/NAME`` [n].

        begun: rule rewards that were started during generation. at_once: responses per call of the reward model or
        judge.
        """
        nothing = np.zeros(len(samples))
        columns = {c.SCORE: nothing, c.REWARD_FAILED: nothing, c.REWARD_TIMEOUT: nothing}
        if self._pool:
            begun = begun or AnswersInScoring(self._pool.begin_scoring(split, len(samples)))
            begun.add_missing(samples)
            if self._judge:
                self.timing = {"timing_s/judge": begun.ask(self._judge, at_once)}
            columns = begun.collect()
            self.seconds = begun.scoring.seconds
            self.judged = {f"judge/{name}": float(begun.scoring.judged[name]) for name in self._judge_counts}
        if self._weights:
            columns[c.SCORE] = self._weigh(columns, failed_of(samples))
        total = columns[c.SCORE]
        if self._pool:
            # The rule score is kept even if it equals the score, because accuracy and the sampler need it.
            columns[c.RULE_SCORE] = total
        if self._model:
            columns[c.MODEL_SCORE] = self._model.score(split, samples, at_once)
            total = self._cfg.weight * columns[c.MODEL_SCORE] + (self._cfg.rule_weight or 0.0) * total
        if self._cfg.reward_manager == "dapo" and self._cfg.overlong_buffer.enable:
            columns[c.OVERLONG] = overlong_penalty(
                samples[c.RESPONSE_LENGTH], self._max_length, self._cfg.overlong_buffer
            )
            total = total + columns[c.OVERLONG]
        # Score and reward are separate columns, because a KL penalty is later subtracted from the reward only.
        return columns | {c.SCORE: total, c.REWARD: total}

    def _weigh(self, columns: dict[str, Column], failed_trajectories: NDArray[np.bool_]) -> Floats:
        """Return the weighted sum of ``reward.weights``. Responses without a score keep ``reward.on_error``."""
        failed = (columns[c.REWARD_FAILED] > 0) | failed_trajectories
        total = np.zeros(len(failed))
        for name, weight in self._weights.items():
            term = _floats(columns.get(column_of(name, columns)), len(failed))
            if np.isnan(term[~failed]).any():
                raise RewardError(
                    f"reward.weights.{name}: the scorer did not return the number '{name}' for some responses. Remove "
                    "it."
                )
            # Only failed responses are NaN here. The last line replaces their NaN by ``reward.on_error``.
            total = total + weight * np.nan_to_num(term)
        return np.where(failed, columns[c.SCORE], total)


class AnswersInScoring:
    """Responses in the scorers, which number them in the order of completion.

    ``_ids[i][j]``: the sample of response j in the i-th list that was added (-1: unused by the step).
    """

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring
        self._ids: list[Ids] = []

    def arrived(self, texts: Any, ids: Ids, rows: Ids) -> None:
        """Add a list of texts (by reference): responses of the samples ``ids`` to the prompts ``rows``."""
        self._add(texts, ids, rows, np.arange(len(ids)))

    def tick(self) -> None:
        """Submit pending work without blocking."""
        self.scoring.advance()

    def select(self, ids: Ids) -> None:
        """Keep the samples ``ids``, renumbered from 0, and drop the scores of all others."""
        # Call this only once, while no id is -1. A second call would use -1 as the index of the last sample.
        new_id = np.full(1 + max(int(ids_of_part.max()) for ids_of_part in (ids, *self._ids)), -1)
        new_id[ids] = np.arange(len(ids))
        self._ids = [new_id[ids_of_part] for ids_of_part in self._ids]

    def add_missing(self, samples: Samples) -> None:
        """Add ``samples`` that did not arrive during generation, such as responses of an earlier step."""
        arrived = np.zeros(len(samples), dtype=bool)
        for arrived_ids in self._ids:
            arrived[arrived_ids[arrived_ids >= 0]] = True
        for part in samples.parts_with(c.TEXT):
            missing = ~arrived[part.ids]
            if missing.any():
                ids = part.ids[missing]
                self._add(part.ref, ids, samples[c.ROW][ids], part.rows[missing])

    def ask(self, judge: Judge, at_once: int | None = None) -> float:
        """Request replies of a judge on the devices for the pending samples that the step uses. Returns the seconds
        that this took.

        at_once: see `Judge.replies`.
        """
        seconds, is_wanted = 0.0, np.concatenate(self._ids) >= 0
        for reading in range(judge.readings):
            messages = self.scoring.messages(is_wanted)
            if not len(messages):
                break
            costs = judge.replies(messages, reading, at_once)
            seconds += costs["seconds"]
            self.scoring.add_replies(messages, costs, again=reading + 1 < judge.readings)
        return seconds

    def collect(self) -> dict[str, Column]:
        """Wait for the scores and return their columns [n] by sample."""
        columns, ids = self.scoring.collect(), np.concatenate(self._ids)
        is_kept = ids >= 0
        # The ids are a permutation of 0 to n - 1, so sorting by them orders the scores by sample.
        by_sample = np.argsort(ids[is_kept])
        return {name: values[is_kept][by_sample] for name, values in columns.items()}

    def _add(self, texts: Any, ids: Ids, rows: Ids, positions: Ids) -> None:
        self.scoring.add(texts, rows, positions)
        self._ids.append(ids)


def column_of(name: str, columns: Mapping[str, Any]) -> str:
    """Return the column of a number named in the config: the scorer's, or else the trainer's (such as ``score``)."""
    return c.SCORER + name if c.SCORER + name in columns else name


def accuracy(samples: Samples) -> Floats:
    """Return ``acc`` [n], or the score if the scorer returns a bare number or only a reward model scores."""
    # Length penalties and reward model scores do not measure correctness.
    score = samples.numbers.get(c.RULE_SCORE, samples[c.SCORE])
    acc = _floats(samples.numbers.get(c.SCORER + "acc"), len(samples))
    return np.where(np.isnan(acc), score, acc)


def _floats(column: Column | None, count: int) -> Floats:
    """Return a float column; all NaN if it is missing or text."""
    return np.full(count, np.nan) if column is None or column.dtype == object else column.astype(np.float64)


def known_number(samples: Samples, name: str, on_error: float) -> Floats:
    """Return a scorer's number [n], or ``on_error`` if scoring failed. Raises RewardError if a scored response lacks
    it."""
    values = _floats(samples.numbers.get(column_of(name, samples.numbers)), len(samples))
    missing = np.isnan(values)
    if (missing & (samples[c.REWARD_FAILED] == 0) & ~failed_of(samples)).any():
        have = ", ".join(sorted(term.removeprefix(c.SCORER) for term in samples.numbers if term.startswith(c.SCORER)))
        raise RewardError(
            f"the scorer did not return the number '{name}' for some responses, but the configuration uses it. It "
            f"returned {have or 'only a score'}."
        )
    return np.where(missing, on_error, values)


def overlong_penalty(lengths: NDArray[np.int64], max_length: int, cfg: OverlongBufferConfig) -> Floats:
    """Return 0 up to max_length - len, then linear to -penalty_factor at max_length   (Yu et al. 2025, DAPO, eq. 13).

    Beyond max_length it decreases further as in verl, whereas the paper's penalty stays at -penalty_factor.
    """
    exceeded = lengths - (max_length - cfg.len)
    return -cfg.penalty_factor * np.maximum(exceeded / cfg.len, 0.0)
