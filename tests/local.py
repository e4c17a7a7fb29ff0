"""A complete training step in this process: the real trainer, workers, models and scorers, without Ray."""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rltrain.config.check import check
from rltrain.config.load import load_config
from rltrain.config.schema import Config
from rltrain.rewards.scorers.registry import find_scorer
from rltrain.run.assemble import make_trainer
from rltrain.run.splits import Data, load_data, splits_of
from rltrain.runtime.calls import Call
from rltrain.runtime.group import WorkerGroup
from rltrain.runtime.samples import Request, assemble
from rltrain.trainer.plan import make_plan
from rltrain.trainer.ppo import PPOTrainer
from rltrain.trainer.validation import sampling_of
from rltrain.workers.hybrid import HybridWorker
from rltrain.workers.interface.tasks import GenerateTask

# Trainers of one process share a store; each counts its calls from a million of its own.
_RUNS = itertools.count(1)


class LocalGroup:
    """`WorkerGroup` of one rank, whose references are the objects themselves."""

    world = 1
    bytes_through_driver = 0
    nodes = (0,)
    ended = False

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.calls: list[str] = []

    call = WorkerGroup.call

    def bytes_between_nodes(self) -> Counter[str]:
        return Counter()

    def submit(self, calls: Sequence[Call], ranks: range | None = None, concurrent: bool = False) -> "LocalHandle":
        (call,) = calls
        self.calls.append(call.name)
        return LocalHandle(self, self.run(call))

    def run(self, call: Call) -> Any:
        (role,) = (each for each in self.worker.roles if call.role in [base.__name__ for base in type(each).__mro__])
        return getattr(role, call.method.__name__)(*map(self._resolve, call.args))

    def _resolve(self, arg: Any) -> Any:
        return assemble(arg, [part.ref for part in arg.parts]) if isinstance(arg, Request) else arg


class LocalHandle:
    """`Handle` of a finished call."""

    def __init__(self, group: LocalGroup, found: Any) -> None:
        self.group, self.found = group, found

    def collect(self, deadline_s=None, stream=None):
        if stream:
            stream.arrived(0, *self.group.run(stream.poll))
            stream.tick()
        return [self.found]

    def ready(self):
        return True


class LocalPool:
    """Scores with the scorer functions directly; ``twist(row, score)`` may change the score of every response."""

    def __init__(self, rows) -> None:
        self._rows = rows
        self.twist = lambda row, score: score

    def begin_scoring(self, split, total):
        return LocalScoring(self, split)

    def score(self, split, jobs):
        scores, accs = [], []
        for texts, rows, positions in jobs:
            for row, at in zip(rows.tolist(), positions.tolist(), strict=True):
                prompt = self._rows[split][row]
                verdict = find_scorer(prompt.data_source)(texts[at], prompt.ground_truth, prompt.extra_info)
                value = verdict["score"] if isinstance(verdict, dict) else verdict
                scores.append(float(self.twist(row, value)))
                accs.append(float(value > 0.5))
        nothing = np.zeros(len(scores))
        return {
            "score": np.array(scores),
            "scorer/acc": np.array(accs),
            "reward_failed": nothing,
            "reward_timeout": nothing,
        }


class LocalScoring:
    """`Scoring` of all responses at the end."""

    seconds = 0.0

    def __init__(self, pool, split) -> None:
        self._pool, self._split, self._jobs = pool, split, []

    def add(self, texts, rows, positions) -> None:
        self._jobs.append((texts, rows, positions))

    def advance(self) -> None:
        pass

    def collect(self):
        return self._pool.score(self._split, self._jobs)


_data_read: dict[tuple, Data] = {}


def _data_of(cfg: Config) -> Data:
    """Return `load_data`, cached by files, keys, model and tools, which are part of the prompts."""
    model, data, rollout = cfg.actor_rollout_ref.model, cfg.data, cfg.actor_rollout_ref.rollout
    if data.custom_cls:  # may return others each time
        return load_data(cfg)
    paths = [
        Path(file) for _, files, _ in splits_of(cfg) for file in ([files] if isinstance(files, str) else files or ())
    ]
    paths += sorted(Path(model.path).iterdir())
    marks = [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths]
    keys = (data, model, rollout.multi_turn, rollout.agent, rollout.limit_images, cfg.trainer.val_only)
    asked = (*marks, *map(repr, keys))
    if asked not in _data_read:
        _data_read[asked] = load_data(cfg)
    return _data_read[asked]


def local_trainer(arguments: list[str], twist=None) -> PPOTrainer:
    """Return a trainer over one worker in this process; needs a process group of one rank."""
    loaded = load_config(arguments)
    check(loaded)
    cfg = loaded.config
    data = _data_of(cfg)
    worker = HybridWorker(cfg, data.prompts, data.rows)
    group, pool = LocalGroup(worker), LocalPool(data.rows)
    pool.twist = twist or pool.twist
    scorers = pool if cfg.reward_model.runs_scorers and not cfg.sft.enabled else None  # as in `start_run`
    trainer = make_trainer(cfg, make_plan(cfg, len(data.prompts["train"]), images=data.images), data, group, scorers)
    policy = trainer.actor
    policy._calls = 1_000_000 * next(_RUNS)
    trainer.group, trainer.worker, trainer.pool, trainer.data = group, worker, pool, data
    rollout = cfg.actor_rollout_ref.rollout
    trainer.calls = itertools.count(policy._calls + 1000)
    trainer.experience_task = lambda: GenerateTask(
        "train",
        np.arange(4, dtype=np.int32),
        rollout.n,
        sampling_of(rollout, rollout, cfg.data, greedy=False),
        seed=1,
        step=1,
        call=next(trainer.calls),
    )
    return trainer
