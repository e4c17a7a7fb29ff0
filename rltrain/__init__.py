"""rltrain: synchronous PPO/GRPO training of language and vision-language models.

import rltrain
result = rltrain.train({"algorithm.adv_estimator": "grpo", "data.train_files": "train.parquet", ...})
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rltrain.api import RunResult, build, train
    from rltrain.config.load import load_config

__version__ = "0.1.0"
__all__ = ["RunResult", "__version__", "build", "load_config", "train"]
# Imported when asked for: a worker, or --help, needs none of it.
_HOMES = dict.fromkeys(("RunResult", "build", "train"), "rltrain.api") | {"load_config": "rltrain.config.load"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rltrain' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
