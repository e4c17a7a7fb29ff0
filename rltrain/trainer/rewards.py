"""What an answer is worth: rule rewards, a reward model, and penalties, put together by stated weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rltrain.config.critic_schema import OverlongBufferConfig, RewardModelConfig
from rltrain.controller.samples import Samples
from rltrain.data.rows import Rows
from rltrain.rewards.pool import RewardPool
from rltrain.trainer.roles import RewardModel

Floats = NDArray[np.float64]


class Rewards:
    """weight * model + rule_weight * rule - penalty. Rule rewards are computed from texts that never pass through the driver."""

    def __init__(
        self, cfg: RewardModelConfig, rows: dict[str, Rows], pool: RewardPool | None, model: RewardModel | None, max_length: int
    ) -> None:
        self._cfg = cfg
        self._rows = rows
        self._pool = pool
        self._model = model
        self._max_length = max_length

    @property
    def has_validation(self) -> bool:
        return "val" in self._rows

    def num_rows(self, split: str) -> int:
        return len(self._rows[split])

    def data_sources(self, split: str) -> list[str]:
        return [row.data_source for row in self._rows[split]]

    def score(self, split: str, samples: Samples) -> dict[str, Floats]:
        """``score``, what it is made of (``rule_score``, ``model_score``, ``overlong``), failures, the scorer's extra columns [n]."""
        nothing = np.zeros(len(samples))
        found = self._rules(split, samples) if self._pool else {"score": nothing, "reward_failed": nothing, "reward_timeout": nothing}
        total = found["rule_score"] = found["score"]
        if self._model:
            found["model_score"] = self._model.score(split, samples)
            total = self._cfg.weight * found["model_score"] + self._cfg.rule_weight * total
        if self._cfg.reward_manager == "dapo" and self._cfg.overlong_buffer.enable:
            found["overlong"] = overlong_penalty(samples["response_length"], self._max_length, self._cfg.overlong_buffer)
            total = total + found["overlong"]
        return found | {"score": total, "reward": total}

    def _rules(self, split: str, samples: Samples) -> dict[str, Floats]:
        assert self._pool is not None
        parts = samples.parts_with("text")
        results = self._pool.score(split, [(part.ref, samples["row"][part.ids], part.rows) for part in parts])
        ids = np.concatenate([part.ids for part in parts])
        ordered = {name: np.empty(len(values), dtype=np.float64) for name, values in results.items()}
        for name, values in results.items():
            ordered[name][ids] = values
        return ordered


def overlong_penalty(lengths: NDArray[np.int64], max_length: int, cfg: OverlongBufferConfig) -> Floats:
    """0 up to max_length - len, then linearly down to -penalty_factor at max_length   (Yu et al. 2025, DAPO, eq. 13)."""
    exceeded = lengths - (max_length - cfg.len)
    return -cfg.penalty_factor * np.clip(exceeded / cfg.len, 0.0, 1.0)
