"""What a rollout engine is built from, and the one place where it is built.

Every adapter takes the same record, so the table of engines (`rltrain.config.schema.engines`) can name adapters by
strings. An adapter is imported only by a worker that uses it: vLLM and SGLang take seconds to import and need not be
installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rltrain.base.device import Device
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.rollout import RolloutConfig
from rltrain.models.weights.spec import ModelSpec
from rltrain.workers.rollout.contract import RolloutEngine
from rltrain.workers.rollout.queue import Replica
from rltrain.workers.rollout.stops import StopTexts


@dataclass(frozen=True)
class EngineSettings:
    """The model, the keys under ``actor_rollout_ref.rollout``, and this process's part of the run."""

    rollout: RolloutConfig
    model: ModelSpec
    dtype: torch.dtype
    device: Device
    replica: Replica
    eos_token_ids: Sequence[int]
    """What ends an answer, whatever the model's files say."""
    max_model_len: int
    """Tokens of prompt and answer."""
    engines_sharing_memory: int = 1
    """Engines of this node that share one memory (on a CPU; else 1)."""
    images: bool = True
    """Prompts may have some, each of at most ``max_pixels``."""
    max_pixels: int | None = None
    section: str = "actor_rollout_ref.rollout"
    longest: str = "max_model_len"
    """Both, for messages: where its keys are, and the name of the one that bounds a text."""
    adapted: Mapping[str, int] = field(default_factory=dict)
    """By layer the rank of adapters that come beside the weights of ``model``; empty where there are none, or they come
    merged."""
    with_experts: bool = False
    """`Turn.experts` are asked for."""
    decode: Callable[[Sequence[int]], str] | None = None
    """The text of tokens, special ones included; None: no text ends an answer."""

    def stop_texts(self, stops: Sequence[str]) -> StopTexts:
        """What finds these texts."""
        assert self.decode or not stops, "an engine without a tokenizer has no stop texts"
        return StopTexts(stops, self.decode or (lambda tokens: ""))

    @property
    def eager(self) -> bool:
        """Whether the engine makes no graphs. On a CPU compiling them would take longer than most runs there."""
        return self.device.is_cpu if self.rollout.enforce_eager is None else self.rollout.enforce_eager


def make_engine(settings: EngineSettings) -> RolloutEngine:
    """The engine that ``rollout.name`` says."""
    module, _, name = ENGINES[settings.rollout.name].factory.partition(":")
    factory: Callable[[EngineSettings], RolloutEngine] = getattr(importlib.import_module(module), name)
    return factory(settings)
