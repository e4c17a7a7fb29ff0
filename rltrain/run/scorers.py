"""Start of the scorers of a run, with a trial on its rows before models are loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from rltrain.common import logs
from rltrain.common.errors import ConfigError
from rltrain.config.schema import ScoringConfig
from rltrain.config.schema.algorithm import FILTER_METRICS, AlgorithmConfig
from rltrain.data.row_tools import RowTools
from rltrain.data.rows import Rows
from rltrain.rewards.processes.actors import PoolWatch
from rltrain.rewards.processes.judging import check_judge
from rltrain.rewards.processes.pool import RewardPool
from rltrain.rewards.processes.score import Score
from rltrain.run.splits import Data
from rltrain.runtime.failures import death_watch
from rltrain.runtime.group import PlacementGroupSchedulingStrategy
from rltrain.runtime.hang import Deadlines
from rltrain.trainer.plan import Plan


def start_pool(
    cfg: ScoringConfig,
    algorithm: AlgorithmConfig,
    plan: Plan,
    splits: dict[str, Any],
    data: Data,
    groups: Sequence[Any],
    folder: Path,
    deadlines: Deadlines,
    stopped: Callable[[], None],
) -> RewardPool | None:
    """Start the rule scorers on the nodes of ``groups`` and try them on one row per data source. Returns None if no
    rule scorer is needed. splits: references to the rows of ``data``. Output of scorers goes to ``reward.log`` in
    ``folder``. deadlines: the trial's deadlines; they also collect the scorers' stacks. stopped(): raises an error to
    end waiting.
    """
    if plan.passes.supervised or not cfg.reward_model.runs_scorers:
        return None
    if cfg.reward.judge.url or cfg.reward_model.judges:
        check_judge(cfg.reward.judge)  # here, so that it is a single config error
    watch = PoolWatch(
        death_watch(),
        stopped,
        lambda: deadlines.write_stacks("reward"),
        min(PoolWatch.late_s, deadlines.fixed_s or PoolWatch.late_s),
        deadlines.limit_s("trial"),
    )
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0) for group in groups]
    pool = RewardPool(cfg, plan.num_reward_workers, splits, folder / "reward.log", watch, places)
    deadlines.show("scorers", pool.stacks)
    with logs.waiting("trying the scorers on a row of every data source"):
        for split in splits:
            scores = pool.score_truths(split, _rows_to_try(cfg, data.rows[split], data.encoder.row_tools))
            if split == "train" or "train" not in splits:
                check_columns(algorithm, cfg.reward.weights, scores, split)
    return pool


def _rows_to_try(cfg: ScoringConfig, rows: Rows, tools: RowTools) -> list[int]:
    """Return the first row of every data source, except sources whose trajectories may score themselves."""
    custom = cfg.custom_reward_function.path is not None or cfg.reward.is_elsewhere
    return [row for row in rows.data_sources().values() if custom or not tools.scores_itself(rows[row])]


def check_columns(
    algorithm: AlgorithmConfig, weights: Collection[str], scores: Sequence[Score], split: str = "train"
) -> None:
    """Raise ConfigError if the config uses numbers that no scorer returns for the tried rows."""
    columns = [("reward.weights", name) for name in weights]
    if split == "train":
        columns += [("algorithm.gdpo_reward_keys", name) for name in algorithm.gdpo_reward_keys]
        if algorithm.filter_groups.enable and algorithm.filter_groups.metric not in FILTER_METRICS:
            columns.append(("algorithm.filter_groups.metric", algorithm.filter_groups.metric))
    for key, name in columns:
        # A failed score has no names of numbers; the ground truth need not have the form of a response.
        missing = [score for score in scores if score.status == "ok" and name not in (*score.extras, "score")]
        if missing:
            have = ", ".join(["score", *sorted(missing[0].extras)])
            raise ConfigError(
                f"{key}={name}: a scorer of data.{split}_files does not return a number of that name. It returns "
                f"{have}."
            )
