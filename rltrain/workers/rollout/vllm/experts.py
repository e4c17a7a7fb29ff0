"""Routing of vLLM's tokens, recorded per request.

vLLM can return the routing, but only from its second model runner and with prefix caching, whereas rltrain's sampler
runs in the first. So the routers' choices are recorded here instead of by vLLM's capturer, and split by the requests of
the step. CUDA graphs would skip the recording.
"""

from __future__ import annotations

import importlib
import weakref
from collections import defaultdict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.common.errors import ConfigError
from rltrain.models.routing import num_experts

Experts = NDArray[np.integer[Any]]


class ExpertNotes:
    """Routing of the computed tokens of every running request. runner: vLLM's, with its model of ``config``."""

    def __init__(self, runner: Any, config: Any) -> None:
        module: Any = None
        with suppress(ImportError):
            module = importlib.import_module("vllm.model_executor.layers.fused_moe.routed_experts_capturer")
        if not hasattr(module, "bind_routed_experts_capturer"):
            raise ConfigError(
                "actor_rollout_ref.actor.router_replay.mode=R3: this vLLM does not return router indices; 0.32 does. "
                "Use rollout.name=hf, or R2."
            )
        self._runner = weakref.ref(runner)
        self._dtype = np.uint8 if num_experts(config) <= 256 else np.int16
        # Choices of the last forward pass, by layer.
        self._chosen: dict[int, Any] = {}
        # Routing of each request by its random stream, because vLLM renames requests.
        self._parts: dict[Hashable, list[tuple[int, Experts]]] = defaultdict(list)
        module.bind_routed_experts_capturer(runner.get_model(), self)

    def capture(self, layer_id: int, topk_ids: Any) -> None:
        """Record a layer's choices [tokens, experts per token]. Called by vLLM's routers."""
        self._chosen[layer_id] = topk_ids

    def note(self, streams: Sequence[Hashable]) -> None:
        """Split the last forward pass by request. Called once per step, before its tokens are sampled.

        streams: the `RandomStream` of each request of the step.
        """
        runner = self._runner()
        assert runner is not None
        ends = runner.query_start_loc.np[: len(streams) + 1]
        by_layer = [self._chosen[layer][: ends[-1]].cpu().numpy() for layer in sorted(self._chosen)]
        chosen = np.stack(by_layer, 1).astype(self._dtype)
        starts = runner.input_batch.num_computed_tokens_cpu
        for stream, start, first, end in zip(streams, starts, ends, ends[1:], strict=False):
            self._parts[stream].append((int(start), chosen[first:end]))

    def of(self, stream: Hashable) -> list[Experts]:
        """Remove and return the routing of a completed request, in parts."""
        whole, end = list[Experts](), 0
        for start, part in self._parts.pop(stream, []):
            # vLLM computes tokens of preempted requests and rejected drafts again. Their earlier routing is dropped.
            if start < end:
                whole = [np.concatenate(whole)[:start]]
            whole.append(part)
            end = start + len(part)
        return whole

    def reset(self) -> None:
        """Drop the records of all requests."""
        self._parts.clear()
