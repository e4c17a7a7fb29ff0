"""rltrain: synchronous PPO/GRPO training of language and vision-language models.

import rltrain
result = rltrain.train({"algorithm.adv_estimator": "grpo", "data.train_files": "train.parquet", ...})
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rltrain import commands  # noqa: F401 - so that python -m rltrain.COMMAND is found
from rltrain.common import __version__

if TYPE_CHECKING:
    from rltrain.agents.marks import tool
    from rltrain.api import RunResult, build, evaluate, sft, train
    from rltrain.common.errors import RltrainError
    from rltrain.config.load import load_config
    from rltrain.config.loaded import LoadedConfig
    from rltrain.run.fit import Trainer
    from rltrain.run.report.samples import read_samples
    from rltrain.run.report.table import read_metrics

__all__ = [
    "LoadedConfig", "RltrainError", "RunResult", "Trainer", "__version__", "build", "evaluate", "load_config",
    "read_metrics", "read_samples", "sft", "tool", "train",
]  # fmt: skip
# These names are imported on demand, because workers and --help do not need them.
_HOMES = dict.fromkeys(("RunResult", "build", "evaluate", "sft", "train"), "rltrain.api") | {
    "LoadedConfig": "rltrain.config.loaded",
    "RltrainError": "rltrain.common.errors",
    "Trainer": "rltrain.run.fit",
    "load_config": "rltrain.config.load",
    "read_metrics": "rltrain.run.report.table",
    "read_samples": "rltrain.run.report.samples",
    "tool": "rltrain.agents.marks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rltrain' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
