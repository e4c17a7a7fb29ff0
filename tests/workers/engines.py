"""Work for a single engine, without workers."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from rltrain.base.device import get_device
from rltrain.base.seeds import sample_seeds
from rltrain.config.schema.rollout import RolloutConfig
from rltrain.models.weights.spec import ModelSpec
from rltrain.workers.rollout.contract import Generation, Job, RolloutEngine, Sampling
from rltrain.workers.rollout.queue import JobQueue, Replica
from rltrain.workers.rollout.settings import EngineSettings, make_engine

EOS = 1
ALONE = Replica(number=0, count=1, member=0, size=1)
_CALLS = itertools.count()
_STORE = dist.HashStore()


class ModelInMemory(ModelSpec):
    """A model without a folder."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__("")
        object.__setattr__(self, "_config", config)

    def load_config(self) -> PretrainedConfig:
        return self._config


def engine_of(
    name: str,
    model: str | PretrainedConfig,
    rollout: RolloutConfig | None = None,
    *,
    device: str = "cpu",
    max_model_len: int = 64,
) -> RolloutEngine:
    """An engine in float32, as a worker makes it. model: a folder, or for ``hf`` a configuration."""
    rollout = rollout or RolloutConfig()
    rollout.name = name
    return make_engine(settings_of(model, rollout, device=device, max_model_len=max_model_len))


def settings_of(
    model: str | PretrainedConfig,
    rollout: RolloutConfig,
    *,
    dtype=torch.float32,
    device: str = "cpu",
    max_model_len: int = 64,
) -> EngineSettings:
    spec = ModelSpec(model) if isinstance(model, str) else ModelInMemory(model)
    return EngineSettings(rollout, spec, dtype, get_device(device), ALONE, [EOS], max_model_len=max_model_len)


def rollout_of(**keys) -> RolloutConfig:
    rollout = RolloutConfig()
    for name, value in keys.items():
        setattr(rollout, name, value)
    return rollout


def jobs_of(prompts: Sequence[np.ndarray], num_samples: int, step: int = 1, seed: int = 7) -> list[Job]:
    """One job a prompt."""
    seeds = sample_seeds(seed, step, range(len(prompts)), num_samples).reshape(-1, num_samples)
    return [Job(place, np.arange(num_samples), prompt, seeds[place]) for place, prompt in enumerate(prompts)]


def queue_of(jobs: Sequence[Job], num_dealt: int = 0, enough: int | None = None, must: int = 0) -> JobQueue:
    return JobQueue(jobs, num_dealt, ALONE, _STORE, f"test/{next(_CALLS)}", enough, must)


def generate(engine, sampling: Sampling, prompts: Sequence[np.ndarray], num_samples: int, step: int = 1) -> Generation:
    """Answers prompt by prompt, whatever the order in which they were served."""
    queue = queue_of(jobs_of(prompts, num_samples, step))
    return engine.generate(queue, sampling)
