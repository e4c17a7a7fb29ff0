"""rltrain: synchronous PPO/GRPO training of language and vision-language models.

import rltrain
result = rltrain.train({"algorithm.adv_estimator": "grpo", "data.train_files": "train.parquet", ...})
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rltrain.api import RunResult, build, evaluate, train
    from rltrain.config.load import load_config
    from rltrain.config.loaded import LoadedConfig
    from rltrain.errors import RltrainError
    from rltrain.report import read_metrics
    from rltrain.trainer.run import Trainer
    from rltrain.view import read_samples

__version__ = "0.2.0"
__all__ = [
    "LoadedConfig", "RltrainError", "RunResult", "Trainer", "__version__", "build", "evaluate", "load_config",
    "read_metrics", "read_samples", "train",
]  # fmt: skip
# Imported when asked for: a worker, or --help, needs none of it.
_HOMES = dict.fromkeys(("RunResult", "build", "evaluate", "train"), "rltrain.api") | {
    "LoadedConfig": "rltrain.config.loaded",
    "RltrainError": "rltrain.errors",
    "Trainer": "rltrain.trainer.run",
    "load_config": "rltrain.config.load",
    "read_metrics": "rltrain.report",
    "read_samples": "rltrain.view",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rltrain' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
