"""Which experts vLLM's tokens go to, noted request by request.

vLLM can return them itself, but only from its second model runner and through its prefix cache, and the sampler here
stands in the first. So what its routers choose is noted where vLLM's own capturer notes it, and is told apart by the
requests of the step. Graphs would run without these notes.
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

from rltrain.base.errors import ConfigError
from rltrain.models.routing import num_experts

Experts = NDArray[np.integer[Any]]


class ExpertNotes:
    """Of every request that runs, where the tokens went that vLLM has computed. runner: vLLM's, with its model of
    ``config``."""

    def __init__(self, runner: Any, config: Any) -> None:
        module: Any = None
        with suppress(ImportError):
            module = importlib.import_module("vllm.model_executor.layers.fused_moe.routed_experts_capturer")
        if not hasattr(module, "bind_routed_experts_capturer"):
            raise ConfigError(
                "actor_rollout_ref.actor.router_replay.mode=R3: this vLLM does not show what its routers choose; 0.32 "
                "does. Use rollout.name=hf, or R2."
            )
        self._runner = weakref.ref(runner)
        self._dtype = np.uint8 if num_experts(config) <= 256 else np.int16
        # Of the forward that was last: by layer.
        self._chosen: dict[int, Any] = {}
        # By the random numbers of the request: vLLM gives it another name than it was asked under.
        self._parts: dict[Hashable, list[tuple[int, Experts]]] = defaultdict(list)
        module.bind_routed_experts_capturer(runner.get_model(), self)

    def capture(self, layer_id: int, topk_ids: Any) -> None:
        """Called by vLLM's routers: [tokens, experts per token]."""
        self._chosen[layer_id] = topk_ids

    def note(self, streams: Sequence[Hashable]) -> None:
        """Tell the tokens of the forward that was last apart. Called once per step, before its tokens are drawn.

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
        """All tokens of a request that has ended, one part after the other, of which nothing is kept."""
        whole, end = list[Experts](), 0
        for start, part in self._parts.pop(stream, []):
            # What a request has lost its memory for is computed again, and drafts that were refused are too.
            if start < end:
                whole = [np.concatenate(whole)[:start]]
            whole.append(part)
            end = start + len(part)
        return whole

    def forget(self) -> None:
        """Drop what is noted of requests."""
        self._parts.clear()
