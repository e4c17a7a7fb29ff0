"""Settings of a rollout engine, and the only place where engines are created.

Every adapter takes the same record, so the table of engines (`rltrain.config.schema.engines`) can refer to adapters by
name. An adapter is imported only by a worker that uses it, because vLLM and SGLang are optional and take seconds to
import.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rltrain.common.device import Device
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.rollout import RolloutConfig
from rltrain.data.media.videos import VideoSettings
from rltrain.models.weights.spec import ModelSpec
from rltrain.workers.rollout.contract import RolloutEngine
from rltrain.workers.rollout.queue import Replica
from rltrain.workers.rollout.stops import StopTexts


@dataclass(frozen=True)
class EngineSettings:
    """Model, keys under ``actor_rollout_ref.rollout``, and this process's part of the run."""

    rollout: RolloutConfig
    model: ModelSpec
    dtype: torch.dtype
    device: Device
    replica: Replica
    eos_token_ids: Sequence[int]
    """Ids of the tokens that end a response. The engine uses these instead of the ids in the model's files."""
    max_model_len: int
    """Maximum tokens of prompt and response."""
    engines_sharing_memory: int = 1
    """Engines of this node that share memory (on a CPU; else 1)."""
    images: bool = True
    """True if prompts may have images, each of at most ``max_pixels``."""
    max_pixels: int | None = None
    videos: VideoSettings | None = None
    """Limits of videos; None: prompts have no videos."""
    section: str = "actor_rollout_ref.rollout"
    longest: str = "max_model_len"
    """section and longest are for messages: the section of the keys, and the key that limits the length of a text."""
    adapted: Mapping[str, int] = field(default_factory=dict)
    """Ranks, by layer, of adapters that the engine applies itself; empty without adapters or with merged ones."""
    with_experts: bool = False
    """True if `Turn.experts` are needed."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Decoder of tokens, including special ones; None: no stop texts."""

    def stop_texts(self, stops: Sequence[str]) -> StopTexts:
        """Return a matcher for the stop texts."""
        assert self.decode or not stops, "an engine without a tokenizer has no stop texts"
        return StopTexts(stops, self.decode or (lambda tokens: ""))

    @property
    def eager(self) -> bool:
        """True if the engine captures no graphs. On a CPU compiling them would take longer than most runs."""
        return self.device.is_cpu if self.rollout.enforce_eager is None else self.rollout.enforce_eager


def make_engine(settings: EngineSettings) -> RolloutEngine:
    """Create the engine of ``rollout.name``."""
    module, _, name = ENGINES[settings.rollout.name].factory.partition(":")
    factory: Callable[[EngineSettings], RolloutEngine] = getattr(importlib.import_module(module), name)
    return factory(settings)
